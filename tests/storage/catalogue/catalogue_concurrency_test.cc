// SPDX-License-Identifier: Apache-2.0
//
// Goal: a catalogue may be used by many threads, and read beside a writer that moves its files
// about. Method: threads that commit, take numbers and look for their own; a reader that opens it
// again and again.
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "storage/catalogue/catalogue.h"
#include "tests/storage/catalogue/catalogue_support.h"

namespace attnd::storage::test {
namespace {

using Mode = Catalogue::Mode;

class CatalogueConcurrencyTest : public testing::Test {
 protected:
  const TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path() + "/catalogue";
  const testing::ScopedTrace trace_{__FILE__, __LINE__,
                                    testing::Message() << "seed " << TestSeed()};
};

// A catalogue that writes and removes tables and lists of them while others read it.
TEST_F(CatalogueConcurrencyTest, ReadersBesideABusyWriter) {
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int round = 0; round < 12; ++round) {
      const auto catalogue = OpenOrFail(folder_);
      Random random(TestSeed() + round);
      for (int i = 0; catalogue != nullptr && i < 5; ++i) {
        CatalogueChanges changes;
        for (uint64_t id = 1; id <= 20; ++id) {
          changes.sequences.push_back(RandomSequence(&random, id));
          changes.sequences.back().tokens = round;
        }
        EXPECT_EQ(catalogue->Commit(changes), absl::OkStatus());
      }
    }
    done = true;
  });
  uint64_t last = 0, reads = 0;
  while (!done) {
    const auto reader = Catalogue::Open(folder_, Mode::kReadOnly);
    if (absl::IsNotFound(reader.status()) && last == 0) continue;
    EXPECT_TRUE(reader.ok()) << reader.status();
    if (!reader.ok()) break;
    uint64_t tokens = last, count = 0;
    EXPECT_EQ((*reader)->ForEachSequence([&](const SequenceRecord& record) {
      EXPECT_GE(record.tokens, last);
      EXPECT_TRUE(count == 0 || record.tokens == tokens);  // commits are seen whole
      ++count;
      tokens = record.tokens;
      return absl::OkStatus();
    }),
              absl::OkStatus());
    last = tokens;
    ++reads;
  }
  writer.join();
  EXPECT_GT(reads, 0u);
}

TEST_F(CatalogueConcurrencyTest, ManyThreads) {
  auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  constexpr int kThreads = 4, kRounds = 50;
  std::vector<std::vector<uint64_t>> taken(kThreads);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      Random random(TestSeed() + number);
      for (int round = 0; round < kRounds; ++round) {
        const uint64_t id = catalogue->TakeNumbers(1 + random.Below(500)).value_or(0);
        CatalogueChanges changes;
        changes.sequences.push_back(RandomSequence(&random, id));
        EXPECT_EQ(catalogue->Commit(changes), absl::OkStatus());
        const auto found = catalogue->FindSequence(id);
        EXPECT_TRUE(found.ok() && *found == changes.sequences[0]) << found.status();
        taken[number].push_back(id);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<uint64_t> all;
  for (const auto& ids : taken) all.insert(ids.begin(), ids.end());
  EXPECT_EQ(all.size(), size_t{kThreads} * kRounds);
  EXPECT_EQ(catalogue->ForEachSequence([&](const SequenceRecord& record) {
    return all.erase(record.id) == 1 ? absl::OkStatus() : absl::InternalError("unknown");
  }),
            absl::OkStatus());
  EXPECT_TRUE(all.empty());
}

}  // namespace
}  // namespace attnd::storage::test
