// SPDX-License-Identifier: Apache-2.0
//
// The check of one head's tree: a plain reference in double, which shares no code with the kernels.
// Leaves and groups are described anew from the tokens that the tree says they have, in the tree's
// own axes and with its own slopes; axes, slopes and clusters are compared with the best.
#ifndef ATTND_TESTS_GPU_TREE_CHECK_HEAD_CUH_
#define ATTND_TESTS_GPU_TREE_CHECK_HEAD_CUH_

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/gpu/index_check_build.cuh"
#include "tests/gpu/index_check_support.cuh"

namespace attnd::gpu::test {

struct TreeFindings {
  std::string failure;  // the first
  uint32_t leaves = 0, groups = 0;
  uint32_t greatest = 0;       // group's tokens
  double objective_ratio = 1;  // of leaves, to the reference's
  double off_diagonal = 0;     // greatest moment between axes, relative to all
  double slope_error = 0;      // of predicted values, relative to values
  double deviation_error = 0;  // greatest, beyond half a step, relative to the leaf's
  double spread_error = 0;     // greatest, relative to the values'
};

// Bounds. Products are of tf32 numbers, which have 10 bits of mantissa; axes and slopes have 8.
// A token that two clusters are equally good for may go either way, which leads a single head to
// somewhat better or worse leaves than the reference's.
inline constexpr double kTreeRatioMax = 1.08;
inline constexpr double kOffDiagonalMax = 6e-3;
inline constexpr double kSlopeErrorMax = 6e-3;
inline constexpr double kDeviationErrorMax = 2e-3;
inline constexpr double kSpreadErrorMax = 2e-3;

class TreeHeadCheck {
 public:
  TreeHeadCheck(const Case& c, const HeadRows& rows, const std::byte* index,
                const std::byte* pages);
  TreeFindings Run();

 private:
  using Rows = std::vector<double>;  // row after row

  template <typename... Args>
  void Fail(const char* format, Args... args) {
    if (!findings_.failure.empty()) return;
    char text[200];
    std::snprintf(text, sizeof(text), format, args...);
    findings_.failure = text;
  }
  template <typename T>
  T Read(uint32_t offset, size_t i) const {
    T value;
    std::memcpy(&value, index_ + offset + i * sizeof(T), sizeof(T));
    return value;
  }
  void CheckFloat(const char* name, uint32_t i, double got, double want, double tolerance) {
    if (!(std::abs(got - want) <= tolerance)) Fail("%s of %u: %.9g, not %.9g", name, i, got, want);
  }

  void CheckOrder();
  void CheckGroups();
  void CheckPayload();
  void LoadPoints();
  void LoadAxes();
  // Leaves or groups, of which row i has tokens [bounds[i], bounds[i + 1]) of the order.
  void CheckPart(const TreePart& part, const std::vector<uint32_t>& bounds, const char* name);
  void CheckBytes(const char* name, uint32_t codes, uint32_t scales, uint32_t base, uint32_t i,
                  const double* mean, uint32_t dim);
  void CheckSpread(const TreePart& part, uint32_t i, const Rows& turned, const Rows& values,
                   size_t count);
  void CheckVariances(const TreePart& part, uint32_t i, const Rows& turned, size_t count);
  void CheckRegression();
  void CheckAxes(const Rows& moments);
  void CheckObjective();
  // Key and value less their means over [begin, end) of the order, row after row; sets the means.
  void Centre(uint32_t begin, uint32_t end, Rows* keys, Rows* values, Rows* key_mean,
              Rows* value_mean) const;
  Rows Turn(const Rows& keys, size_t count) const;
  double Objective(const std::vector<std::vector<uint32_t>>& parts) const;

  const Case& case_;
  const HeadRows& rows_;
  const Layout layout_;
  const std::byte* const index_;
  const std::byte* const pages_;
  const uint32_t dim_, value_dim_;
  TreeFindings findings_;
  std::vector<uint32_t> order_;   // of clustered tokens, numbered in the segment
  std::vector<uint32_t> leaves_;  // [leaves + 1] bounds in order_
  std::vector<uint32_t> groups_;  // [groups + 1] the same
  Rows axes_, slopes_;            // [dim][dim], [dim][value_dim]
  Rows points_;                   // [clustered][dim + value_dim]
};

// k-means as the tree has it, over points given as rows of `dim`: the members of each cluster that
// has any.
std::vector<std::vector<uint32_t>> ReferenceKMeans(const std::vector<double>& points, size_t dim,
                                                   size_t clusters);
// The leaves of a tree of as many groups and leaves.
std::vector<std::vector<uint32_t>> ReferenceLeaves(const std::vector<double>& points, size_t dim,
                                                   size_t groups, size_t leaves);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_TREE_CHECK_HEAD_CUH_
