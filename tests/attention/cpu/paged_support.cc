// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/cpu/paged_support.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "attention/segment/segment_loader.h"

namespace attnd::attention::test {
namespace {

class CopiedPayload : public PagedPayload {
 public:
  CopiedPayload(std::shared_ptr<const Segment> segment, CopyingStore* store)
      : segment_(std::move(segment)), store_(store) {}
  PageStore* store() const override { return store_; }
  absl::Status status() const override { return store_->status(); }
  size_t page_bytes() const { return PageGeometry(segment_->shape()).page_bytes(); }
  const std::byte* PageOf(const PageWant& want) const {
    return segment_->pages(want.layer, want.kv_head) + want.page * page_bytes();
  }

 private:
  const std::shared_ptr<const Segment> segment_;
  CopyingStore* const store_;
};

class CopiedPages : public PagePins {
 public:
  CopiedPages(size_t bytes, std::atomic<size_t>* pinned) : bytes_(bytes), pinned_(pinned) {
    ++*pinned_;
  }
  ~CopiedPages() override {
    std::fill(bytes_.begin(), bytes_.end(), std::byte{0xFF});
    --*pinned_;
  }
  std::byte* data() { return bytes_.data(); }

 private:
  std::vector<std::byte> bytes_;
  std::atomic<size_t>* const pinned_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PagePins>> CopyingStore::Fetch(std::span<PageWant> wants,
                                                              const PagePatience& patience) {
  EXPECT_FALSE(wants.empty());
  EXPECT_EQ(pinned_, 0u) << "nobody calls it who holds pins";
  if (on_fetch_) {
    if (absl::Status status = on_fetch_(patience); !status.ok()) return status;
  }
  const auto bytes_of = [](const PageWant& want) {
    return static_cast<const CopiedPayload*>(want.payload)->page_bytes();
  };
  uint64_t bytes = 0;
  for (const PageWant& want : wants) bytes += bytes_of(want);
  ++calls_;
  greatest_call_bytes_ = std::max(greatest_call_bytes_, bytes);
  auto pages = std::make_unique<CopiedPages>(bytes, &pinned_);
  std::byte* next = pages->data();
  for (PageWant& want : wants) {
    want.data = nullptr;
    if (lost_ && lost_(want)) continue;
    if (patience.partial && in_time_ && !in_time_(want)) continue;
    std::memcpy(next, static_cast<const CopiedPayload*>(want.payload)->PageOf(want),
                bytes_of(want));
    want.data = next;
    want.was_there = was_there_;
    next += bytes_of(want);
  }
  return pages;
}

TestSequence Paged(const TestSequence& sequence, CopyingStore* store) {
  TestSequence paged = sequence;
  auto view = std::make_shared<SequenceView>(*sequence.view);
  for (auto& segment : view->segments) {
    SegmentLoader loader(segment->id(), segment->form(), segment->first_position(),
                         std::make_shared<CopiedPayload>(segment, store));
    EXPECT_TRUE(loader.allocated());
    std::memcpy(loader.index_block().data(), segment->index_block().data(),
                segment->index_block().size());
    EXPECT_TRUE(loader.Check().ok());
    segment = loader.Finish();
  }
  paged.view = std::move(view);
  return paged;
}

}  // namespace attnd::attention::test
