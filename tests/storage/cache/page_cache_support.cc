// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/cache/page_cache_support.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "common/status.h"
#include "storage/files/segment_layout.h"

namespace attnd::storage::test {
namespace {

// A real file behind a gate.
class GatedFile final : public SegmentFile {
 public:
  GatedFile(int number, std::shared_ptr<Gate> gate, std::unique_ptr<SegmentFile> file)
      : number_(number), gate_(std::move(gate)), file_(std::move(file)) {}
  const SegmentFileHeader& header() const override { return file_->header(); }
  uint64_t bytes() const override { return file_->bytes(); }
  absl::Status ReadIndexes(IoQueue* queue, std::byte* to, const Proceed& proceed) const override {
    return file_->ReadIndexes(queue, to, proceed);
  }
  absl::Status ReadPages(IoQueue* queue, std::span<const PageRead> reads,
                         const Proceed& proceed) const override {
    ATTND_RETURN_IF_ERROR(gate_->Pass(number_, reads, proceed));
    return file_->ReadPages(queue, reads, proceed);
  }
  absl::Status ReadAllPages(IoQueue* queue, std::byte* to, const Proceed& proceed) const override {
    return file_->ReadAllPages(queue, to, proceed);
  }
  absl::Status Verify(IoQueue* queue, const Proceed& proceed) const override {
    return file_->Verify(queue, proceed);
  }

