// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/tree_build_reference.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "tests/gpu/job_reference.h"
#include "tests/gpu/row_sums.h"

namespace attnd::gpu::test {
namespace {

using reference::Add;
using reference::AddSquares;
using reference::Distance2;
using reference::Dot;
using reference::Matrix;
using reference::MeanOf;
using reference::Members;
using reference::Vector;
using reference::Write;

constexpr int kIterations = 10;

void WriteFloat(std::byte* base, uint64_t index, double value) {
  Write<float>(base, index, static_cast<float>(value));
}

// ---- k-means ----

// The late centres: the farthest members of the widest clusters.
void Split(const Matrix& points, const Members& assignment, size_t centres_max, Matrix* centres) {
  const size_t early = centres->size();
  Vector spread(early, 0.0), greatest(early, -1.0);
  Members farthest(early, 0);
  for (uint32_t i = 0; i < points.size(); ++i) {
    const uint32_t c = assignment[i];
    const double distance = Distance2(points[i], (*centres)[c]);
    spread[c] += distance;
    if (distance > greatest[c]) {
      greatest[c] = distance;
      farthest[c] = i;
    }
  }
  Members widest(early);
  std::iota(widest.begin(), widest.end(), 0u);
  std::stable_sort(widest.begin(), widest.end(),
                   [&](uint32_t a, uint32_t b) { return spread[a] > spread[b]; });
  for (size_t i = 0; i < early && centres->size() < centres_max; ++i) {
    // What is left of equal points is rounding.
    if (spread[widest[i]] > 1e-20) centres->push_back(points[farthest[widest[i]]]);
  }
}

// The members of each of `count` clusters of all points; empty ones are left out.
std::vector<Members> KMeans(const Matrix& points, size_t count) {
  const size_t n = points.size(), early = count - count / 4;
  Matrix centres;
  for (size_t c = 0; c < early; ++c) centres.push_back(points[c * n / early]);
  Members assignment;
  std::vector<Members> clusters;
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    for (size_t c = 0; c < clusters.size(); ++c) {
      if (!clusters[c].empty()) centres[c] = MeanOf(points, clusters[c]);
    }
    if (iteration == kIterations / 2) Split(points, assignment, count, &centres);
    assignment = reference::Assign(points, centres);
    clusters.assign(centres.size(), {});
    for (uint32_t i = 0; i < n; ++i) clusters[assignment[i]].push_back(i);
  }
  std::erase_if(clusters, [](const Members& members) { return members.empty(); });
  return clusters;
}

// How many of `leaves` each group gets.
Members Divide(const std::vector<Members>& groups, size_t leaves) {
  Members result(groups.size(), 1);
  for (size_t given = groups.size(); given < leaves; ++given) {
    size_t best = groups.size();
    double most = 0;
    for (size_t g = 0; g < groups.size(); ++g) {
      const double each = static_cast<double>(groups[g].size()) / result[g];
      if (result[g] < groups[g].size() && each > most) {
        most = each;
        best = g;
      }
    }
    if (best == groups.size()) break;
    ++result[best];
  }
  return result;
}

// ---- axes ----

// Rows: unit vectors by descending eigenvalue. Jacobi's rotations of the whole matrix, row by row.
Matrix Eigenvectors(Vector matrix, size_t n) {
  Vector axes(n * n, 0.0);
  double trace = 0;
  for (size_t i = 0; i < n; ++i) {
    axes[i * n + i] = 1;
    trace += matrix[i * n + i];
  }
  for (bool rotated = true; rotated;) {
    rotated = false;
    for (size_t p = 0; p < n; ++p) {
      double* const row = &matrix[p * n];
      for (size_t q = p + 1; q < n; ++q) {
        if (!(std::abs(row[q]) > 1e-9 * trace)) continue;
        rotated = true;
        double* const other = &matrix[q * n];
        const double angle = 0.5 * std::atan2(2 * row[q], row[p] - other[q]);
        const double c = std::cos(angle), s = std::sin(angle);
        reference::Turn(c, s, n, n, &matrix[p], &matrix[q]);
        reference::Turn(c, s, n, 1, row, other);
        reference::Turn(c, s, n, 1, &axes[p * n], &axes[q * n]);
      }
    }
  }
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return matrix[a * n + a] > matrix[b * n + b]; });
  Matrix sorted;
  for (const size_t i : order) {
    const auto begin = axes.begin() + static_cast<ptrdiff_t>(i * n);
    sorted.emplace_back(begin, begin + static_cast<ptrdiff_t>(n));
  }
  return sorted;
}

// One KV head of a job.
class TreeHead {
 public:
  TreeHead(const KernelShape& shape, const IndexJob& job, uint32_t kv_head)
      : shape_(shape),
        job_(job),
        index_(job.index + kv_head * job.index_head_bytes),
        tokens_(shape, job, kv_head) {
    for (uint32_t t = job.unclustered; t < job.tokens; ++t) {
      keys_.push_back(tokens_.Key(t));
      values_.push_back(tokens_.Value(t));
    }
  }

