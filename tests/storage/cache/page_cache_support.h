// SPDX-License-Identifier: Apache-2.0
//
// What the tests of PageCache share: real files in a fresh folder, and a gate before them that
// holds reads up, refuses them and lists them.
#ifndef ATTND_TESTS_STORAGE_CACHE_PAGE_CACHE_SUPPORT_H_
#define ATTND_TESTS_STORAGE_CACHE_PAGE_CACHE_SUPPORT_H_

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "storage/cache/page_cache.h"
#include "tests/storage/files/segment_samples.h"
#include "tests/temporary_folder.h"

namespace attnd::storage::test {

using Source = PageCache::Source;
using Want = PageCache::Want;
using Patience = PageCache::Patience;
using LeaseOr = absl::StatusOr<std::unique_ptr<PageCache::Lease>>;

inline constexpr std::chrono::seconds kGenerous{30};

// Until it holds; false if it never does.
bool Eventually(const std::function<bool()>& condition);

// A wait that ends soon.
Patience Briefly(bool partial = false);
bool AllNull(const std::vector<Want>& wants);

// Of all files of a test; open at first. Thread-safe.
class Gate {
 public:
  struct Read {
    int file = 0;
    std::vector<PageCache::PageId> pages;
  };
  void Close() { Set(0); }
  void Open() { Set(UINT64_MAX); }
  void LetThrough(uint64_t reads);
  // What reads give from now on, once they are let through.
  void Refuse(const absl::Status& status);
  // That have come to the gate, in order, whether they have been let through or not.
  std::vector<Read> reads() const;
  // For files: waits until it may pass; proceed's error ends that.
  absl::Status Pass(int file, std::span<const PageRead> reads, const Proceed& proceed);

 private:
  void Set(uint64_t allowed);
  mutable Mutex mutex_;
  CondVar changed_;
  uint64_t allowed_ ABSL_GUARDED_BY(mutex_) = UINT64_MAX;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::vector<Read> reads_ ABSL_GUARDED_BY(mutex_);
};

// A file of `pages` pages of each of `heads` heads.
SegmentFileHeader PagesHeader(uint32_t heads, uint32_t pages, uint32_t page_bytes, Random* random);
// Of any such geometry that a cache of kBytesMin takes.
SegmentFileHeader RandomPagesHeader(Random* random);

// The smallest cache there is, files, and what is in them.
class PageCacheTest : public testing::Test {
 protected:
  PageCacheTest();
  ~PageCacheTest() override;

  static PageCacheOptions Options(uint32_t readers) {
    PageCacheOptions options;
    options.guaranteed_bytes = PageCacheOptions::kBytesMin;
    options.readers = readers;
    return options;
  }
  void MakeCache(const PageCacheOptions& options);
  // Writes a file; gives its number.
  int MakeFile(const SegmentFileHeader& header);
  // Opens it behind the gate.
  std::shared_ptr<Source> AddSource(int file);
  // Both; its file's number is its place in sources_.
  void MakeSource(uint32_t heads, uint32_t pages, uint32_t page_bytes);
  // Turns a byte of the page on the disk.
  void Damage(int file, uint64_t head, uint32_t page);

  // By number within the file: head by head.
  Want WantOf(int file, uint64_t number) const;
  std::vector<Want> Wants(int file, uint64_t begin, uint64_t end) const;
  bool Holds(int file, const Want& want) const;
  // Every page is there, and the file's.
  bool AllHold(int file, const std::vector<Want>& wants) const;
  LeaseOr Fetch(std::vector<Want>* wants, const Patience& patience = {}) {
    return cache_->Fetch(*wants, patience);
  }
  // A thread that leases pages, finds the right ones or none, and says how it ended.
  std::thread Leases(int file, uint64_t begin, uint64_t end, const Patience& patience,
                     absl::Status* status);
  // Their read, the test's first, comes to the closed gate; nobody waits for it any more.
  bool BeginAndGiveUp(std::vector<Want>* wants);
  uint64_t reads() const { return gate_->reads().size(); }
  // Which files were read, in order.
  std::vector<int> Order() const;
  bool EventuallyRead(uint64_t pages);
  std::vector<PageCache::PageId> Ids(int file, uint64_t begin, uint64_t end) const;
  // Lets the sources go: all their memory is free in the end. The test's own leases and wants must
  // be gone.
  void ExpectNothingPinned();

  const attnd::test::TemporaryFolder folder_;
  const std::unique_ptr<FileSystem> files_ = MakePosixFileSystem();
  std::unique_ptr<IoQueue> queue_;  // of the test's own thread
  Random random_{TestSeed()};
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::shared_ptr<PageCache> cache_;
  std::vector<std::unique_ptr<Sample>> samples_;
  std::vector<std::shared_ptr<Source>> sources_;
};

}  // namespace attnd::storage::test

#endif  // ATTND_TESTS_STORAGE_CACHE_PAGE_CACHE_SUPPORT_H_
