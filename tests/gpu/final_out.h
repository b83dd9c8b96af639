// SPDX-License-Identifier: Apache-2.0
//
// ExpectFinalOut: a device that writes out in the caller's own dtype is compared with what it
// writes as floats.
#ifndef ATTND_TESTS_GPU_FINAL_OUT_H_
#define ATTND_TESTS_GPU_FINAL_OUT_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <vector>

#include "common/dtype.h"
#include "tests/attention/support.h"

namespace attnd::gpu::test {

inline std::vector<std::byte> RoundedTo(DType dtype, const std::vector<float>& floats) {
  std::vector<std::byte> bytes(floats.size() * DTypeBytes(dtype));
  FromFloat(dtype, floats.data(), floats.size(), bytes.data());
  return bytes;
}

// Every row of `found`, which had a place for out of this dtype, has there what FromFloat makes of
// the floats of the same step; and its floats have not been touched.
inline void ExpectFinalOut(const attention::test::StepResult& found,
                           const attention::test::StepResult& floats, DType dtype) {
  ASSERT_TRUE(found.status.ok()) << found.status;
  ASSERT_EQ(found.rows.size(), floats.rows.size());
  for (size_t r = 0; r < found.rows.size(); ++r) {
    SCOPED_TRACE(testing::Message() << "row " << r << ", " << DTypeName(dtype));
    const attention::test::RowResult& row = found.rows[r];
    EXPECT_TRUE(row.out_is_final);
    EXPECT_EQ(row.final_out, RoundedTo(dtype, floats.rows[r].out));
    EXPECT_EQ(row.lse, floats.rows[r].lse);
    for (const float x : row.out) ASSERT_TRUE(std::isnan(x));
  }
}

// Of such a step over the rows.
inline void ExpectFinalOut(attention::Backend* backend, uint32_t layer,
                           std::vector<attention::test::TestRow> rows, DType dtype) {
  const attention::test::StepResult floats = attention::test::RunStep(backend, layer, rows);
  for (attention::test::TestRow& row : rows) row.final_dtype = dtype;
  ExpectFinalOut(attention::test::RunStep(backend, layer, rows), floats, dtype);
}

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_FINAL_OUT_H_
