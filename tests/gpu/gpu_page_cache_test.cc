// SPDX-License-Identifier: Apache-2.0
//
// Goal: on a real GPU, rows over segments in host memory have the bits of rows over segments in the
// GPU's memory, whatever the page cache holds, in graphs too, and while several threads step; and
// the cache comes to hold what is asked for. Method: both kinds of backends over the same
// sequences, with steps whose queries change. Skips where the machine has no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "tests/attention/cpu/paged_support.h"
#include "tests/gpu/on_gpu.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::Backend;
using attention::kClusterIndexes;
using attention::kTreeIndexes;
using attention::test::MakeRow;
using attention::test::MakeSequence;
using attention::test::RunStep;
using attention::test::SequenceSpec;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSeed;
using attention::test::TestSequence;

std::unique_ptr<Backend> MakeGpu(uint64_t page_memory_bytes, uint32_t streams = 2) {
  CudaBackendOptions options = SmallOptions();
  options.streams = streams;
  options.device_memory_bytes = uint64_t{1} << 30;
  options.scratch_bytes = uint64_t{64} << 20;
  options.page_memory_bytes = page_memory_bytes;
  options.cooperative_groups = false;  // they read pages where they lie
  options.timed_steps = 0;
  return OnGpu::Make(options);
}

struct Case {
  uint32_t query_heads, kv_heads, head_dim, value_dim;
  DType dtype;
  attention::IndexSet indexes;
};

class GpuPageCache : public testing::TestWithParam<Case> {
 protected:
  TestSequence Make(uint64_t seed) const {
    const Case& c = GetParam();
    SequenceSpec spec;
    spec.shape = attention::test::MakeShape(c.query_heads, c.kv_heads, c.head_dim, c.value_dim,
                                            c.dtype, /*layers=*/2);
    spec.segment_tokens = {6000, 2100, 520};
    spec.tail_tokens = 100;
    spec.indexes = c.indexes;
    spec.seed = TestSeed() + seed;
    return MakeSequence(spec);
  }
  static uint64_t PageBytes(const TestSequence& sequence) {
    uint64_t bytes = 0;
    for (const auto& segment : sequence.view->segments) bytes += segment->payload_block().size();
    return bytes;
  }
  static std::vector<TestRow> Rows(TestSequence* sequence, uint32_t layer, uint64_t seed) {
    std::vector<TestRow> rows;
    const std::map<std::string, std::string> kinds[] = {
        {}, {{"tolerance", "off"}, {"floor", "0.02"}}, {{"tolerance", "0.5"}, {"floor", "0"}}};
    for (const auto& parameters : kinds) {
      rows.push_back(MakeRow(sequence, Parse("error-target", parameters),
                             sequence->spec.tokens() - 1, 1, false, DType::kFp32, layer,
                             seed + rows.size()));
    }
    return rows;
  }
  static void ExpectSame(const StepResult& a, const StepResult& b) {
    ASSERT_TRUE(a.status.ok()) << a.status;
    ASSERT_TRUE(b.status.ok()) << b.status;
    for (size_t r = 0; r < a.rows.size(); ++r) {
      EXPECT_EQ(a.rows[r].out, b.rows[r].out) << "row " << r;
      EXPECT_EQ(a.rows[r].lse, b.rows[r].lse) << "row " << r;
      EXPECT_EQ(a.rows[r].stats.exact_tokens, b.rows[r].stats.exact_tokens);
      EXPECT_EQ(a.rows[r].stats.predicted_error_mean, b.rows[r].stats.predicted_error_mean);
    }
  }
};

