// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/step_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "tests/gpu/row_sums.h"
#include "tests/gpu/tree_reference.h"
#include "tests/gpu/unit_reference.h"

namespace attnd::gpu::test {
namespace {

using reference::Descending;
using reference::Dot;
using reference::kVarianceMax;
using reference::Load;
using reference::MeanShare;
using reference::Norm;
using reference::Read;
using reference::ShareIn;
using reference::ShareOf;
using reference::Softmax;
using reference::Unit;
using reference::Variances;
using reference::Vector;

constexpr double kNormShare = 1e-3;  // docs/POLICIES.md: of r

struct Cluster {
  uint32_t segment, slot;  // slot: of the row
  Vector centroid, mean_value, variance;
  double log_size, spread, value_norm2;
  uint32_t begin, end;  // tokens in the segment's order
};

// One (row, query token, KV head) or dense unit; lanes are one query token's heads.
class Lanes {
 public:
  explicit Lanes(const Unit& unit) : unit_(unit), row_(unit.row) {}

  void Run(bool one_more_exact, UnitResult* result, uint8_t* fates) {
    zones_ = unit_.ReadTokens();
    if (row_.kind == UnitKind::kClusters) {
      ReadClusters();
      Score();
      Select();
      if (one_more_exact) TakeOneMore();
      Demote();
    }
    Answer();
    if (row_.kind == UnitKind::kClusters) Report(result, fates);
  }

 private:
  size_t heads() const { return unit_.queries.size(); }

  void ReadClusters() {
    const KernelShape& shape = unit_.shape;
    for (uint32_t s = 0; s < row_.segment_count; ++s) {
      const SegmentRef& segment = unit_.SegmentAt(s);
      const IndexOffsets& at = segment.offsets;
      const std::byte* index = unit_.IndexOf(s);
      const uint32_t count = Read<uint32_t>(index, 0);
      for (uint32_t c = 0; c < count; ++c) {
        Cluster cluster;
        cluster.segment = s;
        cluster.slot = segment.first_slot + c;
        cluster.centroid =
            Load(shape.dtype, index + at.centroids + c * unit_.pages.key_bytes, shape.head_dim);
        cluster.mean_value = Load(shape.dtype, index + at.mean_values + c * unit_.pages.value_bytes,
                                  shape.value_dim);
        cluster.variance = Variances(index + at.deviation_codes + c * shape.head_dim / 2,
                                     Read<float>(index + at.variance_unit, c), shape.head_dim);
        cluster.log_size = Read<float>(index + at.log_size, c);
        cluster.spread = Read<float>(index + at.spread, c);
        cluster.value_norm2 = Read<float>(index + at.value_norm2, c);
        cluster.begin = Read<uint32_t>(index + at.starts, c);
        cluster.end = Read<uint32_t>(index + at.starts, c + 1);
        clusters_.push_back(std::move(cluster));
      }
    }
  }

  void Score() {
    for (const Vector& query : unit_.queries) {
      Vector& log_mass = log_mass_.emplace_back();
      Vector& d2 = d2_.emplace_back();
      const double scale = unit_.header.softmax_scale;
      Vector squares(query.size(), 0.0);
      reference::AddSquares(scale * scale, query.data(), query.size(), squares.data());
      for (const Cluster& cluster : clusters_) {
        d2.push_back(row_.second_order != 0 ? Dot(squares, cluster.variance) : 0);
        log_mass.push_back(scale * Dot(query, cluster.centroid) + cluster.log_size +
                           std::min(d2.back(), kVarianceMax) / 2);
      }
    }
  }

  void Select() {
    const size_t n = clusters_.size();
    fate_.assign(n, kFateDropped);
    if (row_.cut == CutKind::kErrorBudget) return SelectByError();
    const Vector mass = MeanShare(log_mass_);
    const std::vector<size_t> order = Descending(mass);
    if (row_.cut == CutKind::kTopP) {
      double before = 0;
      for (const size_t i : order) {
        if (row_.p2 >= 1 || before < row_.p2) {
          fate_[i] = kFateExact;
        } else if (row_.p1 >= 1 || before < row_.p1) {
          fate_[i] = kFateEstimated;
        }
        before += mass[i];
      }
      return;
    }
    const size_t exact = ShareOf(row_.exact_share, n);
    const size_t estimated = std::min(ShareOf(row_.estimated_share, n), n - exact);
    for (size_t i = 0; i < exact + estimated; ++i) {
      fate_[order[i]] = i < exact ? kFateExact : kFateEstimated;
    }
  }

