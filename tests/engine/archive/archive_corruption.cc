// SPDX-License-Identifier: Apache-2.0
//
// Goal: whatever happens to a sealed sequence's files, what comes back is right or DATA_LOSS, other
// sequences go on, and whoever seals the same tokens again makes it whole. Method: a real engine
// over a real data folder. In each round a sequence (a segment and a tail) is uploaded, sealed and
// closed, so that nothing of it is in memory; one of its two files is damaged; it is resumed, and
// if that goes through, its answers are compared with plain attention. Others, which nobody
// damages, are resumed now and then, also by an engine that was started anew: one with token ids,
// one without, and a fork and a truncation of these. Now and then, while a file is damaged, and at
// the end the catalogue of a copy of the folder is made again from its files: an engine on the copy
// must have these others, too, and of the damaged one what is right or nothing.
//
//   attnd_archive_corruption --flips=10000 --others=1000 --seed=7
#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "ctl/rebuild.h"
#include "engine/engine.h"
#include "storage/io/file_system.h"
#include "storage/io/io_queue.h"
#include "tests/engine/support.h"
#include "tests/temporary_folder.h"
#include "tests/test_seed.h"

namespace attnd::engine::test {
namespace {

namespace fs = std::filesystem;
using attnd::test::TemporaryFolder;

constexpr uint64_t kTokens = 600;       // a segment of 512 and a tail
constexpr uint64_t kLongTokens = 1300;  // two segments and a tail
constexpr uint64_t kOtherRounds = 50;  // so often the others are looked at, and a catalogue rebuilt
constexpr uint64_t kBlock = 4096;

enum Damage { kFlip, kFlips, kZeroSector, kSwapBlocks, kCut, kGone };
constexpr std::array<const char*, 6> kNames = {"one bit",          "2 to 10 bits", "zeroed sectors",
                                               "exchanged blocks", "cut",          "missing"};

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteFile(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

[[noreturn]] void Fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  std::exit(1);
}

void Must(const absl::Status& status, const char* what) {
  if (!status.ok()) Fail(std::string(what) + ": " + status.ToString());
}

template <typename T>
T Must(absl::StatusOr<T> value, const char* what) {
  if (!value.ok()) Fail(std::string(what) + ": " + value.status().ToString());
  return *std::move(value);
}

// What was acknowledged.
struct Sealed {
  uint64_t id = 0;
  History contents;
};

class Campaign {
 public:
  Campaign(uint64_t seed, uint64_t flips, uint64_t others) : random_(seed) {
    Restart();
    victim_ = Contents(kTokens);
    SealOthers();
    other_files_ = Files().size();
    for (size_t kind = 0; kind < kNames.size(); ++kind) left_[kind] = others / (kNames.size() - 2);
    left_[kFlip] = flips - flips / 2;
    left_[kFlips] = flips / 2;
  }
  ~Campaign() { engine_.reset(); }
  Campaign(const Campaign&) = delete;
  Campaign& operator=(const Campaign&) = delete;

  bool Run() {
    for (uint64_t round = 0; std::ranges::any_of(left_, [](uint64_t n) { return n > 0; });
         ++round) {
      const auto kind = static_cast<Damage>(round % kNames.size());
      if (left_[kind] > 0) Round(kind);
      if (round % kOtherRounds == 0) LookAtOthers(/*restart=*/round % 500 == 0);
    }
    LookAtOthers(/*restart=*/true);
    LookAtRebuilt(std::nullopt);
    std::printf("%" PRIu64 " catalogues rebuilt, each with all that nobody damaged\n", rebuilt_);
    for (size_t kind = 0; kind < kNames.size(); ++kind) {
      std::printf("%s: %" PRIu64 " times, all found but %" PRIu64 "\n", kNames[kind], done_[kind],
                  missed_[kind]);
    }
    return std::ranges::all_of(missed_, [](uint64_t missed) { return missed == 0; });
  }

 private:
  void Restart() {
    engine_.reset();
    engine_ = EngineOn(folder_.path());
  }

  static std::unique_ptr<Engine> EngineOn(const std::string& folder) {
    EngineOptions options = SmallOptions();
    options.archive.data_dir = folder;
    return MakeEngine(options, nullptr, 1);
  }

  OpenArgs Args() const {
    OpenArgs args = ArgsOf(shape_);
    args.fingerprint = "model";
    return args;
  }

