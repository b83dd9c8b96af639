// SPDX-License-Identifier: Apache-2.0
//
// What the references of all kinds of units share: arithmetic in double precision, and what a unit
// reads whatever its kind.
#ifndef ATTND_TESTS_GPU_UNIT_REFERENCE_H_
#define ATTND_TESTS_GPU_UNIT_REFERENCE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "common/dtype.h"
#include "gpu/device/device.h"
#include "gpu/layout/step_layout.h"
#include "tests/gpu/fetch_reference.h"

namespace attnd::gpu::test::reference {

using Vector = std::vector<double>;

inline constexpr double kVarianceMax = 8;  // docs/POLICIES.md: d2's cap before it is exponentiated

double Dot(const Vector& a, const Vector& b);
double Norm(const Vector& v);
Vector Load(DType dtype, const std::byte* row, size_t dim);
// As many numbers as there are values.
void LoadTo(DType dtype, const std::byte* row, Vector* values);

template <typename T>
T Read(const std::byte* base, uint64_t index) {
  T value;
  std::memcpy(&value, base + index * sizeof(T), sizeof(T));
  return value;
}

// ceil(share * n), where a product that exceeds a whole number only by rounding is that number.
size_t ShareOf(double share, size_t n);

// Numbers of the scores in descending order, the lower number first among equals.
std::vector<size_t> Descending(const Vector& scores);

// Mean over heads of each head's softmax over `logs`.
Vector MeanShare(const std::vector<Vector>& logs);

// A softmax over what was added, with a running maximum.
struct Softmax {
  explicit Softmax(size_t value_dim) : values(value_dim, 0.0) {}
  void Add(double log_weight, const Vector& value);
  double lse() const;
  // What it makes of the values; nothing if nothing was added.
  Vector Out() const;
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
  Vector values;
};

// The share of a softmax of that lse that `part` is.
double ShareIn(const Softmax& part, double lse);

// A cluster's variances: half of the codes stand in the low halves of bytes, half in the high ones.
Vector Variances(const std::byte* codes, double unit, uint32_t head_dim);

// Where a token's key and value stand in a run of pages.
struct Pages {
  explicit Pages(const KernelShape& shape);
  Vector key(const std::byte* pages, uint64_t token) const;
  Vector value(const std::byte* pages, uint64_t token) const;
  uint64_t key_at(uint64_t token) const;
  uint64_t value_at(uint64_t token) const;
  uint64_t page_bytes() const;
  const KernelShape shape;
  const uint64_t key_bytes, value_bytes;
};

// One (row, query token, KV head); its lanes are the KV head's query heads.
struct Unit {
  // files: finds pages of segments in files; null if the step has none.
  Unit(const KernelShape& shape, const StepHeader& header, const RowRef& row, uint32_t token,
       uint32_t kv_head, FileLookUp* files = nullptr);

  // Place of a query head in queries and outputs.
  uint64_t Slot(uint32_t head) const;
  const SegmentRef& SegmentAt(uint32_t s) const { return header.segments[row.segments_begin + s]; }
  const std::byte* PagesOf(uint32_t s) const;
  const std::byte* IndexOf(uint32_t s) const;
  // Each head's softmax over what the unit reads whatever it chooses: of a dense row, everything.
  std::vector<Softmax> ReadTokens() const;
  // Adds tokens [begin, end) of a segment's order to each head's state.
  void AddTokens(uint32_t segment, uint32_t begin, uint32_t end,
                 std::vector<Softmax>* states) const;
  // Whether the step is to do without a page of these tokens.
  bool Misses(uint32_t segment, uint32_t begin, uint32_t end) const;
  void Write(uint32_t head, const Softmax& state) const;

  const KernelShape& shape;
  const StepHeader& header;
  const RowRef& row;
  const uint32_t token, kv_head;
  FileLookUp* const files;
  const Pages pages;
  std::vector<Vector> queries;  // [group]
};

}  // namespace attnd::gpu::test::reference

#endif  // ATTND_TESTS_GPU_UNIT_REFERENCE_H_
