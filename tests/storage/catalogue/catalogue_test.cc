// SPDX-License-Identifier: Apache-2.0
//
// Goal: a catalogue holds what was committed, all of a commit or nothing, through closing and
// opening, for one writer and any readers; its numbers are given once. Method: random commits
// beside a plain model; everything that must be refused, once.
#include "storage/catalogue/catalogue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/catalogue/checked_store.h"
#include "storage/catalogue/rocksdb_instance.h"
#include "tests/storage/catalogue/catalogue_support.h"

namespace attnd::storage::test {
namespace {

using testing::HasSubstr;
using Mode = Catalogue::Mode;

class CatalogueTest : public testing::Test {
 protected:
  const TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path() + "/catalogue";
  const testing::ScopedTrace trace_{__FILE__, __LINE__,
                                    testing::Message() << "seed " << TestSeed()};
  Random random_{TestSeed()};
  Model model_;

  void Commit(Catalogue* catalogue, const CatalogueChanges& changes) {
    const absl::Status status = catalogue->Commit(changes);
    ASSERT_TRUE(status.ok()) << status;
    model_.Apply(changes);
  }
};

TEST_F(CatalogueTest, RandomCommitsAndReopening) {
  auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  for (int step = 0; step < 150; ++step) {
    SCOPED_TRACE(step);
    ASSERT_NO_FATAL_FAILURE(Commit(catalogue.get(), model_.RandomChanges(&random_)));
    if (random_.Below(10) == 0) {
      catalogue.reset();
      catalogue = OpenOrFail(folder_);
      ASSERT_NE(catalogue, nullptr);
    }
    if (random_.Below(5) == 0) {
      ASSERT_EQ(model_.Compare(*catalogue), absl::OkStatus());
    }
  }
  EXPECT_EQ(model_.Compare(*catalogue), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(catalogue->FindSegment(ChainId{}).status()));
  EXPECT_TRUE(absl::IsNotFound(catalogue->FindSequence(1).status()));
}

TEST_F(CatalogueTest, ManyRecordsComeInOrder) {
  constexpr uint64_t kRecords = 20000;
  auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  CatalogueChanges changes;
  for (uint64_t i = 1; i <= kRecords; ++i) {
    // Ids in no order, of one to eight bytes.
    changes.segments.push_back(RandomSegment(&random_, ChainOf(i << 20)));
    changes.sequences.push_back(
        RandomSequence(&random_, 1 + (i * 0x9e3779b97f4a7c15 >> (1 + i % 60))));
    if (i % 1000 != 0) continue;
    ASSERT_NO_FATAL_FAILURE(Commit(catalogue.get(), std::exchange(changes, {})));
  }
  EXPECT_EQ(model_.segments.size(), kRecords);
  EXPECT_EQ(model_.Compare(*catalogue), absl::OkStatus());
  catalogue.reset();
  catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  EXPECT_EQ(model_.Compare(*catalogue), absl::OkStatus());
}

TEST_F(CatalogueTest, ACommitIsDoneOrNot) {
  auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  ASSERT_NO_FATAL_FAILURE(Commit(catalogue.get(), model_.RandomChanges(&random_)));
  std::vector<CatalogueChanges> bad(5);
  for (CatalogueChanges& changes : bad) {
    changes.segments.push_back(RandomSegment(&random_, ChainOf(1)));
    changes.sequences.push_back(RandomSequence(&random_, 32));
    changes.dropped_segments.push_back(ChainOf(2));
  }
  bad[0].segments.emplace_back();
  bad[1].sequences.emplace_back();
  bad[2].segments[0].file_bytes += 1;
  bad[3].sequences[0].tenant.assign(kTenantBytesMax + 1, 'x');
  bad[4].dropped_sequences.resize(kChangesMax);
  for (const CatalogueChanges& changes : bad) {
    const absl::Status status = catalogue->Commit(changes);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(model_.Compare(*catalogue), absl::OkStatus());
  }
}

TEST_F(CatalogueTest, WhatIsAddedAndDroppedIsThere) {
  auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  CatalogueChanges changes;
  changes.segments.push_back(RandomSegment(&random_, ChainOf(1)));
  changes.dropped_segments.push_back(ChainOf(1));
  changes.sequences.push_back(RandomSequence(&random_, 5));
  changes.dropped_sequences.push_back(5);
  ASSERT_NO_FATAL_FAILURE(Commit(catalogue.get(), changes));
  EXPECT_TRUE(catalogue->FindSegment(ChainOf(1)).ok());
  EXPECT_TRUE(catalogue->FindSequence(5).ok());
  EXPECT_EQ(catalogue->Commit({}), absl::OkStatus());
}

TEST_F(CatalogueTest, AVisitMayEndItOrCommit) {
  auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  CatalogueChanges changes;
  for (uint64_t i = 1; i <= 10; ++i) changes.sequences.push_back(RandomSequence(&random_, i));
  ASSERT_EQ(catalogue->Commit(changes), absl::OkStatus());
  uint64_t visits = 0;
  const auto visit = [&](const SequenceRecord& record) {
    ++visits;
    return record.id < 4 ? absl::OkStatus() : absl::CancelledError("enough");
  };
  EXPECT_EQ(catalogue->ForEachSequence(visit), absl::CancelledError("enough"));
  EXPECT_EQ(visits, 4u);
  const auto drop = [&](const SequenceRecord& record) {
    CatalogueChanges next;
    next.dropped_sequences.push_back(11 - record.id);
    return catalogue->Commit(next);
  };
  EXPECT_EQ(catalogue->ForEachSequence(drop), absl::OkStatus());  // as it was before
  EXPECT_EQ(Model().Compare(*catalogue), absl::OkStatus());
}

TEST_F(CatalogueTest, OneWriter) {
  auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  const absl::Status second = Catalogue::Open(folder_, Mode::kReadWrite).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(second)) << second;
  EXPECT_THAT(std::string(second.message()), HasSubstr(folder_));
  EXPECT_EQ(catalogue->Commit({}), absl::OkStatus());
  catalogue.reset();
  EXPECT_NE(OpenOrFail(folder_), nullptr);
}

TEST_F(CatalogueTest, ReadersBesideAWriter) {
  auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  for (int round = 0; round < 5; ++round) {
    ASSERT_NO_FATAL_FAILURE(Commit(catalogue.get(), model_.RandomChanges(&random_)));
    const Model before = model_;
    const std::vector<std::string> names = NamesIn(folder_);
    const auto reader = OpenOrFail(folder_, Mode::kReadOnly);
    ASSERT_NE(reader, nullptr);
    EXPECT_EQ(NamesIn(folder_), names);  // writes nothing
    ASSERT_NO_FATAL_FAILURE(Commit(catalogue.get(), model_.RandomChanges(&random_)));
    EXPECT_EQ(before.Compare(*reader), absl::OkStatus());
    EXPECT_TRUE(absl::IsFailedPrecondition(reader->Commit({})));
    EXPECT_TRUE(absl::IsFailedPrecondition(reader->TakeNumbers(1).status()));
    EXPECT_TRUE(absl::IsFailedPrecondition(reader->SkipNumbers(1)));
  }
  EXPECT_EQ(model_.Compare(*catalogue), absl::OkStatus());
}

TEST_F(CatalogueTest, AReaderMakesNothing) {
  EXPECT_TRUE(absl::IsNotFound(Catalogue::Open(folder_, Mode::kReadOnly).status()));
  EXPECT_FALSE(std::filesystem::exists(folder_));
  std::filesystem::create_directory(folder_);
  EXPECT_TRUE(absl::IsNotFound(Catalogue::Open(folder_, Mode::kReadOnly).status()));
  EXPECT_TRUE(NamesIn(folder_).empty());
  const auto nowhere = Catalogue::Open(folder_ + "/no/where", Mode::kReadWrite);
  EXPECT_TRUE(absl::IsNotFound(nowhere.status())) << nowhere.status();
}

TEST_F(CatalogueTest, AnotherFormatIsRefused) {
  ASSERT_TRUE(CheckedStore::OpenForWriting(folder_, kCatalogueFormat + 1).ok());
  for (const Mode mode : {Mode::kReadWrite, Mode::kReadOnly}) {
    const absl::Status status = Catalogue::Open(folder_, mode).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is of format 2;"));
  }
}

// What a record says must fit its key, whatever checksums say.
TEST_F(CatalogueTest, RecordsUnderWrongKeysAreDamage) {
  OpenOrFail(folder_).reset();
  {
    auto store = CheckedStore::OpenForWriting(folder_, kCatalogueFormat);
    ASSERT_TRUE(store.ok()) << store.status();
    StoreBatch batch;
    batch.Put(absl::StrCat("q", std::string(7, '\0'), "\x05"),
              EncodeSequence(RandomSequence(&random_, 6)));
    batch.Put(absl::StrCat("s", std::string(32, 'x')),
              EncodeSegment(RandomSegment(&random_, ChainOf(1))));
    ASSERT_EQ((*store)->Write(batch), absl::OkStatus());
  }
  const auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  ChainId chain;
  chain.fill('x');
  EXPECT_TRUE(absl::IsDataLoss(catalogue->FindSegment(chain).status()));
  const absl::Status status = catalogue->FindSequence(5).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("sequence 0000000000000005: id is another"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(folder_));
  EXPECT_THAT(std::string(status.message()), HasSubstr("`attnctl rebuild-catalogue`"));
}

// RocksDB has checksums of its own, of blocks; these are of what was given to it.
TEST_F(CatalogueTest, AValueThatWasChangedIsDamage) {
  CatalogueChanges changes;
  changes.sequences.push_back(RandomSequence(&random_, 5));
  ASSERT_NO_FATAL_FAILURE(Commit(OpenOrFail(folder_).get(), changes));
  {
    const auto instance = RocksdbInstance::Open(folder_, RocksdbInstance::Kind::kWrite);
    ASSERT_TRUE(instance.ok()) << instance.status();
    const std::string key = absl::StrCat("q", std::string(7, '\0'), "\x05");
    std::string value = (*instance)->Get(key).value();
    value[value.size() / 2] = static_cast<char>(value[value.size() / 2] ^ 4);
    rocksdb::WriteBatch batch;
    batch.Put(key, value);
    ASSERT_EQ((*instance)->Write(&batch), absl::OkStatus());
  }
  const absl::Status status = Catalogue::Open(folder_, Mode::kReadWrite).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("checksum of key 0x710000000000000005"));
}