  void SelectByError() {
    const size_t n = clusters_.size();
    std::fill(fate_.begin(), fate_.end(), kFateEstimated);
    std::vector<Vector> optimistic = log_mass_;
    for (size_t h = 0; h < optimistic.size(); ++h) {
      for (size_t i = 0; i < n; ++i) {
        optimistic[h][i] += 2 * std::sqrt(d2_[h][i]) - std::min(d2_[h][i], kVarianceMax) / 2;
      }
    }
    const std::vector<size_t> by_floor = Descending(MeanShare(optimistic));
    for (size_t i = 0; i < ShareOf(row_.floor, n); ++i) fate_[by_floor[i]] = kFateExact;
    if (std::isinf(row_.tolerance)) return;
    Vector error2(n, 0.0);
    for (uint32_t h = 0; h < unit_.header.group; ++h) {
      Softmax all = zones_[h];
      for (size_t i = 0; i < n; ++i) all.Add(log_mass_[h][i], clusters_[i].mean_value);
      const double norm = std::max(Norm(all.values) / all.sum, LeastNorm(h));
      for (size_t i = 0; i < n; ++i) {
        error2[i] += SquaredError(h, i, all.lse()) / (norm * norm) / unit_.header.group;
      }
    }
    std::vector<size_t> order = Descending(error2);
    double rest = 0;
    while (!order.empty() && rest + error2[order.back()] <= row_.tolerance * row_.tolerance) {
      rest += error2[order.back()];
      order.pop_back();
    }
    for (const size_t i : order) fate_[i] = kFateExact;
  }

  // The planted fault.
  void TakeOneMore() {
    for (const size_t i : Descending(MeanShare(log_mass_))) {
      if (fate_[i] == kFateExact) continue;
      fate_[i] = kFateExact;
      return;
    }
  }

  void Demote() {
    missed_.assign(clusters_.size(), false);
    for (size_t i = 0; i < clusters_.size() && unit_.header.estimates_misses != 0; ++i) {
      const Cluster& cluster = clusters_[i];
      missed_[i] =
          fate_[i] == kFateExact && unit_.Misses(cluster.segment, cluster.begin, cluster.end);
      if (missed_[i]) fate_[i] = kFateEstimated;
    }
  }

  // The square of what leaving a cluster to its estimate errs by, in a softmax of that lse.
  double SquaredError(uint32_t head, size_t i, double lse) const {
    const double share = std::exp(log_mass_[head][i] - lse);
    return std::pow(share * clusters_[i].spread, 2) *
           std::expm1(std::min(d2_[head][i], kVarianceMax));
  }

  // 1e-3 of the values' root mean square under zones and estimates.
  double LeastNorm(uint32_t head) const {
    const Softmax& zone = zones_[head];
    Softmax all = zone;
    for (size_t i = 0; i < clusters_.size(); ++i) {
      all.Add(log_mass_[head][i], clusters_[i].mean_value);
    }
    double moment = 0;
    if (zone.sum > 0) {
      const double norm = Norm(zone.values) / zone.sum;
      moment += norm * norm * std::exp(zone.lse() - all.lse());
    }
    for (size_t i = 0; i < clusters_.size(); ++i) {
      moment += std::exp(log_mass_[head][i] - all.lse()) * clusters_[i].value_norm2;
    }
    return kNormShare * std::sqrt(moment);
  }

  void Answer() {
    std::vector<Softmax> read = zones_;
    for (size_t i = 0; i < clusters_.size(); ++i) {
      const Cluster& cluster = clusters_[i];
      if (fate_[i] == kFateExact) {
        unit_.AddTokens(cluster.segment, cluster.begin, cluster.end, &read);
      }
    }
    for (uint32_t head = 0; head < heads(); ++head) AnswerHead(head, read[head]);
  }

