// SPDX-License-Identifier: Apache-2.0
//
// What the references of all index builds share: the tokens of one KV head of a job, and sums over
// their rows.
#ifndef ATTND_TESTS_GPU_JOB_REFERENCE_H_
#define ATTND_TESTS_GPU_JOB_REFERENCE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gpu/layout/index_layout.h"
#include "tests/gpu/unit_reference.h"

namespace attnd::gpu::test::reference {

template <typename T>
void Write(std::byte* base, uint64_t index, T value) {
  std::memcpy(base + index * sizeof(T), &value, sizeof(T));
}

using Matrix = std::vector<Vector>;
using Members = std::vector<uint32_t>;  // tokens or points, ascending

double Distance2(const Vector& a, const Vector& b);
// Adds `factor` times `row` to `to`.
void Add(double factor, const Vector& row, Vector* to);
// Adds `factor` times the square of each number of `row` to `to`.
void AddSquares(double factor, const Vector& row, Vector* to);
// The mean of those of `rows` that `members` names.
Vector MeanOf(const Matrix& rows, const Members& members);
// The number of the centre that is closest to each point.
Members Assign(const Matrix& points, const Matrix& centres);

// Tokens are numbered as the job's are.
class JobTokens {
 public:
  JobTokens(const KernelShape& shape, const IndexJob& job, uint32_t kv_head);
  Vector Key(uint32_t token) const;
  Vector Value(uint32_t token) const;
  // Writes positions, and the payload, in the order of `tokens`; positions: in the head's index.
  void Place(const std::vector<uint32_t>& tokens, std::byte* positions) const;

 private:
  struct Row {
    const std::byte* block;  // a tail block's pages of the KV head
    uint32_t in_block;
  };
  const Pages pages_;
  std::byte* const to_;
  std::vector<Row> rows_;
};

}  // namespace attnd::gpu::test::reference

#endif  // ATTND_TESTS_GPU_JOB_REFERENCE_H_
