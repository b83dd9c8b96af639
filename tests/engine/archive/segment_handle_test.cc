// SPDX-License-Identifier: Apache-2.0
//
// Goal: a segment is found by its name as long as any version of it lives, and nothing is kept of
// those that have ended; a file that no record names goes with its last user, and no file that a
// record names does. Method: segments that come and go by thousands, beside some that stay; each
// order in which a file's users and its record end.
#include "engine/archive/segment_handle.h"

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

// A segment with a handle, which `handles` may be null for.
std::shared_ptr<const Segment> MakeSegment(uint64_t number, SegmentHandles* handles) {
  const ModelShape shape = MakeShape(1, 1, 1, 32, 32, DType::kBf16);
  auto segment = std::make_shared<const Segment>(
      number, attention::SegmentForm{shape, attention::kClusterIndexes, 16, 0}, 0);
  const auto handle = std::make_shared<const SegmentHandle>(NameOf(number), nullptr);
  if (handles != nullptr) handles->Add(handle);
  segment->origin()->SetOnce(handle);
  handle->AddVersion(segment);
  return segment;
}

TEST(SegmentHandlesTest, WhatHasEndedIsForgotten) {
  SegmentHandles handles;
  std::vector<std::shared_ptr<const Segment>> kept;
  for (uint64_t number = 1; number <= 5000; ++number) {
    const auto segment = MakeSegment(number, &handles);
    if (number % 100 == 0) kept.push_back(segment);
    ASSERT_LE(handles.size(), SegmentHandles::kFew + 2 * kept.size() + 1) << number;
  }
  for (const auto& segment : kept) {
    const auto handle = HandleOf(*segment);
    EXPECT_THAT(handles.Find(handle->name()), ElementsAre(handle));
    EXPECT_THAT(handle->versions(), ElementsAre(segment));
  }
  EXPECT_THAT(handles.Find(NameOf(4999)), ElementsAre());
}

// Two uploads of the same tokens: the other one's end takes nothing from this one.
TEST(SegmentHandlesTest, AnyOfOneNameIsFound) {
  SegmentHandles handles;
  auto first = MakeSegment(7, &handles);
  const auto second = MakeSegment(7, &handles);
  EXPECT_THAT(VersionsOf(handles.Find(NameOf(7))), UnorderedElementsAre(first, second));
  first.reset();
  EXPECT_THAT(VersionsOf(handles.Find(NameOf(7))), ElementsAre(second));
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
TEST(SegmentHandlesTest, WhatIsReadableDependsOnWhoReads) {
  const auto whole = MakeSegment(7, nullptr);
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

TEST(SegmentHandleTest, VersionsShareTheFirstHandle) {
  const auto whole = MakeSegment(1, nullptr);
  const auto handle = HandleOf(*whole);
  auto paged = PagedVersion(*whole, absl::OkStatus());
  paged->origin()->SetOnce(std::make_shared<const SegmentHandle>(NameOf(2), nullptr));
  EXPECT_EQ(HandleOf(*paged), handle);
  handle->AddVersion(paged);
  EXPECT_THAT(handle->versions(), ElementsAre(whole, paged));
  paged.reset();
  EXPECT_THAT(handle->versions(), ElementsAre(whole));
}

TEST(SegmentHandleTest, KnowsTheNewestFile) {
  const auto handle = HandleOf(*MakeSegment(1, nullptr));
  EXPECT_FALSE(handle->HasFile(0));
  const auto file = std::make_shared<StoredFile>(5, false, std::weak_ptr<StoredFile::Remove>());
  handle->SetFile(file);
  EXPECT_TRUE(handle->HasFile(5));
  EXPECT_FALSE(handle->HasFile(4));
  EXPECT_EQ(handle->file(), file);
}

TEST(SegmentHandleDeathTest, AVersionOfAnotherSegmentIsRefused) {
  const auto one = MakeSegment(1, nullptr);
  const auto other = MakeSegment(1, nullptr);
  EXPECT_DEATH(HandleOf(*one)->AddVersion(other), "a version's slot holds its handle");
}

class StoredFileTest : public testing::Test {
 protected:
  std::shared_ptr<StoredFile> File(bool recorded) {
    return std::make_shared<StoredFile>(9, recorded, remove_);
  }

  std::vector<uint64_t> removed_;
  std::shared_ptr<const StoredFile::Remove> remove_ = std::make_shared<const StoredFile::Remove>(
      [this](uint64_t number) { removed_.push_back(number); });
};

TEST_F(StoredFileTest, AFileWithoutARecordGoesWithItsLastUser) {
  const auto file = File(/*recorded=*/false);
  {
    auto first = std::make_unique<StoredFile::Use>(file->AddUser());
    const StoredFile::Use second = std::move(*first);  // one user still
    const StoredFile::Use third = file->AddUser();
    first.reset();
    EXPECT_THAT(removed_, ElementsAre());
  }
  EXPECT_THAT(removed_, ElementsAre(9));
}

TEST_F(StoredFileTest, ARecordedFileStays) {
  const auto file = File(/*recorded=*/true);
  { const StoredFile::Use use = file->AddUser(); }
  const auto later = File(/*recorded=*/false);
  {
    const StoredFile::Use use = later->AddUser();
    later->SetRecorded();
  }
  EXPECT_THAT(removed_, ElementsAre());
}

TEST_F(StoredFileTest, ADroppedFileIsLeftToItsUsersIfItHasAny) {
  const auto file = File(/*recorded=*/true);
  EXPECT_FALSE(file->LeaveToUsers()) << "the caller deletes it";
  const auto read = File(/*recorded=*/true);
  {
    const StoredFile::Use use = read->AddUser();
    EXPECT_TRUE(read->LeaveToUsers());
    EXPECT_THAT(removed_, ElementsAre());
  }
  EXPECT_THAT(removed_, ElementsAre(9));
}

TEST_F(StoredFileTest, NothingIsDeletedAfterTheArchiveHasEnded) {
  const auto file = File(/*recorded=*/false);
  {
    const StoredFile::Use use = file->AddUser();
    remove_.reset();
  }
  EXPECT_THAT(removed_, ElementsAre());
}

}  // namespace
}  // namespace attnd::engine::test