  void Build() {
    all_.resize(keys_.size());
    std::iota(all_.begin(), all_.end(), 0u);
    Cluster();
    Place();
    DescribeMeans();
    FindAxes();
    FindSlopes();
    DescribeParts(job_.tree.leaves, leaves_);
    DescribeParts(job_.tree.groups, group_tokens_);
  }

 private:
  // The mean, and 1 over the root mean square distance from it.
  double InverseLength(const Matrix& rows, const Vector& mean) const {
    double squares = 0;
    for (const Vector& row : rows) squares += Distance2(row, mean);
    return 1 / std::max(std::sqrt(squares / static_cast<double>(rows.size())), 1e-30);
  }

  // Groups of keys and values, then each group's leaves.
  void Cluster() {
    key_base_ = MeanOf(keys_, all_);
    value_base_ = MeanOf(values_, all_);
    const double key_scale = InverseLength(keys_, key_base_);
    const double value_scale = 0.5 * InverseLength(values_, value_base_);
    Matrix points;
    for (size_t i = 0; i < keys_.size(); ++i) {
      Vector point = keys_[i], value = values_[i];
      Add(-1, key_base_, &point);
      Add(-1, value_base_, &value);
      reference::Scale(key_scale, point.data(), point.size());
      reference::Scale(value_scale, value.data(), value.size());
      point.insert(point.end(), value.begin(), value.end());
      points.push_back(std::move(point));
    }
    group_tokens_ = KMeans(points, job_.max_groups);
    const Members shares = Divide(group_tokens_, job_.max_clusters);
    for (size_t g = 0; g < group_tokens_.size(); ++g) {
      first_members_.push_back(static_cast<uint32_t>(leaves_.size()));
      Matrix own;
      for (const uint32_t token : group_tokens_[g]) own.push_back(points[token]);
      for (Members& leaf : KMeans(own, shares[g])) {
        for (uint32_t& member : leaf) member = group_tokens_[g][member];
        leaves_.push_back(std::move(leaf));
      }
    }
    first_members_.push_back(static_cast<uint32_t>(leaves_.size()));
  }

  // Numbers, starts, positions, and the pages in that order.
  void Place() {
    const TreePart& leaves = job_.tree.leaves;
    const TreePart& groups = job_.tree.groups;
    Write<uint32_t>(index_, leaves.count / sizeof(uint32_t), leaves_.size());
    Write<uint32_t>(index_, groups.count / sizeof(uint32_t), group_tokens_.size());
    std::vector<uint32_t> order(job_.unclustered), starts;
    std::iota(order.begin(), order.end(), 0u);
    for (const Members& leaf : leaves_) {
      starts.push_back(static_cast<uint32_t>(order.size()));
      for (const uint32_t token : leaf) order.push_back(job_.unclustered + token);
    }
    starts.push_back(job_.tokens);
    for (size_t i = 0; i < starts.size(); ++i) Write(index_ + leaves.starts, i, starts[i]);
    for (size_t g = 0; g < first_members_.size(); ++g) {
      Write(index_ + groups.first_members, g, first_members_[g]);
      Write(index_ + groups.starts, g, starts[first_members_[g]]);
    }
    tokens_.Place(order, index_ + job_.tree.positions);
  }

  // What is left of keys and values, about their leaves' means.
  void DescribeMeans() {
    for (size_t c = 0; c < key_base_.size(); ++c) {
      WriteFloat(index_ + job_.tree.key_base, c, key_base_[c]);
    }
    for (size_t c = 0; c < value_base_.size(); ++c) {
      WriteFloat(index_ + job_.tree.value_base, c, value_base_[c]);
    }
    key_rest_ = keys_;
    value_rest_ = values_;
    for (const Members& leaf : leaves_) {
      const Vector key = MeanOf(keys_, leaf), value = MeanOf(values_, leaf);
      for (const uint32_t token : leaf) {
        Add(-1, key, &key_rest_[token]);
        Add(-1, value, &value_rest_[token]);
      }
    }
  }

  // Stores numbers as bf16, and leaves them as they are read back.
  void StoreRow(uint32_t offset, size_t row, Vector* numbers) {
    std::vector<float> floats(numbers->begin(), numbers->end());
    std::byte* to = index_ + offset + row * floats.size() * sizeof(uint16_t);
    FromFloat(DType::kBf16, floats.data(), floats.size(), to);
    ToFloat(DType::kBf16, to, floats.size(), floats.data());
    numbers->assign(floats.begin(), floats.end());
  }

  void FindAxes() {
    const size_t n = shape_.head_dim;
    Vector moments(n * n, 0.0);
    for (const Vector& key : key_rest_) {
      for (size_t a = 0; a < n; ++a) reference::AddProducts(key[a], key.data(), n, &moments[a * n]);
    }
    axes_ = Eigenvectors(std::move(moments), n);
    for (size_t a = 0; a < axes_.size(); ++a) StoreRow(job_.tree.axes, a, &axes_[a]);
  }