TEST_P(GpuPageCache, BitsDoNotDependOnIt) {
  const auto resident = MakeGpu(0);
  SKIP_WITHOUT_GPU(resident);
  TestSequence sequence = Make(0);
  const uint64_t bytes = PageBytes(sequence);
  std::vector<StepResult> expected;
  constexpr int kSteps = 24;  // graphs begin with the ninth
  for (int step = 0; step < kSteps; ++step) {
    const auto layer = static_cast<uint32_t>(step % 2);
    expected.push_back(RunStep(resident.get(), layer, Rows(&sequence, layer, TestSeed() + step)));
  }
  EXPECT_EQ(resident->stats().cache.lookups, 0u);
  // Of most pages, of few, and of so few that a step does not find room for its own.
  for (const double share : {0.9, 0.3, 0.15}) {
    SCOPED_TRACE(share);
    const auto paged = MakeGpu(static_cast<uint64_t>(share * static_cast<double>(bytes)));
    ASSERT_NE(paged, nullptr);
    for (int step = 0; step < kSteps; ++step) {
      const auto layer = static_cast<uint32_t>(step % 2);
      const StepResult found =
          RunStep(paged.get(), layer, Rows(&sequence, layer, TestSeed() + step));
      ExpectSame(found, expected[static_cast<size_t>(step)]);
    }
    const auto& cache = paged->stats().cache;
    EXPECT_GT(cache.lookups, 0u);
    EXPECT_GT(cache.fetched, 0u);
    EXPECT_GT(cache.bytes, 0u);
    EXPECT_GT(paged->stats().graph_launches, 0u);
    EXPECT_EQ(paged->stats().fallback_steps, 0u);
    std::printf("share %.2f: %llu looked up, %llu fetched, %llu read in place\n", share,
                static_cast<unsigned long long>(cache.lookups),
                static_cast<unsigned long long>(cache.fetched),
                static_cast<unsigned long long>(cache.in_place));
  }
}

// A step that is asked again finds every page that it has fetched.
TEST_P(GpuPageCache, ARepeatedStepFetchesNothing) {
  const auto any = MakeGpu(0);
  SKIP_WITHOUT_GPU(any);
  TestSequence sequence = Make(1);
  const auto paged = MakeGpu(PageBytes(sequence) / 10 * 9);
  ASSERT_NE(paged, nullptr);
  const std::vector<TestRow> rows = Rows(&sequence, 1, TestSeed());
  const StepResult first = RunStep(paged.get(), 1, rows);
  const auto before = paged->stats().cache;
  ExpectSame(RunStep(paged.get(), 1, rows), first);
  const auto after = paged->stats().cache;
  EXPECT_EQ(after.lookups - before.lookups, before.lookups);
  EXPECT_LE(after.fetched - before.fetched, before.fetched / 50);  // sets that are too full
  EXPECT_GE(before.fetched, before.lookups / 8);
}