  void AnswerHead(uint32_t head, Softmax state) {
    Softmax estimate(unit_.shape.value_dim), dropped(unit_.shape.value_dim);
    for (size_t i = 0; i < clusters_.size(); ++i) {
      const Cluster& cluster = clusters_[i];
      if (fate_[i] == kFateEstimated) {
        estimate.Add(log_mass_[head][i], cluster.mean_value);
        state.Add(log_mass_[head][i], cluster.mean_value);
      } else if (fate_[i] == kFateDropped) {
        dropped.Add(log_mass_[head][i], cluster.mean_value);
      }
    }
    unit_.Write(head, state);

    LaneResult& result = unit_.header.lane_results[unit_.Slot(head)];
    result = {1, 1, 0, 0};
    if (clusters_.empty() || state.sum == 0) return;
    const double total = 1 + ShareIn(dropped, state.lse());
    result.covered_mass = static_cast<float>(1 / total);
    result.exact_mass =
        static_cast<float>(std::max(0.0, 1 - ShareIn(estimate, state.lse())) / total);
    for (size_t i = 0; i < clusters_.size(); ++i) {
      if (missed_[i]) {
        result.missed_mass +=
            static_cast<float>(std::exp(log_mass_[head][i] - state.lse()) / total);
      }
    }
    if (row_.second_order == 0) return;
    double error2 = 0;
    for (size_t i = 0; i < clusters_.size(); ++i) {
      if (fate_[i] == kFateEstimated) error2 += SquaredError(head, i, state.lse());
    }
    result.predicted_error =
        static_cast<float>(std::sqrt(error2) / std::max(Norm(state.Out()), LeastNorm(head)));
  }

  void Report(UnitResult* unit, uint8_t* fates) const {
    *unit = UnitResult{};
    for (size_t i = 0; i < clusters_.size(); ++i) {
      const uint32_t tokens = clusters_[i].end - clusters_[i].begin;
      fates[clusters_[i].slot] = fate_[i];
      ++unit->clusters;
      if (missed_[i]) unit->missed_tokens += tokens;
      if (fate_[i] == kFateExact) unit->chosen_tokens += tokens;
      if (fate_[i] == kFateEstimated) unit->estimated_tokens += tokens;
      if (fate_[i] == kFateDropped) unit->dropped_tokens += tokens;
    }
  }

  const Unit& unit_;
  const RowRef& row_;
  std::vector<Softmax> zones_;  // [group]; of dense rows, everything
  std::vector<Cluster> clusters_;
  std::vector<Vector> log_mass_, d2_;  // [group][clusters]
  std::vector<uint8_t> fate_;          // [clusters]
  std::vector<bool> missed_;           // [clusters] chosen, but their pages did not come
};

}  // namespace

std::string RunStepReference(const KernelShape& shape, const StepHeader& header,
                             const OneMore& one_more, KnownPages* known) {
  FileLookUp files(header, known);
  for (uint32_t u = 0; u < header.uploads; ++u) {
    const UploadRef& upload = header.upload_refs[u];
    std::memcpy(upload.to, header.upload_data + upload.from, upload.bytes);
  }
  reference::TreesOfStep trees;
  for (uint32_t r = 0; r < header.rows; ++r) {
    const RowRef& row = header.row_refs[r];
    for (uint32_t token = 0; token < row.query_tokens; ++token) {
      for (uint32_t kv_head = 0; kv_head < header.kv_heads; ++kv_head) {
        const uint32_t unit = token / row.tokens_per_unit * header.kv_heads + kv_head;
        const auto is_meant = [&](uint32_t which) {
          return which == kEveryUnit || which == row.first_unit + unit;
        };
        const Unit lanes(shape, header, row, token, kv_head, &files);
        UnitResult* result = header.unit_results + row.first_unit + unit;
        uint8_t* fates = header.fates + row.first_fate + unit * FatesPerUnit(row);
        if (row.kind == UnitKind::kTree) {
          RunTreeReference(lanes, is_meant(one_more.exact), is_meant(one_more.opened), &trees,
                           result, fates);
        } else {
          Lanes(lanes).Run(is_meant(one_more.exact), result, fates);
        }
        files.AddTo(result);
        header.last_results[row.first_unit + unit] = *result;
      }
    }
  }
  return files.wrong();
}

}  // namespace attnd::gpu::test
