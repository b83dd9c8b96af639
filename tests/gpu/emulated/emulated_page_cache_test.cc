// SPDX-License-Identifier: Apache-2.0
//
// Goal: the fetch stage's own code. Rows over segments in host memory have the bits of rows over
// segments in the device's memory, whatever the page cache holds; what is looked up, fetched and
// read in place is counted; a page that is there is not fetched again. Method: the emulated device,
// whose threads meet at each look at the cache, and sequences of some hundred pages.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/gpu/agreement.h"
#include "tests/gpu/emulated/memory_check.h"
#include "tests/gpu/emulated/support.h"

namespace attnd::gpu::test {
namespace {

using attention::test::MakeSequence;
using attention::test::RunStep;
using attention::test::SequenceSpec;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSequence;

uint64_t PageBytes(const TestSequence& sequence) {
  uint64_t bytes = 0;
  for (const auto& segment : sequence.view->segments) bytes += segment->payload_block().size();
  return bytes;
}

class EmulatedPageCache : public testing::TestWithParam<attention::IndexSet> {
 protected:
  // Without a sink, whose tokens are read where they lie.
  static TestSequence Make() {
    SequenceSpec spec = FetchedSpec(GetParam());
    spec.sink = 0;
    return MakeSequence(spec);
  }
};

TEST_P(EmulatedPageCache, BitsDoNotDependOnIt) {
  TestSequence sequence = Make();
  const auto resident = MakeEmulatedBackend(FetchOptions(0));
  constexpr int kSteps = 3;
  std::vector<StepResult> expected;
  for (int step = 0; step < kSteps; ++step) {
    expected.push_back(RunStep(resident.get(), step % 2, FetchingRows(&sequence, step % 2, step)));
  }
  // Of most pages, and of so few that a step does not find room for its own.
  for (const double share : {0.9, 0.2}) {
    SCOPED_TRACE(share);
    const auto paged = MakeEmulatedBackend(
        FetchOptions(static_cast<uint64_t>(share * static_cast<double>(PageBytes(sequence)))));
    for (int step = 0; step < kSteps; ++step) {
      const std::vector<TestRow> rows = FetchingRows(&sequence, step % 2, step);
      const StepResult found = RunStep(paged.get(), step % 2, rows);
      ASSERT_TRUE(found.status.ok()) << found.status;
      for (size_t r = 0; r < rows.size(); ++r) {
        EXPECT_TRUE(SameBits(found.rows[r], expected[step].rows[r])) << "row " << r;
        EXPECT_EQ(found.rows[r].stats.exact_tokens, expected[step].rows[r].stats.exact_tokens);
      }
    }
    const auto cache = paged->stats().cache;
    EXPECT_GT(cache.fetched, 0u);
    EXPECT_GE(cache.lookups, cache.fetched + cache.in_place);
    EXPECT_EQ(cache.in_place > 0, share < 0.5);
    EXPECT_EQ(paged->stats().fallback_steps, 0u);
  }
}

// Every page of the step is in the cache after it, but for those of sets that are too full.
TEST_P(EmulatedPageCache, ARepeatedStepFetchesNothing) {
  TestSequence sequence = Make();
  const auto paged = MakeEmulatedBackend(FetchOptions(PageBytes(sequence) / 10 * 9));
  const std::vector<TestRow> rows = FetchingRows(&sequence, 0, 0);
  const StepResult first = RunStep(paged.get(), 0, rows);
  const auto before = paged->stats().cache;
  const uint64_t host_reads = emulated::MappedReads();
  EXPECT_GT(host_reads, 0u);
  const StepResult again = RunStep(paged.get(), 0, rows);
  for (size_t r = 0; r < rows.size(); ++r) EXPECT_TRUE(SameBits(again.rows[r], first.rows[r]));
  const auto after = paged->stats().cache;
  // What is read is what was fetched, not what lies in host memory.
  EXPECT_EQ(emulated::MappedReads(), host_reads);
  EXPECT_EQ(after.lookups, 2 * before.lookups);
  EXPECT_EQ(after.fetched, before.fetched);
  EXPECT_GT(before.fetched, 0u);
}

TEST_P(EmulatedPageCache, TheFetchStageIsTimedWhereThereIsACache) {
  TestSequence sequence = Make();
  for (const uint64_t page_memory : {uint64_t{0}, PageBytes(sequence) / 10 * 9}) {
    CudaBackendOptions options = FetchOptions(page_memory);
    options.timed_steps = 1;
    const auto backend = MakeEmulatedBackend(options);
    for (int step = 1; step <= 2; ++step) {
      RunStep(backend.get(), 0, FetchingRows(&sequence, 0, 0));
      // Each stage of the emulated device takes a millisecond.
      const double fetched = backend->stats().fetch_seconds;
      EXPECT_NEAR(fetched, page_memory == 0 ? 0 : 1e-3 * step, 1e-9) << "step " << step;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Indexes, EmulatedPageCache,
                         testing::Values(attention::kClusterIndexes, attention::kTreeIndexes),
                         [](const auto& c) { return c.param.ToString(); });

}  // namespace
}  // namespace attnd::gpu::test
