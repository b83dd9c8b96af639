// SPDX-License-Identifier: Apache-2.0
//
// Goal: a segment is found by its name as long as any version of it lives, and nothing is kept of
// those that have ended. Method: segments that come and go by thousands, beside some that stay.
#include "engine/archive/named_segments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "attention/segment/paged_payload.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

using attention::Segment;
using testing::ElementsAre;
using testing::UnorderedElementsAre;

storage::ChainId NameOf(uint64_t number) {
  storage::ChainId name{};
  for (size_t i = 0; i < 8; ++i) name[i] = static_cast<uint8_t>(number >> (8 * i));
  return name;
}

std::shared_ptr<const Segment> MakeSegment(uint64_t number) {
  const ModelShape shape = MakeShape(1, 1, 1, 32, 32, DType::kBf16);
  auto segment = std::make_shared<const Segment>(
      number, attention::SegmentForm{shape, attention::kClusterIndexes, 16, 0}, 0);
  segment->origin()->SetOnce(std::make_shared<const SegmentOrigin>(NameOf(number), 0));
  return segment;
}

TEST(NamedSegmentsTest, WhatHasEndedIsForgotten) {
  NamedSegments named;
  std::vector<std::shared_ptr<const Segment>> kept;
  for (uint64_t number = 1; number <= 5000; ++number) {
    const auto segment = MakeSegment(number);
    named.Add(segment);
    if (number % 100 == 0) kept.push_back(segment);
    ASSERT_LE(named.size(), NamedSegments::kFew + 2 * kept.size() + 1) << number;
  }
  for (const auto& segment : kept) {
    EXPECT_THAT(named.Find(OriginOf(*segment)->name()), ElementsAre(segment));
  }
  EXPECT_THAT(named.Find(NameOf(4999)), ElementsAre());
}

// Two uploads of the same tokens: the other one's end takes nothing from this one.
TEST(NamedSegmentsTest, AnyOfOneNameIsFound) {
  NamedSegments named;
  auto first = MakeSegment(7);
  const auto second = MakeSegment(7);
  named.Add(first);
  named.Add(second);
  EXPECT_THAT(named.Find(NameOf(7)), UnorderedElementsAre(first, second));
  first.reset();
  EXPECT_THAT(named.Find(NameOf(7)), ElementsAre(second));
}

class Pages : public attention::PagedPayload {
 public:
  explicit Pages(absl::Status status) : status_(std::move(status)) {}
  attention::PageStore* store() const override { return nullptr; }
  absl::Status status() const override { return status_; }

 private:
  const absl::Status status_;
};

std::shared_ptr<const Segment> PagedVersion(const Segment& whole, absl::Status status) {
  return std::make_shared<const Segment>(
      whole.id(), whole.form(), 0, std::make_shared<Pages>(std::move(status)), whole.origin());
}

// A backend that reads no pages cannot use a paged one, however readable it is.
TEST(NamedSegmentsTest, WhatIsReadableDependsOnWhoReads) {
  const auto whole = MakeSegment(7);
  const auto paged = PagedVersion(*whole, absl::OkStatus());
  const auto damaged = PagedVersion(*whole, absl::DataLossError("bits"));
  const auto late = PagedVersion(*whole, absl::UnavailableError("no disk"));
  EXPECT_EQ(ReadableOf({whole, paged}, false), paged);
  EXPECT_EQ(ReadableOf({paged, whole}, true), whole);
  EXPECT_EQ(ReadableOf({damaged, whole}, false), whole);
  EXPECT_EQ(ReadableOf({damaged, late}, false), late) << "it may come back";
  EXPECT_EQ(ReadableOf({paged, damaged}, true), nullptr);
  EXPECT_EQ(ReadableOf({damaged}, false), nullptr);
  EXPECT_EQ(ReadableOf({}, true), nullptr);
}

TEST(SegmentOriginTest, TheFirstNameStaysForAllVersions) {
  const auto segment = MakeSegment(1);
  const Segment version(1, segment->form(), 0, nullptr, segment->origin());
  version.origin()->SetOnce(std::make_shared<const SegmentOrigin>(NameOf(2), 0));
  EXPECT_EQ(OriginOf(*segment)->name(), NameOf(1));
  EXPECT_EQ(OriginOf(version)->name(), NameOf(1));
}

}  // namespace
}  // namespace attnd::engine::test
