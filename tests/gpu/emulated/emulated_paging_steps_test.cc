// SPDX-License-Identifier: Apache-2.0
//
// Goal: a cache of pages that a benchmark empties is as empty as at first, and the step after that
// pays for fetching alone. Method: the benchmark's parts over the emulated device, which counts
// what is read from mapped host memory.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bench/gpu/emptied_cache.h"
#include "bench/gpu/paging_steps.h"
#include "bench/gpu/step_rows.h"
#include "tests/gpu/emulated/memory_check.h"
#include "tests/gpu/emulated/support.h"

namespace attnd::gpu::test {
namespace {

using bench::PagingStep;

bench::StepRows Rows() {
  std::vector<bench::RowSource> sources;
  sources.push_back(bench::RandomRow(attention::test::MakeShape(2, 1, 64, 64, DType::kBf16),
                                     /*tokens=*/3000, /*seed=*/1, attention::kTreeIndexes, {},
                                     bench::SegmentCut::kOfDevice, /*steps=*/3));
  return bench::StepRows(std::move(sources));
}

TEST(EmulatedPagingSteps, ACacheIsEmptiedAndNothingElse) {
  bench::StepRows rows = Rows();
  const attention::Policy policy = Parse("error-target", {{"tolerance", "off"}, {"floor", "0.05"}});
  const auto emptier = std::make_shared<bench::CacheEmptier>();
  CudaBackendOptions options = FetchOptions(rows.PayloadBytes() / 2);
  options.timed_steps = 1;
  auto backend = MakeCudaBackend(
      options, std::make_unique<bench::EmptiedCacheDevice>(*OpenCudaDevice(), emptier), MakeCpu());
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_EQ(emptier->Empty().code(), absl::StatusCode::kFailedPrecondition);

  bench::Answers::Counts counts;
  bench::Answers answers(&counts);
  bench::PagingSteps steps(&rows, &policy, &answers);
  const auto sent = [&] { return (*backend)->stats().bytes_to_device; };
  // The first steps upload, map, and find a cache.
  PagingStep first, warm;
  for (uint32_t step = 0; step < 3; ++step) first = steps.Run(backend->get(), step);
  EXPECT_GT(first.fetched, 0);
  uint64_t before = sent(), reads = emulated::MappedReads();
  warm = steps.Run(backend->get(), 2);
  const uint64_t input = sent() - before;
  EXPECT_EQ(warm.looked_up, first.looked_up);
  EXPECT_EQ(warm.fetched, 0);
  const uint64_t sink_reads = emulated::MappedReads() - reads;  // it is read where it lies

  ASSERT_TRUE(emptier->Empty().ok());
  before = sent();
  reads = emulated::MappedReads();
  const PagingStep cold = steps.Run(backend->get(), 2);
  EXPECT_EQ(cold.looked_up, warm.looked_up);
  EXPECT_GT(cold.fetched, first.fetched);
  EXPECT_GT(emulated::MappedReads() - reads, sink_reads);
  EXPECT_EQ(sent() - before, input) << "the step uploads what it has uploaded";
  EXPECT_GT(cold.fetch, 0);
  EXPECT_EQ(counts.compared, 2u);
  EXPECT_EQ(counts.wrong, 0u);
}

}  // namespace
}  // namespace attnd::gpu::test