TEST_P(GpuPageCache, ThreadsShareIt) {
  const auto resident = MakeGpu(0);
  SKIP_WITHOUT_GPU(resident);
  constexpr uint32_t kThreads = 3, kSteps = 30;
  std::vector<TestSequence> sequences;
  uint64_t bytes = 0;
  for (uint32_t t = 0; t < kThreads; ++t) {
    sequences.push_back(Make(10 + t));
    bytes += PageBytes(sequences.back());
  }
  std::vector<StepResult> expected;
  for (uint32_t t = 0; t < kThreads; ++t) {
    expected.push_back(RunStep(resident.get(), 0, Rows(&sequences[t], 0, TestSeed())));
  }
  const auto paged = MakeGpu(bytes / 6);
  ASSERT_NE(paged, nullptr);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const std::vector<TestRow> rows = Rows(&sequences[t], 0, TestSeed());
      for (uint32_t step = 0; step < kSteps; ++step) {
        ExpectSame(RunStep(paged.get(), 0, rows), expected[t]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(paged->stats().fallback_steps, 0u);
}

// Each thread has a step wait behind its gate while the others change the cache.
TEST_P(GpuPageCache, PreparedStepsShareIt) {
  constexpr uint32_t kThreads = 3, kSteps = 60;
  const auto resident = MakeGpu(0);
  SKIP_WITHOUT_GPU(resident);
  std::vector<TestSequence> sequences;
  uint64_t bytes = 0;
  for (uint32_t t = 0; t + 1 < kThreads; ++t) {
    sequences.push_back(Make(20 + t));
    bytes += PageBytes(sequences.back());
  }
  // The last two threads ask for the same pages, with other queries.
  std::vector<std::vector<std::vector<TestRow>>> rows;
  std::vector<std::vector<StepResult>> expected;
  for (uint32_t t = 0; t < kThreads; ++t) {
    TestSequence* const sequence = &sequences[std::min(t, kThreads - 2)];
    rows.push_back({Rows(sequence, 0, TestSeed() + t), Rows(sequence, 0, TestSeed() + 9 + t)});
    expected.push_back(
        {RunStep(resident.get(), 0, rows[t][0]), RunStep(resident.get(), 0, rows[t][1])});
  }
  const auto paged = MakeGpu(bytes / 4, /*streams=*/2 * kThreads);
  ASSERT_NE(paged, nullptr);
  for (int round = 0; round < 2; ++round) {  // while nothing is pinned in the cache's place
    for (uint32_t t = 0; t < kThreads; ++t) RunStep(paged.get(), 0, rows[t][0]);
  }
  const uint64_t fallbacks = paged->stats().fallback_steps;
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t step = 0; step < kSteps; ++step) {
        const uint32_t i = step % 2;
        const auto prepared = attention::test::PrepareStep(paged.get(), 0, rows[t][i]);
        const StepResult found =
            attention::test::RunPrepared(paged.get(), 0, rows[t][i], prepared.get());
        ExpectSame(found, expected[t][i]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto stats = paged->stats();
  EXPECT_GT(stats.steps_ahead, kSteps);
  EXPECT_GT(stats.cache.fetched, 0u);
  EXPECT_EQ(stats.fallback_steps, fallbacks);
  std::printf("%llu of %u steps ahead\n", static_cast<unsigned long long>(stats.steps_ahead),
              kThreads * kSteps);
}

// Segments in files: with a cache of all pages, of a third, and of so few that pages are read where
// they were carried to, or the CPU answers.
TEST_P(GpuPageCache, FilesHaveTheSameBits) {
  const auto resident = MakeGpu(0);
  SKIP_WITHOUT_GPU(resident);
  attention::test::CopyingStore store;
  TestSequence whole = Make(2);
  TestSequence paged = attention::test::Paged(whole, &store);
  const uint64_t bytes = PageBytes(whole);
  constexpr int kSteps = 24;
  std::vector<StepResult> expected;
  for (int step = 0; step < kSteps; ++step) {
    const auto layer = static_cast<uint32_t>(step % 2);
    expected.push_back(RunStep(resident.get(), layer, Rows(&whole, layer, TestSeed() + step)));
  }
  for (const double share : {8.0, 0.6, 0.3}) {
    SCOPED_TRACE(share);
    const auto gpu = MakeGpu(static_cast<uint64_t>(share * static_cast<double>(bytes)));
    ASSERT_NE(gpu, nullptr);
    for (int step = 0; step < kSteps; ++step) {
      const auto layer = static_cast<uint32_t>(step % 2);
      const uint64_t fallbacks = gpu->stats().fallback_steps;
      const StepResult found = RunStep(gpu.get(), layer, Rows(&paged, layer, TestSeed() + step));
      ASSERT_TRUE(found.status.ok()) << found.status;
      if (gpu->stats().fallback_steps > fallbacks) continue;
      ExpectSame(found, expected[static_cast<size_t>(step)]);
    }
    const auto stats = gpu->stats();
    EXPECT_GT(stats.files.pages, 0u);
    if (share > 1) {
      EXPECT_EQ(stats.fallback_steps, 0u);
      EXPECT_GT(stats.graph_launches, 0u);
    }
    std::printf("share %.2f: %llu waves, %llu runs again, %llu pages, %llu steps of the CPU\n",
                share, static_cast<unsigned long long>(stats.files.waves),
                static_cast<unsigned long long>(stats.files.runs_again),
                static_cast<unsigned long long>(stats.files.pages),
                static_cast<unsigned long long>(stats.fallback_steps));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuPageCache,
                         testing::Values(Case{4, 2, 64, 64, DType::kBf16, kTreeIndexes},
                                         Case{8, 2, 128, 128, DType::kBf16, kTreeIndexes},
                                         Case{12, 1, 192, 128, DType::kFp16, kTreeIndexes},
                                         Case{2, 2, 256, 256, DType::kBf16, kTreeIndexes},
                                         Case{8, 2, 128, 128, DType::kFp16, kClusterIndexes}),
                         [](const auto& c) {
                           return std::to_string(c.param.head_dim) +
                                  (c.param.indexes == kTreeIndexes ? "Tree" : "Clusters");
                         });

}  // namespace
}  // namespace attnd::gpu::test