 private:
  const int number_;
  const std::shared_ptr<Gate> gate_;
  const std::unique_ptr<SegmentFile> file_;
};

}  // namespace

bool Eventually(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + kGenerous;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

Patience Briefly(bool partial) {
  return {std::chrono::steady_clock::now() + std::chrono::milliseconds(1), partial, nullptr};
}

bool AllNull(const std::vector<Want>& wants) {
  return std::all_of(wants.begin(), wants.end(),
                     [](const Want& want) { return want.data == nullptr; });
}

void Gate::LetThrough(uint64_t reads) {
  MutexLock lock(mutex_);
  allowed_ += reads;
  changed_.NotifyAll();
}

void Gate::Set(uint64_t allowed) {
  MutexLock lock(mutex_);
  allowed_ = allowed;
  changed_.NotifyAll();
}

void Gate::Refuse(const absl::Status& status) {
  MutexLock lock(mutex_);
  status_ = status;
}

std::vector<Gate::Read> Gate::reads() const {
  MutexLock lock(mutex_);
  return reads_;
}

absl::Status Gate::Pass(int file, std::span<const PageRead> reads, const Proceed& proceed) {
  MutexLock lock(mutex_);
  Read& read = reads_.emplace_back();
  read.file = file;
  for (const PageRead& page : reads) read.pages.push_back({page.head, page.page});
  while (allowed_ == 0) {
    ATTND_RETURN_IF_ERROR(proceed());
    static_cast<void>(changed_.WaitFor(mutex_, std::chrono::milliseconds(5)));
  }
  if (allowed_ != UINT64_MAX) --allowed_;
  return status_;
}

SegmentFileHeader PagesHeader(uint32_t heads, uint32_t pages, uint32_t page_bytes, Random* random) {
  SegmentFileHeader header;
  header.chain[0] = static_cast<uint8_t>(random->Below(256));
  header.chain[1] = static_cast<uint8_t>(random->Below(256));
  header.layers = heads;
  header.kv_heads = 1;
  header.tokens = pages * 16;
  header.pages = pages;
  header.page_bytes = page_bytes;
  return header;
}

SegmentFileHeader RandomPagesHeader(Random* random) {
  const uint64_t most = PagePool::page_bytes_max(PageCacheOptions::kBytesMin);
  uint64_t page_bytes = uint64_t{512} << random->Below(5);  // 512 .. 8192
  if (random->Below(2) == 0) page_bytes = 1 + random->Below(12000);
  if (random->Below(8) == 0) page_bytes = 1 + random->Below(most);
  const uint32_t pages = 1 + random->Below32(120);
  return PagesHeader(1 + random->Below32(5), pages, static_cast<uint32_t>(page_bytes), random);
}

PageCacheTest::PageCacheTest() {
  auto queue = MakeIoQueue({});
  EXPECT_TRUE(queue.ok()) << queue.status();
  queue_ = *std::move(queue);
}

PageCacheTest::~PageCacheTest() {
  gate_->Open();
  if (cache_ != nullptr) cache_->Stop();
}

void PageCacheTest::MakeCache(const PageCacheOptions& options) {
  auto cache = PageCache::Create(options);
  ASSERT_TRUE(cache.ok()) << cache.status();
  cache_ = *std::move(cache);
}

int PageCacheTest::MakeFile(const SegmentFileHeader& header) {
  const int number = static_cast<int>(samples_.size());
  samples_.push_back(std::make_unique<Sample>(header, &random_));
  const std::string path = folder_.Path(std::to_string(number));
  EXPECT_EQ(Write(*samples_.back(), files_.get(), queue_.get(), path), absl::OkStatus());
  return number;
}

std::shared_ptr<Source> PageCacheTest::AddSource(int file) {
  auto opened = SegmentFile::Open(files_.get(), queue_.get(), folder_.Path(std::to_string(file)));
  EXPECT_TRUE(opened.ok()) << opened.status();
  auto source = cache_->Add(std::make_unique<GatedFile>(file, gate_, *std::move(opened)));
  EXPECT_TRUE(source.ok()) << source.status();
  return *std::move(source);
}

void PageCacheTest::MakeSource(uint32_t heads, uint32_t pages, uint32_t page_bytes) {
  sources_.push_back(AddSource(MakeFile(PagesHeader(heads, pages, page_bytes, &random_))));
}

void PageCacheTest::Damage(int file, uint64_t head, uint32_t page) {
  const SegmentFileHeader& header = samples_[static_cast<size_t>(file)]->header();
  const auto layout = LayOut(header, header.metadata.size());
  ASSERT_TRUE(layout.ok());
  const uint64_t at = layout->RunOffset(head) + uint64_t{page} * header.page_bytes;
  std::fstream stream(folder_.Path(std::to_string(file)),
                      std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(at));
  const int byte = stream.get();
  stream.seekp(static_cast<std::streamoff>(at));
  stream.put(static_cast<char>(byte ^ 0x10));
  ASSERT_TRUE(stream.flush().good());
}

Want PageCacheTest::WantOf(int file, uint64_t number) const {
  const uint32_t pages = samples_[static_cast<size_t>(file)]->header().pages;
  return {sources_[static_cast<size_t>(file)], number / pages,
          static_cast<uint32_t>(number % pages)};
}

std::vector<Want> PageCacheTest::Wants(int file, uint64_t begin, uint64_t end) const {
  std::vector<Want> wants;
  for (uint64_t number = begin; number < end; ++number) wants.push_back(WantOf(file, number));
  return wants;
}

bool PageCacheTest::Holds(int file, const Want& want) const {
  const Sample& sample = *samples_[static_cast<size_t>(file)];
  return want.data != nullptr &&
         std::memcmp(want.data, sample.Page(want.head, want.page), sample.header().page_bytes) == 0;
}

bool PageCacheTest::AllHold(int file, const std::vector<Want>& wants) const {
  return std::all_of(wants.begin(), wants.end(),
                     [&](const Want& want) { return Holds(file, want); });
}

std::vector<PageCache::PageId> PageCacheTest::Ids(int file, uint64_t begin, uint64_t end) const {
  std::vector<PageCache::PageId> ids;
  for (const Want& want : Wants(file, begin, end)) ids.push_back({want.head, want.page});
  return ids;
}

std::thread PageCacheTest::Leases(int file, uint64_t begin, uint64_t end, const Patience& patience,
                                  absl::Status* status) {
  return std::thread([=, this] {
    std::vector<Want> wants = Wants(file, begin, end);
    const auto lease = Fetch(&wants, patience);
    *status = lease.status();
    EXPECT_TRUE(lease.ok() ? AllHold(file, wants) : AllNull(wants));
  });
}

// A reader that comes too late drops what nobody waits for: then once more.
bool PageCacheTest::BeginAndGiveUp(std::vector<Want>* wants) {
  return Eventually([&] {
    EXPECT_TRUE(absl::IsDeadlineExceeded(Fetch(wants, Briefly()).status()));
    return reads() == 1;
  });
}

std::vector<int> PageCacheTest::Order() const {
  std::vector<int> order;
  for (const Gate::Read& read : gate_->reads()) order.push_back(read.file);
  return order;
}

bool PageCacheTest::EventuallyRead(uint64_t pages) {
  return Eventually([&] { return cache_->stats().read_pages == pages; });
}

void PageCacheTest::ExpectNothingPinned() {
  EXPECT_EQ(cache_->stats().pinned_bytes, 0u);
  sources_.clear();
  EXPECT_TRUE(Eventually([&] { return cache_->stats().resident_bytes == 0; }));
}

}  // namespace attnd::storage::test
