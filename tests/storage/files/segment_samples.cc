// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/files/segment_samples.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::storage::test {
namespace {

constexpr std::byte kGuard{0x5c};

// Room for what is read, at an odd address, between guards.
class Target {
 public:
  explicit Target(uint64_t bytes) : bytes_(bytes), room_(bytes + 2, kGuard) {}
  std::byte* data() { return room_.data() + 1; }
  bool guarded() const { return room_.front() == kGuard && room_[bytes_ + 1] == kGuard; }

 private:
  const uint64_t bytes_;
  std::vector<std::byte> room_;
};

absl::Status Wrong(const std::string& what) {
  return absl::InternalError(absl::StrCat("WRONG BYTES HANDED OUT: ", what));
}

ChainId RandomChain(Random* random) {
  ChainId chain;
  for (uint8_t& byte : chain) byte = static_cast<uint8_t>(random->Below(256));
  return chain;
}

// A size about as large as `scale`: whole blocks one time in three, or one byte beside them.
uint64_t RandomBytes(Random* random, uint64_t scale) {
  const uint64_t any = 1 + random->Below(scale);
  const uint64_t blocks = (any + 4095) / 4096 * 4096;
  switch (random->Below(6)) {
    case 0:
    case 1:
      return blocks;
    case 2:
      return blocks + 1;
    case 3:
      return blocks - 1;
    default:
      return any;
  }
}

std::string RandomText(Random* random, uint64_t bytes) {
  const auto data = random->Bytes(bytes);
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

}  // namespace

std::vector<std::byte> Random::Bytes(uint64_t count) {
  std::vector<std::byte> bytes(count);
  for (uint64_t at = 0; at < count; at += sizeof(uint64_t)) {
    const uint64_t word = generator_();
    std::memcpy(bytes.data() + at, &word, std::min<uint64_t>(sizeof(word), count - at));
  }
  return bytes;
}

Sample::Sample(SegmentFileHeader header, Random* random) : header_(std::move(header)) {
  indexes_ = random->Bytes(index_bytes() + 1);
  pages_ = random->Bytes(page_bytes() + 1);
}

const std::byte* Sample::Index(uint64_t head) const {
  return indexes_.data() + 1 + head * header_.index_head_bytes;
}

const std::byte* Sample::Pages(uint64_t head) const {
  return pages_.data() + 1 + head * header_.pages * header_.page_bytes;
}

SegmentFileHeader RandomHeader(Random* random) {
  SegmentFileHeader header;
  header.kind = random->Below(2) == 0 ? SegmentKind::kClusters : SegmentKind::kTail;
  header.chain = RandomChain(random);
  if (random->Below(2) == 0) header.parent = RandomChain(random);
  header.first_position = random->Below(uint64_t{1} << 40);
  header.tokens = random->Below32(10000);
  header.unclustered = random->Below32(header.tokens + 1);
  header.layers = 1 + random->Below32(4);
  header.kv_heads = 1 + random->Below32(3);
  const uint64_t scale = random->Below(4) == 0 ? 700000 : 9000;
  if (random->Below(4) != 0) header.index_head_bytes = RandomBytes(random, scale);
  header.page_bytes =
      static_cast<uint32_t>(RandomBytes(random, random->Below(8) == 0 ? 600000 : 9000));
  const uint64_t run_bytes_max = 1000000;
  if (random->Below(5) != 0) {
    header.pages =
        1 + random->Below32(static_cast<uint32_t>(run_bytes_max / header.page_bytes) % 100 + 1);
  }
  if (random->Below(4) != 0) {
    header.metadata =
        RandomText(random, RandomBytes(random, random->Below(4) == 0 ? 1000000 : 5000));
  }
  return header;
}

SegmentFileHeader SmallHeader(Random* random) {
  SegmentFileHeader header;
  header.chain = RandomChain(random);
  header.parent = RandomChain(random);
  header.first_position = 8192;
  header.tokens = 77;
  header.unclustered = 5;
  header.layers = 2;
  header.kv_heads = 1;
  header.index_head_bytes = 300;
  header.page_bytes = 700;
  header.pages = 7;
  header.metadata = RandomText(random, 500);
  return header;
}

absl::Status ReadIndexesOf(const SegmentFile& file, const Sample& sample, IoQueue* queue) {
  Target to(sample.index_bytes());
  const absl::Status status = file.ReadIndexes(queue, to.data(), {});
  if (!to.guarded()) return Wrong("outside of the indexes");
  ATTND_RETURN_IF_ERROR(status);
  const bool same = std::equal(to.data(), to.data() + sample.index_bytes(), sample.Index(0));
  return same ? absl::OkStatus() : Wrong("indexes");
}

absl::Status ReadAllPagesOf(const SegmentFile& file, const Sample& sample, IoQueue* queue) {
  Target to(sample.page_bytes());
  const absl::Status status = file.ReadAllPages(queue, to.data(), {});
  if (!to.guarded()) return Wrong("outside of the pages");
  ATTND_RETURN_IF_ERROR(status);
  const bool same = std::equal(to.data(), to.data() + sample.page_bytes(), sample.Pages(0));
  return same ? absl::OkStatus() : Wrong("pages");
}

absl::Status ReadPagesOf(const SegmentFile& file, const Sample& sample, const PageNumbers& pages,
                         IoQueue* queue) {
  const uint32_t page_bytes = sample.header().page_bytes;
  std::vector<Target> targets;
  std::vector<PageRead> reads;
  targets.reserve(pages.size());
  for (const auto& [head, page] : pages) {
    targets.emplace_back(page_bytes);
    reads.push_back({head, page, targets.back().data()});
  }
  const absl::Status status = file.ReadPages(queue, reads, {});
  for (const Target& target : targets) {
    if (!target.guarded()) return Wrong("outside of a page");
  }
  ATTND_RETURN_IF_ERROR(status);
  for (const PageRead& read : reads) {
    if (!std::equal(read.to, read.to + page_bytes, sample.Page(read.head, read.page))) {
      return Wrong(absl::StrCat("page ", read.page, " of head ", read.head));
    }
  }
  return absl::OkStatus();
}

PageNumbers SomePages(const SegmentFileHeader& header, size_t count, Random* random) {
  PageNumbers pages;
  for (size_t i = 0; i < count && header.pages > 0; ++i) {
    pages.emplace_back(random->Below(header.heads()), random->Below32(header.pages));
    // Neighbours, often.
    if (random->Below(2) == 0 && pages.back().second + 1 < header.pages) {
      pages.emplace_back(pages.back().first, pages.back().second + 1);
    }
  }
  return pages;
}

std::unique_ptr<MemoryStorage> MakeDisk(uint64_t seed) {
  auto disk = std::make_unique<MemoryStorage>(seed);
  EXPECT_TRUE(disk->MakeFolder("/data").ok());
  EXPECT_TRUE(disk->SyncFolder("/").ok());
  return disk;
}

void ExpectTidy(const MemoryStorage& disk) {
  const MemoryCounters counters = disk.counters();
  EXPECT_EQ(counters.open_files, 0u);
  EXPECT_EQ(counters.queued, 0u);
  EXPECT_EQ(counters.syncs_after_error, 0u);
}

absl::Status Write(const Sample& sample, FileSystem* files, IoQueue* queue,
                   const std::string& path) {
  return WriteSegmentFile(sample.header(), sample, files, queue, path, {});
}

absl::Status Check(const Sample& sample, FileSystem* files, IoQueue* queue, const std::string& path,
                   Random* random) {
  ATTND_ASSIGN_OR_RETURN(const auto file, SegmentFile::Open(files, queue, path));
  if (file->header() != sample.header()) return Wrong("header");
  ATTND_RETURN_IF_ERROR(ReadIndexesOf(*file, sample, queue));
  ATTND_RETURN_IF_ERROR(ReadAllPagesOf(*file, sample, queue));
  const PageNumbers pages = SomePages(sample.header(), 20, random);
  ATTND_RETURN_IF_ERROR(ReadPagesOf(*file, sample, pages, queue));
  return file->Verify(queue, {});
}

}  // namespace attnd::storage::test