  History Contents(uint64_t tokens) {
    History history(shape_);
    history.Append(0, RandomKv(shape_, tokens, &random_));
    return history;
  }

  // Its ids begin with first_id; 0: it has none.
  uint64_t Upload(const History& contents, uint32_t first_id) {
    const uint64_t tokens = contents.committed();
    std::vector<uint32_t> ids(first_id == 0 ? 0 : tokens);
    for (uint32_t i = 0; i < ids.size(); ++i) ids[i] = first_id + i;
    const uint64_t id = Must(engine_->Open(kTenant, Args()), "open");
    const Kv kv = contents.Slice(0, 0, tokens);
    AppendChunk chunk = ChunkOf(0, 0, kv);
    chunk.token_ids = ids;
    Must(engine_->Append(kTenant, kWriter, id, chunk), "append");
    Must(engine_->FinishPrefill(kTenant, kWriter, id, nullptr), "finish prefill");
    return id;
  }

  uint64_t SealAndClose(uint64_t id) {
    const uint64_t sealed = Must(engine_->Seal(kTenant, id, nullptr), "seal").sealed_id;
    Must(engine_->Close(kTenant, id), "close");
    return sealed;
  }

  // A fork inside the first segment, a truncation inside the second.
  void SealOthers() {
    for (const uint32_t first_id : {1u, 0u}) {
      const History whole = Contents(kLongTokens);
      History fork = whole, cut = whole;
      fork.Truncate(kTokens / 2);
      cut.Truncate(kLongTokens - kTokens);
      const uint64_t id = Upload(whole, first_id);
      const uint64_t forked = Must(engine_->Fork(kTenant, id, fork.committed()), "fork").id;
      others_.push_back({Must(engine_->Seal(kTenant, id, nullptr), "seal").sealed_id, whole});
      others_.push_back({SealAndClose(forked), fork});
      Must(engine_->Truncate(kTenant, id, cut.committed()).status(), "truncate");
      others_.push_back({SealAndClose(id), cut});
    }
  }

  // DataLoss or NotFound, or OK if it came back and answers as it should; anything else ends the
  // program.
  absl::Status ResumeAndCompare(Engine* engine, const Sealed& sealed) {
    const auto opened = engine->Resume(kTenant, Args(), sealed.id, nullptr);
    if (absl::IsDataLoss(opened.status()) || absl::IsNotFound(opened.status())) {
      return opened.status();
    }
    TestSequence sequence(engine, Must(opened, "resume").sequence_id, shape_);
    sequence.history = sealed.contents;
    const Message message(0, {QueryOnlyRow(&sequence, 0, 1, &random_)});
    const Answer answer = Send(engine, message);
    const absl::Status status = answer.row_status(0);
    if (!status.ok() && !absl::IsDataLoss(status)) Fail("decode: " + status.ToString());
    if (status.ok() && !IsDense(message, answer, 0)) Fail("A WRONG ANSWER");
    Must(engine->Close(kTenant, sequence.id), "close");
    return status;
  }

  void LookAtOthers(bool restart) {
    if (restart) Restart();
    LookAtOthers(engine_.get());
  }

  void LookAtOthers(Engine* engine) {
    for (const Sealed& other : others_) {
      const absl::Status status = ResumeAndCompare(engine, other);
      if (!status.ok()) Fail("a sequence that nobody damaged is lost: " + status.ToString());
    }
  }

  // On a copy, as it lies there while the engine that has the folder open does nothing.
  void LookAtRebuilt(const std::optional<Sealed>& damaged) {
    const TemporaryFolder copy;
    fs::copy(folder_.path(), copy.path(), fs::copy_options::recursive);
    const auto files = storage::MakePosixFileSystem();
    const auto queue = Must(storage::MakeIoQueue({}), "queue");
    const auto proceed = [](uint64_t, uint64_t) { return absl::OkStatus(); };
    Must(ctl::RebuildCatalogue(copy.path(), files.get(), queue.get(), proceed).status(), "rebuild");
    const auto engine = EngineOn(copy.path());
    LookAtOthers(engine.get());
    if (damaged.has_value() && ResumeAndCompare(engine.get(), *damaged).ok()) {
      Fail("a damaged sequence came back after a rebuild");
    }
    ++rebuilt_;
  }

