// SPDX-License-Identifier: Apache-2.0
#include "tests/ctl/support.h"

#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/policy/policy.h"
#include "attention/segment/pages.h"
#include "attention/segment/segment.h"
#include "engine/archive/records.h"

namespace attnd::ctl::test {
namespace {

using storage::SegmentFileHeader;
using storage::SegmentKind;

ModelShape Shape() {
  ModelShape shape;
  shape.layers = shape.query_heads = shape.kv_heads = 1;
  shape.head_dim = shape.value_dim = 16;
  shape.dtype = DType::kFp32;
  shape.softmax_scale = 1;
  return shape;
}

// Random pages; an index of one cluster whose tokens lie backwards.
class Source : public storage::SegmentSource {
 public:
  Source(const SegmentFileHeader& header, uint64_t seed)
      : index_(header.index_head_bytes), pages_(uint64_t{header.pages} * header.page_bytes) {
    std::mt19937_64 random(seed);
    for (std::byte& byte : pages_) byte = static_cast<std::byte>(random() & 0x3f);
    if (index_.empty()) return;
    const attention::IndexLayout layout({Shape(), attention::kClusterIndexes, header.tokens, 0});
    const uint32_t clusters = 1, starts[] = {0, header.tokens};
    std::memcpy(index_.data(), &clusters, sizeof(clusters));
    std::memcpy(index_.data() + layout.clusters.starts, starts, sizeof(starts));
    for (uint32_t place = 0; place < header.tokens; ++place) {
      const auto token = static_cast<uint16_t>(header.tokens - 1 - place);
      std::memcpy(index_.data() + layout.positions + place * sizeof(token), &token, sizeof(token));
    }
  }
  const std::byte* Index(uint64_t) const override { return index_.data(); }
  const std::byte* Pages(uint64_t) const override { return pages_.data(); }

 private:
  std::vector<std::byte> index_, pages_;
};

}  // namespace

storage::ChainId ChainOf(uint64_t number) {
  storage::ChainId chain{};
  std::mt19937_64 random(number);
  for (uint8_t& byte : chain) byte = static_cast<uint8_t>(random());
  return chain;
}

SegmentFileHeader SampleFile::Header() const {
  const bool tail = sealed_id != 0;
  SegmentFileHeader header;
  header.kind = tail ? SegmentKind::kTail : SegmentKind::kClusters;
  header.chain = chain;
  header.parent = parent;
  header.first_position = segments_before * kSegmentTokens;
  header.tokens = static_cast<uint32_t>(tail ? kTailTokens : kSegmentTokens);
  header.layers = header.kv_heads = 1;
  header.page_bytes = static_cast<uint32_t>(attention::PageGeometry(Shape()).page_bytes());
  const uint64_t end = header.first_position + header.tokens;
  header.pages = static_cast<uint32_t>(tail ? engine::TailPages(header.first_position, end)
                                            : attention::PageGeometry::PagesFor(header.tokens));
  if (!tail) {
    header.index_head_bytes =
        attention::IndexLayout({Shape(), attention::kClusterIndexes, header.tokens, 0}).head_bytes;
  }
  engine::FileMetadata metadata;
  metadata.tenant = tenant;
  metadata.args.fingerprint = "model";
  metadata.args.shape = Shape();
  metadata.token_ids.push_back({header.first_position, std::vector<uint32_t>(header.tokens, 7)});
  if (tail) {
    metadata.args.policy = attention::ParsePolicy("dense").value();
    metadata.sealed_id = sealed_id;
    metadata.tokens = end;
    metadata.sealed_unix_s = sealed_unix_s;
  } else {
    metadata.key_bounds = {1};
  }
  header.metadata = engine::EncodeMetadata(metadata);
  return header;
}

storage::SegmentRecord SampleFile::SegmentRecord(int64_t used_unix_s) const {
  const SegmentFileHeader header = Header();
  return {chain,
          parent,
          tenant,
          number,
          storage::SegmentFileBytes(header).value(),
          header.first_position,
          header.tokens,
          used_unix_s};
}

storage::SequenceRecord SampleFile::SequenceRecord() const {
  const SegmentFileHeader header = Header();
  return {sealed_id,
          tenant,
          parent,
          number,
          storage::SegmentFileBytes(header).value(),
          header.first_position + header.tokens,
          sealed_unix_s,
          sealed_unix_s};
}

absl::Status WriteSample(const SampleFile& sample, const storage::DataFolder& folder,
                         storage::FileSystem* files, storage::IoQueue* queue) {
  const SegmentFileHeader header = sample.Header();
  return storage::WriteSegmentFile(header, Source(header, sample.number), files, queue,
                                   folder.SegmentPath(sample.number), {});
}

std::unique_ptr<storage::IoQueue> ThreadQueue() {
  storage::IoQueueOptions options;
  options.kind = storage::IoQueueOptions::Kind::kThreads;
  options.threads = 1;
  return storage::MakeIoQueue(options).value();
}

std::string Difference(const CatalogueContents& a, const CatalogueContents& b) {
  if (a.segments.size() != b.segments.size() || a.sequences.size() != b.sequences.size()) {
    return absl::StrCat(a.segments.size(), " segments and ", a.sequences.size(), " sequences, not ",
                        b.segments.size(), " and ", b.sequences.size());
  }
  for (const auto& [chain, record] : a.segments) {
    const auto found = b.segments.find(chain);
    if (found == b.segments.end() || !(found->second == record)) {
      return absl::StrCat("the segment of file ", record.file);
    }
  }
  for (const auto& [id, record] : a.sequences) {
    const auto found = b.sequences.find(id);
    if (found == b.sequences.end() || !(found->second == record)) {
      return absl::StrCat("sequence ", id);
    }
  }
  return "";
}

}  // namespace attnd::ctl::test
