// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/job_reference.h"

#include <glog/logging.h>

#include <limits>

#include "tests/gpu/row_sums.h"

namespace attnd::gpu::test::reference {
namespace {

constexpr uint32_t kTailBlock = 64;  // tokens

}  // namespace

double Distance2(const Vector& a, const Vector& b) {
  CHECK_EQ(a.size(), b.size());
  return SumOfSquares(a.data(), b.data(), a.size(), std::numeric_limits<double>::infinity());
}

void Add(double factor, const Vector& row, Vector* to) {
  CHECK_EQ(row.size(), to->size());
  AddProducts(factor, row.data(), row.size(), to->data());
}

void AddSquares(double factor, const Vector& row, Vector* to) {
  CHECK_EQ(row.size(), to->size());
  AddSquares(factor, row.data(), row.size(), to->data());
}

Vector MeanOf(const Matrix& rows, const Members& members) {
  Vector mean(rows[0].size(), 0.0);
  for (const uint32_t m : members) Add(1 / static_cast<double>(members.size()), rows[m], &mean);
  return mean;
}

Members Assign(const Matrix& points, const Matrix& centres) {
  std::vector<const double*> rows;
  for (const Vector& centre : centres) {
    CHECK_EQ(centre.size(), points[0].size());
    rows.push_back(centre.data());
  }
  Members assignment;
  for (const Vector& point : points) {
    CHECK_EQ(point.size(), points[0].size());
    assignment.push_back(
        static_cast<uint32_t>(Closest(point.data(), rows.data(), rows.size(), point.size())));
  }
  return assignment;
}

JobTokens::JobTokens(const KernelShape& shape, const IndexJob& job, uint32_t kv_head)
    : pages_(shape), to_(job.pages + kv_head * job.pages_head_bytes) {
  for (uint32_t t = 0; t < job.tokens; ++t) {
    const uint32_t row = job.first_row + t;
    rows_.push_back({job.tail_blocks[row / kTailBlock] + kv_head * job.tail_block_head_bytes,
                     row % kTailBlock});
  }
}

Vector JobTokens::Key(uint32_t token) const {
  return pages_.key(rows_[token].block, rows_[token].in_block);
}
Vector JobTokens::Value(uint32_t token) const {
  return pages_.value(rows_[token].block, rows_[token].in_block);
}

void JobTokens::Place(const std::vector<uint32_t>& tokens, std::byte* positions) const {
  for (uint32_t slot = 0; slot < tokens.size(); ++slot) {
    const Row& row = rows_[tokens[slot]];
    Write(positions, slot, static_cast<uint16_t>(tokens[slot]));
    std::memcpy(to_ + pages_.key_at(slot), row.block + pages_.key_at(row.in_block),
                pages_.key_bytes);
    std::memcpy(to_ + pages_.value_at(slot), row.block + pages_.value_at(row.in_block),
                pages_.value_bytes);
  }
}

}  // namespace attnd::gpu::test::reference
