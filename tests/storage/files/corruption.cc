// SPDX-License-Identifier: Apache-2.0
//
// Goal: damage to a segment file is always found, and no wrong byte is handed out. Method: files of
// random geometry on a disk in memory; each is damaged anew in each round, once or several times:
// bits flipped, sectors and blocks zeroed, blocks and pages exchanged, blocks taken from another
// file, cut, lengthened, overwritten. A file opened afterwards, and one that was open before, must
// hand out right bytes or DataLoss; somebody must see it; and so must Verify. Segment file tests do
// the same for every bit of one small file.
//
//   attnd_corruption --flips=10000 --others=10000 --seed=7
#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/files/segment_layout.h"
#include "tests/storage/files/segment_samples.h"
#include "tests/storage/io/memory_storage.h"
#include "tests/test_seed.h"

namespace attnd::storage::test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr char kPath[] = "/data/01.seg";
constexpr char kOther[] = "/data/02.seg";
constexpr uint64_t kSectorBytes = 512;
constexpr uint64_t kRoundsOfFile = 50;

enum Damage { kFlip, kFlips, kZeroSector, kZeroBlocks, kBlocks, kPages, kForeign, kLength, kRange };
constexpr std::array<const char*, 9> kNames = {
    "one bit",         "2 to 10 bits",   "zeroed sectors", "zeroed blocks", "exchanged blocks",
    "exchanged pages", "another file's", "another length", "overwritten"};

// One file, to be damaged again and again.
class Target {
 public:
  static absl::StatusOr<std::unique_ptr<Target>> Make(uint64_t seed) {
    std::unique_ptr<Target> target(new Target(seed));
    ATTND_RETURN_IF_ERROR(Write(target->other_, target->disk_.get(), target->queue_.get(), kOther));
    ATTND_RETURN_IF_ERROR(Write(target->sample_, target->disk_.get(), target->queue_.get(), kPath));
    ATTND_ASSIGN_OR_RETURN(target->opened_,
                           SegmentFile::Open(target->disk_.get(), target->queue_.get(), kPath));
    target->bytes_ = target->disk_->MutableBytes(kPath);
    target->whole_ = *target->bytes_;
    return target;
  }

  // False if the damage happened to change nothing.
  bool Hurt(Damage damage) {
    *bytes_ = whole_;
    Apply(damage);
    return *bytes_ != whole_;
  }

  // OK if it was found; otherwise what went wrong.
  absl::Status Find() {
    const auto opened = SegmentFile::Open(disk_.get(), queue_.get(), kPath);
    ATTND_RETURN_IF_ERROR(RightOrLost(opened.status()));
    bool lost = !opened.ok(), unused = false;
    if (opened.ok()) {
      if ((*opened)->header() != sample_.header()) return absl::InternalError("A WRONG HEADER");
      ATTND_RETURN_IF_ERROR(ReadAll(**opened, &lost));
    }
    ATTND_RETURN_IF_ERROR(ReadAll(*opened_, &unused));
    if (!lost) return absl::InternalError("nobody saw it");
    // A file that was opened does not know what came to be behind its end.
    if (absl::IsDataLoss(opened_->Verify(queue_.get(), {})) || bytes_->size() > whole_.size()) {
      return absl::OkStatus();
    }
    return absl::InternalError("Verify did not see it");
  }

 private:
  explicit Target(uint64_t seed)
      : random_(seed),
        sample_(random_.Below(3) == 0 ? RandomHeader(&random_) : SmallHeader(&random_), &random_),
        other_(Cousin(sample_.header()), &random_),
        disk_(MakeDisk(seed)),
        queue_(disk_->MakeQueue()) {}

  // The same geometry under another name.
  static SegmentFileHeader Cousin(SegmentFileHeader header) {
    header.chain[7] ^= 1;
    return header;
  }

  static absl::Status RightOrLost(const absl::Status& status) {
    return absl::IsDataLoss(status) ? absl::OkStatus() : status;
  }

  absl::Status ReadAll(const SegmentFile& file, bool* lost) {
    const PageNumbers pages = SomePages(sample_.header(), 6, &random_);
    for (const absl::Status& status :
         {ReadIndexesOf(file, sample_, queue_.get()), ReadAllPagesOf(file, sample_, queue_.get()),
          ReadPagesOf(file, sample_, pages, queue_.get())}) {
      ATTND_RETURN_IF_ERROR(RightOrLost(status));
      *lost |= !status.ok();
    }
    return absl::OkStatus();
  }

  std::byte* At(uint64_t offset) { return bytes_->data() + offset; }
  uint64_t AnyBlock() { return random_.Below(whole_.size() / kBlockBytes) * kBlockBytes; }
  uint64_t AnyPage() {
    const SegmentFileHeader& header = sample_.header();
    const SegmentLayout layout = *LayOut(header, header.metadata.size());
    return layout.RunOffset(random_.Below(header.heads())) +
           random_.Below(header.pages) * header.page_bytes;
  }

