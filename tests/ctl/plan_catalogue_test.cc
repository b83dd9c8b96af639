// SPDX-License-Identifier: Apache-2.0
//
// Goal: of any set of files exactly those are taken whose chain is whole. Method: random forests of
// segments with tails, of which some are lost, doubled or spoiled; what should be taken is found by
// walking every file's way to its root, which is not how the planner does it.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "ctl/catalogue_contents.h"
#include "ctl/rebuild.h"
#include "tests/ctl/support.h"
#include "tests/storage/io/io_support.h"

namespace attnd::ctl::test {
namespace {

using storage::SegmentKind;

constexpr int64_t kNow = 5000;

FoundFile Found(uint64_t number, uint64_t chain, uint64_t parent, uint64_t before,
                uint64_t sealed_id) {
  FoundFile file;
  file.number = number;
  file.bytes = 8192;
  file.kind = sealed_id == 0 ? SegmentKind::kClusters : SegmentKind::kTail;
  file.chain = ChainOf(chain);
  file.parent = parent == 0 ? kNoChain : ChainOf(parent);
  file.first_position = before * kSegmentTokens;
  file.tokens = kSegmentTokens;
  file.tenant = "tenant";
  file.sealed_id = sealed_id;
  file.sealed_tokens = file.first_position + file.tokens;
  file.sealed_unix_s = static_cast<int64_t>(1000 + sealed_id);
  return file;
}

// Segments 1..40 with a random parent among those before, tails 101..120, in random order of
// numbers.
std::vector<FoundFile> RandomForest(std::mt19937_64* random) {
  std::vector<FoundFile> files;
  std::vector<uint64_t> depths = {0};
  std::vector<uint64_t> numbers(60);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = 1000 + i;
  std::shuffle(numbers.begin(), numbers.end(), *random);
  for (uint64_t chain = 1; chain <= 40; ++chain) {
    const uint64_t parent = (*random)() % chain;
    files.push_back(Found(numbers[chain - 1], chain, parent, depths[parent], 0));
    depths.push_back(depths[parent] + 1);
  }
  for (uint64_t id = 101; id <= 120; ++id) {
    const uint64_t parent = (*random)() % 41;
    files.push_back(Found(numbers[id - 61], id, parent, depths[parent], id));
  }
  return files;
}

// Loses some, and spoils others.
void Spoil(std::vector<FoundFile>* files, std::mt19937_64* random) {
  std::shuffle(files->begin(), files->end(), *random);
  files->resize(files->size() - (*random)() % 8);
  for (int i = 0; i < 3; ++i) {
    FoundFile& file = (*files)[(*random)() % files->size()];
    switch ((*random)() % 4) {
      case 0:
        file.tenant = "another";
        break;
      case 1:
        file.first_position += 1;
        break;
      case 2:
        file.parent = ChainOf(999);
        break;
      default:
        file.shape.head_dim = 32;
    }
  }
  std::sort(files->begin(), files->end(),
            [](const auto& a, const auto& b) { return a.number < b.number; });
}

bool IsWhole(const FoundFile& file, const std::map<storage::ChainId, const FoundFile*>& segments) {
  if (file.parent == kNoChain) return file.first_position == 0;
  const auto found = segments.find(file.parent);
  if (found == segments.end()) return false;
  const FoundFile& parent = *found->second;
  return parent.tenant == file.tenant && parent.shape == file.shape &&
         parent.first_position + parent.tokens == file.first_position && IsWhole(parent, segments);
}

TEST(PlanCatalogueTest, TakesWhatIsWhole) {
  const uint64_t seed = storage::test::TestSeed();
  uint64_t taken = 0, untaken = 0;
  for (uint64_t round = 0; round < 500; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", round " << round);
    std::mt19937_64 random(seed + round);
    FoundFiles found;
    found.whole = RandomForest(&random);
    Spoil(&found.whole, &random);
    std::map<storage::ChainId, const FoundFile*> segments;
    for (const FoundFile& file : found.whole) {
      if (file.kind == SegmentKind::kClusters) segments[file.chain] = &file;
    }
    std::set<uint64_t> expected, planned, refused;
    for (const FoundFile& file : found.whole) {
      if (IsWhole(file, segments)) expected.insert(file.number);
    }
    const CataloguePlan plan = PlanCatalogue(found, kNow);
    for (const auto& record : plan.segments) planned.insert(record.file);
    for (const auto& record : plan.sequences) planned.insert(record.tail_file);
    for (const auto& file : plan.untaken) refused.insert(file.number);
    ASSERT_EQ(planned, expected);
    ASSERT_EQ(planned.size() + refused.size(), found.whole.size());
    taken += planned.size();
    untaken += refused.size();

    std::set<storage::ChainId> needed;
    for (const auto& record : plan.sequences) {
      ASSERT_EQ(record.used_unix_s, kNow);
      for (auto name = record.last; name != kNoChain; name = segments.at(name)->parent) {
        needed.insert(name);
      }
    }
    for (const auto& record : plan.segments) ASSERT_EQ(record.used_unix_s, kNow);
    ASSERT_EQ(plan.unneeded_segments, plan.segments.size() - needed.size());
  }
  EXPECT_GT(taken, 1000u);
  EXPECT_GT(untaken, 1000u);
}

TEST(PlanCatalogueTest, OfTwoAlikeTheNewerOne) {
  FoundFiles found;
  found.whole = {Found(1, 1, 0, 0, 0), Found(2, 1, 0, 0, 0), Found(3, 103, 1, 1, 50),
                 Found(4, 104, 1, 1, 50)};
  const CataloguePlan plan = PlanCatalogue(found, kNow);
  ASSERT_EQ(plan.segments.size(), 1u);
  ASSERT_EQ(plan.sequences.size(), 1u);
  EXPECT_EQ(plan.segments[0].file, 2u);
  EXPECT_EQ(plan.sequences[0].tail_file, 4u);
  ASSERT_EQ(plan.untaken.size(), 2u);
  EXPECT_EQ(plan.untaken[0].number, 1u);
  EXPECT_TRUE(plan.untaken[0].harmless);
  EXPECT_EQ(plan.untaken[1].number, 3u);
  EXPECT_FALSE(plan.untaken[1].harmless) << "no server leaves two";
}

// Of a segment whose predecessor was in memory alone, when no sealed sequence needs the two.
TEST(PlanCatalogueTest, WhatASealedSequenceMissesIsNotHarmless) {
  FoundFiles found;
  found.whole = {Found(2, 2, 1, 1, 0), Found(3, 3, 2, 2, 0)};
  EXPECT_TRUE(PlanCatalogue(found, kNow).whole());
  found.whole.push_back(Found(4, 104, 3, 3, 50));
  const CataloguePlan plan = PlanCatalogue(found, kNow);
  EXPECT_EQ(plan.untaken.size(), 3u);
  EXPECT_FALSE(plan.whole());
  found.whole.pop_back();
  found.damaged.push_back({5, "a flipped bit"});
  EXPECT_FALSE(PlanCatalogue(found, kNow).whole());
}

TEST(PlanCatalogueTest, WhatNoCatalogueHoldsIsNotTaken) {
  FoundFiles found;
  found.whole = {Found(1, 1, 0, 0, 0), Found(2, 2, 1, 1, 60)};
  found.whole[0].tenant = found.whole[1].tenant = std::string(storage::kTenantBytesMax + 1, 't');
  found.last_number = 2;
  const CataloguePlan plan = PlanCatalogue(found, kNow);
  EXPECT_EQ(plan.segments.size() + plan.sequences.size(), 0u);
  EXPECT_EQ(plan.untaken.size(), 2u);
  EXPECT_EQ(plan.last_number, 60u) << "a sealed id is beyond the files' numbers";
}

// Its own parent, as only damage or a forger makes it.
TEST(PlanCatalogueTest, ACircleIsNoChain) {
  FoundFiles found;
  found.whole = {Found(1, 1, 1, 0, 0), Found(2, 2, 3, 1, 0), Found(3, 3, 2, 1, 0)};
  EXPECT_EQ(PlanCatalogue(found, kNow).untaken.size(), 3u);
}

}  // namespace
}  // namespace attnd::ctl::test