TEST_F(CatalogueTest, NumbersAreGivenOnce) {
  uint64_t last = 0;
  for (int round = 0; round < 20; ++round) {
    const auto catalogue = OpenOrFail(folder_);
    ASSERT_NE(catalogue, nullptr);
    for (uint64_t i = random_.Below(20); i > 0; --i) {
      const uint64_t count = 1 + random_.Below(i % 3 == 0 ? 10000 : 3);
      const auto first = catalogue->TakeNumbers(count);
      ASSERT_TRUE(first.ok()) << first.status();
      ASSERT_GT(*first, last);
      last = *first + count - 1;
    }
    if (random_.Below(2) == 0) continue;
    const uint64_t skipped = last + random_.Below(20000);
    ASSERT_EQ(catalogue->SkipNumbers(skipped), absl::OkStatus());
    ASSERT_EQ(catalogue->SkipNumbers(skipped / 2), absl::OkStatus());
    last = std::max(last, skipped);
  }
}

TEST_F(CatalogueTest, NumbersHaveAnEnd) {
  auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  EXPECT_EQ(catalogue->TakeNumbers(1).value_or(0), 1u);
  EXPECT_EQ(catalogue->TakeNumbers(kTakenNumbersMax).value_or(0), 2u);
  EXPECT_TRUE(absl::IsInvalidArgument(catalogue->TakeNumbers(0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(catalogue->TakeNumbers(kTakenNumbersMax + 1).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(catalogue->SkipNumbers(kNumberMax + 1)));
  EXPECT_EQ(catalogue->SkipNumbers(kNumberMax - 2), absl::OkStatus());
  EXPECT_TRUE(absl::IsResourceExhausted(catalogue->TakeNumbers(3).status()));
  EXPECT_EQ(catalogue->TakeNumbers(2).value_or(0), kNumberMax - 1);
  EXPECT_TRUE(absl::IsResourceExhausted(catalogue->TakeNumbers(1).status()));
  catalogue.reset();
  catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  EXPECT_TRUE(absl::IsResourceExhausted(catalogue->TakeNumbers(1).status()));
}

}  // namespace
}  // namespace attnd::storage::test