  void Apply(Damage damage) {
    switch (damage) {
      case kFlip:
        return Flip();
      case kFlips:
        for (uint64_t left = 2 + random_.Below(9); left > 0; --left) Flip();
        return;
      case kZeroSector:
        std::fill_n(At(random_.Below(whole_.size() / kSectorBytes) * kSectorBytes), kSectorBytes,
                    std::byte{0});
        return;
      case kZeroBlocks: {
        const uint64_t first = AnyBlock();
        const uint64_t count = 1 + random_.Below(std::min<uint64_t>(4, Blocks() - first / 4096));
        std::fill_n(At(first), count * kBlockBytes, std::byte{0});
        return;
      }
      case kBlocks: {
        const uint64_t a = AnyBlock(), b = AnyBlock();
        if (a != b) std::swap_ranges(At(a), At(a) + kBlockBytes, At(b));
        return;
      }
      case kPages:
        return ExchangePages();
      case kForeign: {
        const uint64_t from = AnyBlock();
        std::copy_n(disk_->MutableBytes(kOther)->data() + from, kBlockBytes, At(from));
        return;
      }
      case kLength:
        bytes_->resize(random_.Below(2) == 0 ? random_.Below(Blocks() + 3) * kBlockBytes
                                             : random_.Below(whole_.size() + kBlockBytes));
        return;
      case kRange: {
        const uint64_t from = random_.Below(whole_.size());
        const uint64_t count = 1 + random_.Below(std::min<uint64_t>(9000, whole_.size() - from));
        std::ranges::copy(random_.Bytes(count), At(from));
        return;
      }
    }
  }

  uint64_t Blocks() const { return whole_.size() / kBlockBytes; }
  void Flip() { *At(random_.Below(whole_.size())) ^= std::byte{1} << random_.Below(8); }
  void ExchangePages() {
    const uint32_t bytes = sample_.header().page_bytes;
    if (sample_.header().pages == 0) return;
    const uint64_t a = AnyPage(), b = AnyPage();
    if (a != b) std::swap_ranges(At(a), At(a) + bytes, At(b));
  }

  Random random_;
  const Sample sample_, other_;
  const std::unique_ptr<MemoryStorage> disk_;
  const std::unique_ptr<IoQueue> queue_;
  std::unique_ptr<SegmentFile> opened_;  // before any damage
  Bytes* bytes_ = nullptr;               // as they are
  Bytes whole_;                          // as they were written
};

// Rounds of one seed after the other, until each kind has had as many as it should.
class Campaign {
 public:
  Campaign(uint64_t seed, uint64_t flips, uint64_t others) : seed_(seed) {
    for (size_t kind = 0; kind < kNames.size(); ++kind) left_[kind] = others / (kNames.size() - 2);
    left_[kFlip] = flips - flips / 2;
    left_[kFlips] = flips / 2;
  }

  bool Run() {
    while (std::ranges::any_of(left_, [](uint64_t left) { return left > 0; })) OneFile();
    for (size_t kind = 0; kind < kNames.size(); ++kind) {
      std::printf("%s: %" PRIu64 " times, all found but %" PRIu64 "\n", kNames[kind], done_[kind],
                  missed_[kind]);
    }
    return std::ranges::all_of(missed_, [](uint64_t missed) { return missed == 0; });
  }

 private:
  void OneFile() {
    const uint64_t seed = seed_++;
    auto target = Target::Make(seed);
    if (!target.ok()) {
      std::printf("seed %" PRIu64 ": %s\n", seed, target.status().ToString().c_str());
      std::abort();
    }
    for (uint64_t round = 0; round < kRoundsOfFile; ++round) {
      const auto kind = static_cast<Damage>(round % kNames.size());
      if (left_[kind] == 0 || !(*target)->Hurt(kind)) continue;
      --left_[kind];
      ++done_[kind];
      const absl::Status found = (*target)->Find();
      if (found.ok()) continue;
      ++missed_[kind];
      std::printf("seed %" PRIu64 ", round %" PRIu64 ", %s: %s\n", seed, round, kNames[kind],
                  found.ToString().c_str());
    }
  }

  uint64_t seed_;
  std::array<uint64_t, kNames.size()> left_{}, done_{}, missed_{};
};

}  // namespace
}  // namespace attnd::storage::test

ABSL_FLAG(uint64_t, flips, 10000, "rounds of flipped bits");
ABSL_FLAG(uint64_t, others, 10000, "rounds of all other damage together");
ABSL_FLAG(uint64_t, seed, attnd::test::TestSeed(), "of the first file");

int main(int argc, char** argv) {
  using namespace attnd::storage::test;  // NOLINT(google-build-using-namespace)
  absl::ParseCommandLine(argc, argv);
  const uint64_t seed = absl::GetFlag(FLAGS_seed);
  std::printf("seed %" PRIu64 "\n", seed);
  return Campaign(seed, absl::GetFlag(FLAGS_flips), absl::GetFlag(FLAGS_others)).Run() ? 0 : 1;
}
