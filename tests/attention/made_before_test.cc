// SPDX-License-Identifier: Apache-2.0
//
// Of the tests' own sequences: those that were made before are as those that are made.
#include "tests/attention/made_before.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "tests/attention/support.h"
#include "tests/normal_numbers.h"

namespace attnd::attention::test {
namespace {

bool SameBytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

SequenceSpec SomeSpec(const IndexSet& indexes) {
  SequenceSpec spec;
  spec.shape = MakeShape(2, 1, 64, 32, DType::kBf16, 2);
  spec.segment_tokens = {200, 100};
  spec.tail_tokens = 20;
  spec.indexes = indexes;
  return spec;
}

TEST(MadeBefore, SegmentsAreNewOnesWithTheBytesOfABuild) {
  for (const IndexSet& indexes : {kClusterIndexes, kTreeIndexes}) {
    const SequenceSpec spec = SomeSpec(indexes);
    const TestSequence first = MakeSequence(spec);
    const TestSequence second = MakeSequence(spec);
    const std::shared_ptr<const Segment> built = BuildSegment(
        MakeTailView(spec.shape, spec.tokens(), second.heads, spec.indexes), 200, spec.sink);
    ASSERT_EQ(second.view->segments.size(), 2u);
    for (size_t s = 0; s < 2; ++s) {
      const Segment& before = *first.view->segments[s];
      const Segment& after = *second.view->segments[s];
      EXPECT_NE(&before, &after);
      EXPECT_NE(before.origin(), after.origin());
      EXPECT_EQ(before.id(), after.id());
      EXPECT_EQ(before.form(), after.form());
      EXPECT_EQ(before.first_position(), after.first_position());
      EXPECT_TRUE(SameBytes(before.index_block(), after.index_block()));
      EXPECT_TRUE(SameBytes(before.payload_block(), after.payload_block()));
    }
    EXPECT_TRUE(SameBytes(built->index_block(), second.view->segments[0]->index_block()));
    EXPECT_TRUE(SameBytes(built->payload_block(), second.view->segments[0]->payload_block()));
  }
}

TEST(MadeBefore, WhatDiffersIsMadeAnew) {
  SequenceSpec spec = SomeSpec(kTreeIndexes);
  const TestSequence first = MakeSequence(spec);
  std::vector<HeadData> heads = first.heads;
  heads[1].values[5] += 1;
  EXPECT_FALSE(SameBytes(MakeSequenceOf(spec, heads).view->segments[0]->payload_block(),
                         first.view->segments[0]->payload_block()));
  spec.sink = 8;
  EXPECT_EQ(MakeSequence(spec).view->segments[0]->unclustered(), 8u);
  spec.seed = 2;
  EXPECT_NE(MakeSequence(spec).heads[0].keys, first.heads[0].keys);
}

TEST(NormalNumbers, AreThoseOfTheLibrary) {
  std::mt19937_64 generator(7), other(7);
  std::normal_distribution<double> library;
  attnd::test::NormalNumbers numbers;
  for (int i = 0; i < 10000; ++i) ASSERT_EQ(numbers(generator), library(other)) << i;
}

}  // namespace
}  // namespace attnd::attention::test
