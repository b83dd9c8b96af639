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

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_EMULATED_SUPPORT_H_
