// SPDX-License-Identifier: Apache-2.0
//
// Segment files of random geometry and contents, and whether a file is the one that was written.
#ifndef ATTND_TESTS_STORAGE_FILES_SEGMENT_SAMPLES_H_
#define ATTND_TESTS_STORAGE_FILES_SEGMENT_SAMPLES_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "storage/files/segment_file.h"
#include "tests/storage/io/memory_storage.h"
#include "tests/test_seed.h"

namespace attnd::storage::test {

using attnd::test::TestSeed;

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  // 0 .. n - 1
  uint64_t Below(uint64_t n) {
    return std::uniform_int_distribution<uint64_t>(0, n - 1)(generator_);
  }
  uint32_t Below32(uint32_t n) { return static_cast<uint32_t>(Below(n)); }
  std::vector<std::byte> Bytes(uint64_t count);

 private:
  std::mt19937_64 generator_;
};

// A header and the contents that go with it, at an odd address.
class Sample : public SegmentSource {
 public:
  Sample(SegmentFileHeader header, Random* random);

  const SegmentFileHeader& header() const { return header_; }
  const std::byte* Index(uint64_t head) const override;
  const std::byte* Pages(uint64_t head) const override;
  const std::byte* Page(uint64_t head, uint32_t page) const {
    return Pages(head) + uint64_t{page} * header_.page_bytes;
  }
  uint64_t index_bytes() const { return header_.heads() * header_.index_head_bytes; }
  uint64_t page_bytes() const { return header_.heads() * header_.pages * header_.page_bytes; }

 private:
  SegmentFileHeader header_;
  std::vector<std::byte> indexes_;  // from its second byte on
  std::vector<std::byte> pages_;    // the same
};

// Of every kind: with and without indexes, pages, metadata; sizes on, off and about whole blocks.
SegmentFileHeader RandomHeader(Random* random);
// Two heads of everything, a few blocks; no size is one of whole blocks.
SegmentFileHeader SmallHeader(Random* random);

// What reading parts of a file gives: the error, if all went well but the bytes are wrong it is
// Internal. Nothing is written outside of the targets.
absl::Status ReadIndexesOf(const SegmentFile& file, const Sample& sample, IoQueue* queue);
absl::Status ReadAllPagesOf(const SegmentFile& file, const Sample& sample, IoQueue* queue);
using PageNumbers = std::vector<std::pair<uint64_t, uint32_t>>;  // head, page
absl::Status ReadPagesOf(const SegmentFile& file, const Sample& sample, const PageNumbers& pages,
                         IoQueue* queue);
// Any `count` of them, some twice.
PageNumbers SomePages(const SegmentFileHeader& header, size_t count, Random* random);

// A disk with a folder "/data", durable.
std::unique_ptr<MemoryStorage> MakeDisk(uint64_t seed);
// Nothing is open or under way, and nothing was done that is forbidden.
void ExpectTidy(const MemoryStorage& disk);

absl::Status Write(const Sample& sample, FileSystem* files, IoQueue* queue,
                   const std::string& path);
// Opens the file and checks that it is the sample, by every way of reading it.
absl::Status Check(const Sample& sample, FileSystem* files, IoQueue* queue, const std::string& path,
                   Random* random);

}  // namespace attnd::storage::test

#endif  // ATTND_TESTS_STORAGE_FILES_SEGMENT_SAMPLES_H_
