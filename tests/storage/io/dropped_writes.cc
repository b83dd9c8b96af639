// SPDX-License-Identifier: Apache-2.0
//
// Goal: whenever the power fails, every file that was acknowledged is there, whole, and what was
// not is absent or whole. Method: a data folder on a disk in memory that keeps no more than it was
// told to sync, and tears the rest between sectors (memory_storage.h). For each seed: files are
// written, removed and put into quarantine at random until the power fails at a random change;
// afterwards every file is compared with what was written, in several lives of one folder.
//
//   attnd_dropped_writes --seeds=1000 --seed=7
#include <cinttypes>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/catalogue/data_folder.h"
#include "tests/storage/files/segment_samples.h"
#include "tests/storage/io/memory_storage.h"
#include "tests/test_seed.h"

namespace attnd::storage::test {
namespace {

constexpr char kRoot[] = "/data";
constexpr int kLives = 4;
constexpr int kOperationsMax = 12;  // of one life

struct Totals {
  uint64_t crashes = 0;
  uint64_t acknowledged = 0;  // files found whole after a crash, as they must be
  uint64_t in_doubt = 0;      // files found whole that might have been absent
  uint64_t temporary = 0;     // left for the start to remove
  uint64_t absent = 0;        // not acknowledged, and gone
};

// What must be in the folder, and what may be.
struct Known {
  std::map<uint64_t, Sample> acknowledged;
  std::map<uint64_t, Sample> in_doubt;  // a write or a removal that may have happened
};

// One folder's lives. The first error says what was lost.
class Lives {
 public:
  Lives(uint64_t seed, Totals* totals) : random_(seed), disk_(seed), totals_(totals) {}

  absl::Status Run() {
    // Before anything is promised: making the folder itself is not cut short.
    ATTND_RETURN_IF_ERROR(DataFolder::OpenWithSecret(&disk_, kRoot, Secret{}).status());
    for (int life = 0; life < kLives; ++life) {
      ATTND_ASSIGN_OR_RETURN(const DataFolder folder,
                             DataFolder::OpenWithSecret(&disk_, kRoot, Secret{}));
      const auto queue = disk_.MakeQueue(1 + random_.Below32(8));
      disk_.PowerOffAfter(random_.Below(60));
      for (uint64_t left = 1 + random_.Below(kOperationsMax); left > 0 && disk_.power(); --left) {
        ATTND_RETURN_IF_ERROR(Operate(folder, queue.get()));
      }
      disk_.Crash();
      ++totals_->crashes;
      ATTND_RETURN_IF_ERROR(CheckAll());
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Operate(const DataFolder& folder, IoQueue* queue) {
    const uint64_t choice = known_.acknowledged.empty() ? 0 : random_.Below(8);
    if (choice < 6) return WriteOne(folder, queue);
    auto file = known_.acknowledged.begin();
    std::advance(file, random_.Below(known_.acknowledged.size()));
    // Whether it happened or not: nobody is promised that a file is gone.
    const uint64_t number = file->first;
    known_.in_doubt.insert(known_.acknowledged.extract(file));
    if (choice == 6) {
      disk_.Remove(folder.SegmentPath(number)).IgnoreError();
    } else {
      folder.Quarantine(number).IgnoreError();
    }
    return absl::OkStatus();
  }

  absl::Status WriteOne(const DataFolder& folder, IoQueue* queue) {
    const uint64_t number = ++last_number_;
    SegmentFileHeader header = SmallHeader(&random_);
    header.pages = 1 + random_.Below32(1500);  // up to some four writes of each head
    const Sample sample(header, &random_);
    const absl::Status written = Write(sample, &disk_, queue, folder.SegmentPath(number));
    // Only the power fails here.
    if (!written.ok() && disk_.power()) return written;
    (written.ok() ? known_.acknowledged : known_.in_doubt).emplace(number, sample);
    return absl::OkStatus();
  }

  // As a start does: all that is listed is somebody's and whole, and all that was acknowledged is
  // listed.
  absl::Status CheckAll() {
    ATTND_ASSIGN_OR_RETURN(const DataFolder folder,
                           DataFolder::OpenWithSecret(&disk_, kRoot, Secret{}));
    ATTND_ASSIGN_OR_RETURN(const auto stored, folder.ListSegments());
    std::map<uint64_t, std::string> there;
    for (const StoredFile& file : stored) {
      if (file.temporary) {
        ATTND_RETURN_IF_ERROR(disk_.Remove(file.path));
        ++totals_->temporary;
      } else {
        there.emplace(file.number, file.path);
      }
    }
    const auto queue = disk_.MakeQueue();
    for (const auto& [number, sample] : known_.acknowledged) {
      if (there.erase(number) == 0) return absl::DataLossError(absl::StrCat("file ", number));
      ATTND_RETURN_IF_ERROR(
          Check(sample, &disk_, queue.get(), folder.SegmentPath(number), &random_));
      ++totals_->acknowledged;
    }
    return CheckInDoubt(folder, queue.get(), &there);
  }

  absl::Status CheckInDoubt(const DataFolder& folder, IoQueue* queue,
                            std::map<uint64_t, std::string>* there) {
    for (const auto& [number, sample] : known_.in_doubt) {
      if (there->erase(number) == 0) {
        ++totals_->absent;
        continue;
      }
      ATTND_RETURN_IF_ERROR(Check(sample, &disk_, queue, folder.SegmentPath(number), &random_));
      ++totals_->in_doubt;
      // As the start's collection of orphans.
      ATTND_RETURN_IF_ERROR(disk_.Remove(folder.SegmentPath(number)));
    }
    if (!there->empty()) return absl::InternalError("nobody's: " + there->begin()->second);
    // What was removed just now may come back after the next crash.
    return absl::OkStatus();
  }

  Random random_;
  MemoryStorage disk_;
  Totals* const totals_;
  Known known_;
  uint64_t last_number_ = 0;
};

}  // namespace
}  // namespace attnd::storage::test

ABSL_FLAG(uint64_t, seeds, 1000, "how many folders");
ABSL_FLAG(uint64_t, seed, attnd::test::TestSeed(), "of the first folder");

int main(int argc, char** argv) {
  using namespace attnd::storage::test;  // NOLINT(google-build-using-namespace)
  absl::ParseCommandLine(argc, argv);
  const uint64_t first = absl::GetFlag(FLAGS_seed);
  const uint64_t seeds = absl::GetFlag(FLAGS_seeds);
  std::printf("seeds %" PRIu64 " to %" PRIu64 "\n", first, first + seeds - 1);
  Totals totals;
  uint64_t lost = 0;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    const absl::Status status = Lives(seed, &totals).Run();
    if (status.ok()) continue;
    std::printf("seed %" PRIu64 ": %s\n", seed, status.ToString().c_str());
    ++lost;
  }
  std::printf("%" PRIu64 " crashes: %" PRIu64 " acknowledged files whole, %" PRIu64
              " others whole, %" PRIu64 " absent, %" PRIu64 " temporary\n",
              totals.crashes, totals.acknowledged, totals.in_doubt, totals.absent,
              totals.temporary);
  std::printf("%" PRIu64 " seeds, %" PRIu64 " with a loss\n", seeds, lost);
  // A campaign in which nothing happened has shown nothing.
  const bool idle = totals.acknowledged == 0 || totals.absent == 0;
  return lost > 0 || idle ? 1 : 0;
}