  std::vector<fs::path> Files() const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder_.Path("segments"))) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
    std::ranges::sort(files, {}, [](const fs::path& path) { return path.filename().string(); });
    return files;
  }

  void Round(Damage kind) {
    const Sealed sealed{SealAndClose(Upload(victim_, 100000)), victim_};
    const std::vector<fs::path> files = Files();
    if (files.size() != other_files_ + 2) Fail("there should be two more files");
    const fs::path& file = files[other_files_ + random_.Below(2)];  // the newer ones
    const uint64_t quarantined = engine_->archive_stats().quarantined_files;
    Hurt(kind, file);
    if (rounds_++ % kOtherRounds == 0) LookAtRebuilt(sealed);
    ++done_[kind];
    --left_[kind];
    const absl::Status status = ResumeAndCompare(engine_.get(), sealed);
    if (absl::IsNotFound(status)) Fail("what the catalogue knows is not found");
    const uint64_t put_away = engine_->archive_stats().quarantined_files - quarantined;
    if (status.ok() || put_away != (kind == kGone ? 0 : 1)) {
      ++missed_[kind];
      std::printf("%s of %s: %s, %" PRIu64 " files in quarantine\n", kNames[kind],
                  file.filename().c_str(), status.ToString().c_str(), put_away);
    }
    Must(engine_->DropSealed(kTenant, sealed.id), "drop");
    RemoveWhatIsLeft();
  }

  // Damaged files, and the segment before or behind a damaged one, which nobody needs any more.
  void RemoveWhatIsLeft() {
    for (const auto& entry : fs::directory_iterator(folder_.Path("quarantine"))) {
      fs::remove(entry.path());
    }
  }

  void Hurt(Damage kind, const fs::path& path) {
    const std::string whole = ReadFile(path);
    std::string bytes = whole;
    while (kind != kGone && bytes == whole) Apply(kind, &bytes);
    kind == kGone ? static_cast<void>(fs::remove(path)) : WriteFile(path, bytes);
  }

  void Apply(Damage kind, std::string* bytes) {
    const uint64_t blocks = bytes->size() / kBlock;
    const auto at = bytes->begin();
    const auto block = [&] { return static_cast<ptrdiff_t>(random_.Below(blocks) * kBlock); };
    if (kind == kFlip || kind == kFlips) {
      for (uint64_t left = kind == kFlip ? 1 : 2 + random_.Below(9); left > 0; --left) {
        (*bytes)[random_.Below(bytes->size())] ^= static_cast<char>(1 << random_.Below(8));
      }
    } else if (kind == kZeroSector) {
      std::fill_n(at + block() + static_cast<ptrdiff_t>(512 * random_.Below(8)), 512, '\0');
    } else if (kind == kSwapBlocks) {
      const ptrdiff_t a = block(), b = block();
      if (a != b) std::swap_ranges(at + a, at + a + static_cast<ptrdiff_t>(kBlock), at + b);
    } else {
      bytes->resize(random_.Below(bytes->size()));
    }
  }

  const ModelShape shape_ = MakeShape(1, 2, 1, 32, 32, DType::kFp32);
  Random random_;
  const TemporaryFolder folder_;
  std::unique_ptr<Engine> engine_;
  History victim_{shape_};
  std::vector<Sealed> others_;
  size_t other_files_ = 0;  // of these
  uint64_t rounds_ = 0, rebuilt_ = 0;
  std::array<uint64_t, kNames.size()> left_{}, done_{}, missed_{};
};

}  // namespace
}  // namespace attnd::engine::test

ABSL_FLAG(uint64_t, flips, 10000, "rounds of flipped bits");
ABSL_FLAG(uint64_t, others, 1000, "rounds of all other damage together");
ABSL_FLAG(uint64_t, seed, attnd::test::TestSeed(), "of the damage");

int main(int argc, char** argv) {
  using namespace attnd::engine::test;  // NOLINT(google-build-using-namespace)
  absl::ParseCommandLine(argc, argv);
  const uint64_t seed = absl::GetFlag(FLAGS_seed);
  std::printf("seed %" PRIu64 "\n", seed);
  return Campaign(seed, absl::GetFlag(FLAGS_flips), absl::GetFlag(FLAGS_others)).Run() ? 0 : 1;
}
