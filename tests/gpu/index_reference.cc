// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "tests/gpu/job_reference.h"
#include "tests/gpu/step_reference.h"

namespace attnd::gpu::test {
namespace {

using reference::Add;
using reference::AddSquares;
using reference::Matrix;
using reference::MeanOf;
using reference::Members;
using reference::Vector;
using reference::Write;

constexpr int kIterations = 10;

void Store(DType dtype, const Vector& row, std::byte* target) {
  const std::vector<float> floats(row.begin(), row.end());
  FromFloat(dtype, floats.data(), floats.size(), target);
}

// One KV head of a job.
class Head {
 public:
  Head(const KernelShape& shape, const IndexJob& job, uint32_t kv_head)
      : shape_(shape),
        job_(job),
        index_(job.index + kv_head * job.index_head_bytes),
        tokens_(shape, job, kv_head) {}

  void Build() {
    Cluster();
    Place();
    for (uint32_t c = 0; c < members_.size(); ++c) Summarise(c);
  }

 private:
  // k-means over keys less their mean; clusters without members are left out.
  void Cluster() {
    const uint32_t n = job_.tokens - job_.unclustered;
    const uint32_t k = job_.max_clusters;
    Matrix points;
    for (uint32_t i = 0; i < n; ++i) points.push_back(tokens_.Key(job_.unclustered + i));
    Members all(n);
    std::iota(all.begin(), all.end(), 0u);
    const Vector mean = MeanOf(points, all);
    for (Vector& point : points) Add(-1, mean, &point);
    Matrix centres;
    for (uint64_t c = 0; c < k; ++c) centres.push_back(points[c * n / k]);
    std::vector<Members> clusters;
    for (int iteration = 0; iteration < kIterations; ++iteration) {
      for (size_t c = 0; c < clusters.size(); ++c) {
        if (!clusters[c].empty()) centres[c] = MeanOf(points, clusters[c]);
      }
      clusters.assign(k, {});
      const Members assignment = reference::Assign(points, centres);
      for (uint32_t i = 0; i < n; ++i) clusters[assignment[i]].push_back(i);
    }
    for (Members& members : clusters) {
      for (uint32_t& member : members) member += job_.unclustered;
      if (!members.empty()) members_.push_back(std::move(members));
    }
  }

  // Starts, positions and the pages in that order.
  void Place() {
    Write<uint32_t>(index_, 0, static_cast<uint32_t>(members_.size()));
    std::vector<uint32_t> order(job_.unclustered);
    std::iota(order.begin(), order.end(), 0u);
    for (uint32_t c = 0; c < members_.size(); ++c) {
      Write<uint32_t>(index_ + job_.offsets.starts, c, static_cast<uint32_t>(order.size()));
      order.insert(order.end(), members_[c].begin(), members_[c].end());
    }
    Write<uint32_t>(index_ + job_.offsets.starts, members_.size(), job_.tokens);
    tokens_.Place(order, index_ + job_.offsets.positions);
  }

  void Summarise(uint32_t c) {
    const double size = static_cast<double>(members_[c].size());
    Matrix keys, values;
    for (const uint32_t token : members_[c]) {
      keys.push_back(tokens_.Key(token));
      values.push_back(tokens_.Value(token));
    }
    Members all(keys.size());
    std::iota(all.begin(), all.end(), 0u);
    const Vector key_mean = MeanOf(keys, all), value_mean = MeanOf(values, all);
    Vector deviation(shape_.head_dim, 0.0);
    double spread2 = 0;
    for (const uint32_t i : all) {
      Add(-1, key_mean, &keys[i]);
      AddSquares(1 / size, keys[i], &deviation);
      spread2 += reference::Distance2(values[i], value_mean) / size;
    }
    const double norm2 = reference::Dot(value_mean, value_mean);
    double greatest = 0;
    for (double& d : deviation) greatest = std::max(greatest, d = std::sqrt(d));
    const uint32_t half = shape_.head_dim / 2;
    const auto code = [&](uint32_t i) {
      return greatest == 0 ? 0u : static_cast<uint32_t>(std::lround(15 * deviation[i] / greatest));
    };
    for (uint32_t i = 0; i < half; ++i) {
      index_[job_.offsets.deviation_codes + c * half + i] =
          static_cast<std::byte>(code(i) + 16 * code(i + half));
    }
    const uint64_t element = DTypeBytes(shape_.dtype);
    Store(shape_.dtype, key_mean, index_ + job_.offsets.centroids + c * shape_.head_dim * element);
    Store(shape_.dtype, value_mean,
          index_ + job_.offsets.mean_values + c * shape_.value_dim * element);
    const auto write = [&](uint32_t offset, double value) {
      Write<float>(index_ + offset, c, static_cast<float>(value));
    };
    write(job_.offsets.variance_unit, greatest / 15 * (greatest / 15));
    write(job_.offsets.log_size, std::log(size));
    write(job_.offsets.spread, std::sqrt(spread2));
    write(job_.offsets.value_norm2, norm2);
  }

  const KernelShape& shape_;
  const IndexJob& job_;
  std::byte* const index_;
  const reference::JobTokens tokens_;
  std::vector<Members> members_;  // tokens of each cluster
};

}  // namespace

void BuildIndexReference(const KernelShape& shape, const IndexJob& job) {
  for (uint32_t head = 0; head < job.kv_heads; ++head) Head(shape, job, head).Build();
}

}  // namespace attnd::gpu::test
