// SPDX-License-Identifier: Apache-2.0
//
// What the tests over the emulated device share.
#ifndef ATTND_TESTS_GPU_EMULATED_SUPPORT_H_
#define ATTND_TESTS_GPU_EMULATED_SUPPORT_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/device/device.h"
#include "gpu/layout/memory_split.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {

// In these programs OpenCudaDevice opens the emulated device.
inline std::unique_ptr<attention::Backend> MakeEmulatedBackend(const CudaBackendOptions& options) {
  auto device = OpenCudaDevice();
  EXPECT_TRUE(device.ok()) << device.status();
  auto backend = MakeCudaBackend(options, *std::move(device), MakeCpu());
  EXPECT_TRUE(backend.ok()) << backend.status();
  return *std::move(backend);
}

// A causal row for each policy.
inline std::vector<attention::test::TestRow> RowsOf(attention::test::TestSequence* sequence,
                                                    uint32_t layer,
                                                    const std::vector<attention::Policy>& policies,
                                                    uint32_t tokens) {
  std::vector<attention::test::TestRow> rows;
  const attention::test::SequenceSpec& spec = sequence->spec;
  for (const attention::Policy& policy : policies) {
    rows.push_back(attention::test::MakeRow(sequence, policy, spec.tokens() - tokens, tokens, false,
                                            DType::kFp32, layer, spec.seed + rows.size()));
  }
  return rows;
}

// Of RowsOfQuantiles at layer 0 up to `most` rows whose choices end beside closed groups, and up to
// as many that open all, by the CPU's plans. They read at most so many tokens of their clusters.
// With some seeds there are none of one kind.
inline std::vector<attention::test::TestRow> SomeRowsOfQuantiles(
    attention::test::TestSequence* sequence, size_t most, uint64_t tokens_max) {
  const std::vector<attention::test::TestRow> all = RowsOfQuantiles(sequence, /*layer=*/0);
  const auto step = attention::test::RunStep(MakeCpu().get(), 0, all);
  EXPECT_EQ(step.plans.size(), all.size()) << "one KV head, one query token";
  std::vector<attention::test::TestRow> ends[2];
  for (size_t r = 0; r < step.plans.size(); ++r) {
    if (step.rows[r].stats.exact_tokens > tokens_max) continue;
    ends[step.plans[r].closed.empty() ? 1 : 0].push_back(all[r]);
  }
  std::vector<attention::test::TestRow> rows;
  for (const auto& end : ends) {
    const size_t every = (end.size() + most - 1) / most;
    for (size_t r = 0; r < end.size(); r += every) rows.push_back(end[r]);
  }
  return rows;
}

// ---- of the fetch stage ----

inline CudaBackendOptions FetchOptions(uint64_t page_memory_bytes) {
  CudaBackendOptions options = SmallOptions();
  options.page_memory_bytes = page_memory_bytes;
  options.cooperative_groups = false;  // they have no fetch stage
  options.timed_steps = 0;
  return options;
}

// FetchOptions with so much memory for indexes, and for pages what is left.
inline CudaBackendOptions WithIndexMemory(uint64_t index_bytes) {
  CudaBackendOptions options = FetchOptions(0);
  const StreamMemory stream =
      StreamMemoryOf(options.device_memory_bytes, options.streams,
                     {.input_bytes = options.input_bytes, .scratch_bytes = options.scratch_bytes});
  const CopyMemory copies = CopyMemoryOf(options.device_memory_bytes, options.streams, stream);
  options.page_memory_bytes = copies.index_bytes + copies.pages_bytes - AlignedBytes(index_bytes);
  return options;
}

// A sequence of some hundred pages.
inline attention::test::SequenceSpec FetchedSpec(const attention::IndexSet& indexes) {
  return SpecOf({2, 2, 64, 64, {1300, 300}, 40, indexes}, DType::kBf16);
}

// Rows that choose tokens; each step has queries of its own.
inline std::vector<attention::test::TestRow> FetchingRows(attention::test::TestSequence* sequence,
                                                          uint32_t layer, uint64_t step) {
  const std::vector<attention::Policy> policies = {
      Parse("error-target", {{"tolerance", "off"}, {"floor", "0.1"}}),
      Parse("double-p", {{"p1", "0.9"}, {"p2", "0.5"}}),
  };
  std::vector<attention::test::TestRow> rows = RowsOf(sequence, layer, policies, 1);
  for (attention::test::TestRow& row : rows) {
    for (size_t i = step; i < row.queries.size(); i += 3) row.queries[i] *= -1;
  }
  return rows;
}

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_EMULATED_SUPPORT_H_