  Vector Turned(const Vector& key) const {
    Vector result;
    for (const Vector& axis : axes_) result.push_back(Dot(axis, key));
    return result;
  }

  void FindSlopes() {
    Vector squares(shape_.head_dim, 0.0);
    slopes_.assign(shape_.head_dim, Vector(shape_.value_dim, 0.0));
    for (size_t i = 0; i < keys_.size(); ++i) {
      const Vector y = Turned(key_rest_[i]);
      AddSquares(1, y, &squares);
      for (size_t a = 0; a < y.size(); ++a) {
        Add(y[a], value_rest_[i], &slopes_[a]);
      }
    }
    const double ridge = 1 + shape_.head_dim / static_cast<double>(keys_.size());
    const double all = std::accumulate(squares.begin(), squares.end(), 0.0);
    for (size_t a = 0; a < squares.size(); ++a) {
      for (double& slope : slopes_[a]) {
        slope = squares[a] > 1e-12 * all ? slope / (ridge * squares[a]) : 0;
      }
      StoreRow(job_.tree.slopes, a, &slopes_[a]);
    }
  }

  // A row in bytes; returns it as it is read back.
  Vector StoreBytes(uint32_t codes, uint32_t scales, size_t row, const Vector& mean,
                    const Vector& base) {
    double greatest = 0;
    for (size_t c = 0; c < mean.size(); ++c) {
      greatest = std::max(greatest, std::abs(mean[c] - base[c]));
    }
    const double scale = greatest / 127;
    WriteFloat(index_ + scales, row, scale);
    Vector stored = base;
    for (size_t c = 0; c < mean.size(); ++c) {
      const double code = scale > 0 ? std::round((mean[c] - base[c]) / scale) : 0;
      Write<int8_t>(index_ + codes, row * mean.size() + c, static_cast<int8_t>(code));
      stored[c] += scale * code;
    }
    return stored;
  }

  // Leaves or groups, each from its own tokens: a group's follow from its leaves' only to spare
  // time.
  void DescribeParts(const TreePart& part, const std::vector<Members>& all) {
    for (size_t i = 0; i < all.size(); ++i) {
      const auto size = static_cast<double>(all[i].size());
      const Vector key = MeanOf(keys_, all[i]), value = MeanOf(values_, all[i]);
      Vector variance(key.size(), 0.0);
      double rest2 = 0;
      for (const uint32_t token : all[i]) {
        Vector difference = keys_[token], rest = values_[token];
        Add(-1, key, &difference);
        Add(-1, value, &rest);
        const Vector y = Turned(difference);
        for (size_t a = 0; a < y.size(); ++a) Add(-y[a], slopes_[a], &rest);
        rest2 += Dot(rest, rest) / size;
        AddSquares(1 / size, y, &variance);
      }
      StoreBytes(part.centroids, part.centroid_scales, i, key, key_base_);
      const Vector stored =
          StoreBytes(part.mean_values, part.mean_value_scales, i, value, value_base_);
      StoreVariances(part, i, variance);
      WriteFloat(index_ + part.log_size, i, std::log(size));
      WriteFloat(index_ + part.spread, i, std::sqrt(rest2));
      WriteFloat(index_ + part.value_norm2, i, Dot(stored, stored));
    }
  }

  void StoreVariances(const TreePart& part, size_t row, const Vector& variance) {
    const double greatest = std::sqrt(*std::max_element(variance.begin(), variance.end()));
    const size_t half = variance.size() / 2;
    const auto code = [&](size_t a) {
      return greatest == 0 ? 0l : std::lround(15 * std::sqrt(variance[a]) / greatest);
    };
    for (size_t a = 0; a < half; ++a) {
      index_[part.deviation_codes + row * half + a] =
          static_cast<std::byte>(code(a) + 16 * code(a + half));
    }
    WriteFloat(index_ + part.variance_unit, row, greatest / 15 * (greatest / 15));
  }

  const KernelShape& shape_;
  const IndexJob& job_;
  std::byte* const index_;
  const reference::JobTokens tokens_;
  Matrix keys_, values_;          // of clustered tokens, numbered from 0
  Members all_;                   // clustered tokens
  Vector key_base_, value_base_;  // means over the segment
  std::vector<Members> leaves_;   // group by group
  std::vector<Members> group_tokens_;
  Members first_members_;
  Matrix key_rest_, value_rest_;
  Matrix axes_, slopes_;
};

}  // namespace

void BuildTreeReference(const KernelShape& shape, const IndexJob& job) {
  for (uint32_t head = 0; head < job.kv_heads; ++head) TreeHead(shape, job, head).Build();
}

}  // namespace attnd::gpu::test
