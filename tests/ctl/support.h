// SPDX-License-Identifier: Apache-2.0
//
// Segment and tail files that are right in every way but their contents, of any chain, and a
// catalogue that knows them: what the tests of attnctl damage and lose.
#ifndef ATTND_TESTS_CTL_SUPPORT_H_
#define ATTND_TESTS_CTL_SUPPORT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ctl/catalogue_contents.h"
#include "storage/catalogue/catalogue.h"
#include "storage/catalogue/data_folder.h"
#include "storage/files/segment_file.h"
#include "storage/io/file_system.h"
#include "storage/io/io_queue.h"

namespace attnd::ctl::test {

inline constexpr uint64_t kSegmentTokens = 32;  // of every segment
inline constexpr uint64_t kTailTokens = 5;      // of every tail

storage::ChainId ChainOf(uint64_t number);  // in no order

// One layer and KV head; contents follow from the number, the index is right.
struct SampleFile {
  uint64_t number = 0;
  storage::ChainId chain{};
  storage::ChainId parent{};
  uint64_t segments_before = 0;
  std::string tenant = "tenant";
  uint64_t sealed_id = 0;  // of a tail; 0: a segment
  int64_t sealed_unix_s = 1000;

  storage::SegmentFileHeader Header() const;
  storage::SegmentRecord SegmentRecord(int64_t used_unix_s) const;
  storage::SequenceRecord SequenceRecord() const;
};
// A megabyte of them for each head's index and pages.
class Zeros : public storage::SegmentSource {
 public:
  const std::byte* Index(uint64_t /*head*/) const override { return zeros_.data(); }
  const std::byte* Pages(uint64_t /*head*/) const override { return zeros_.data(); }

 private:
  const std::vector<std::byte> zeros_ = std::vector<std::byte>(1 << 20);
};

// Durable, as a seal writes it.
absl::Status WriteSample(const SampleFile& sample, const storage::DataFolder& folder,
                         storage::FileSystem* files, storage::IoQueue* queue);

std::unique_ptr<storage::IoQueue> ThreadQueue();

// "" if they hold the same records, or what differs.
std::string Difference(const CatalogueContents& a, const CatalogueContents& b);

}  // namespace attnd::ctl::test

#endif  // ATTND_TESTS_CTL_SUPPORT_H_
