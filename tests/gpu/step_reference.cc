// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/step_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "common/dtype.h"

namespace attnd::gpu::test {
namespace {

using Vector = std::vector<double>;

constexpr uint32_t kPage = 16;       // tokens
constexpr uint32_t kTailBlock = 64;  // tokens
constexpr double kVarianceMax = 8;   // docs/POLICIES.md: d2 is capped before it is exponentiated
constexpr double kNormShare = 1e-3;  // docs/POLICIES.md: of r

Vector Load(DType dtype, const std::byte* row, size_t dim) {
  std::vector<float> floats(dim);
  ToFloat(dtype, row, dim, floats.data());
  return {floats.begin(), floats.end()};
}

double Dot(const Vector& a, const Vector& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

template <typename T>
T Read(const std::byte* base, uint64_t index) {
  T value;
  std::memcpy(&value, base + index * sizeof(T), sizeof(T));
  return value;
}

// Where a token's key and value stand in a run of pages.
struct Pages {
  explicit Pages(const KernelShape& s)
      : shape(s),
        key_bytes(s.head_dim * DTypeBytes(s.dtype)),
        value_bytes(s.value_dim * DTypeBytes(s.dtype)) {}
  uint64_t page_bytes() const { return kPage * (key_bytes + value_bytes); }
  uint64_t key_at(uint64_t token) const {
    return token / kPage * page_bytes() + token % kPage * key_bytes;
  }
  uint64_t value_at(uint64_t token) const {
    return token / kPage * page_bytes() + kPage * key_bytes + token % kPage * value_bytes;
  }
  Vector key(const std::byte* pages, uint64_t token) const {
    return Load(shape.dtype, pages + key_at(token), shape.head_dim);
  }
  Vector value(const std::byte* pages, uint64_t token) const {
    return Load(shape.dtype, pages + value_at(token), shape.value_dim);
  }
  const KernelShape shape;
  const uint64_t key_bytes, value_bytes;
};

struct Token {
  Vector key, value;
};

// A softmax over what was added, with a running maximum.
struct Softmax {
  explicit Softmax(size_t value_dim) : values(value_dim, 0.0) {}
  void Add(double log_weight, const Vector& value) {
    if (log_weight > max) {
      const double factor = std::exp(max - log_weight);
      sum *= factor;
      for (double& v : values) v *= factor;
      max = log_weight;
    }
    const double weight = std::exp(log_weight - max);
    sum += weight;
    for (size_t c = 0; c < values.size(); ++c) values[c] += weight * value[c];
  }
  double lse() const { return sum > 0 ? max + std::log(sum) : max; }
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
  Vector values;
};

struct Cluster {
  uint32_t segment, slot;  // slot: of the row
  Vector centroid, mean_value, variance;
  double log_size, spread, value_norm2;
  uint32_t begin, end;  // tokens in the segment's order
};

double Norm(const Vector& v) { return std::sqrt(Dot(v, v)); }

size_t ShareOf(double share, size_t n) {
  const double count = std::ceil(share * static_cast<double>(n) * (1 - 1e-9));
  return std::min(n, static_cast<size_t>(std::max(count, 0.0)));
}

// Numbers of the scores in descending order, the lower number first among equals.
std::vector<size_t> Descending(const Vector& scores) {
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  return order;
}

// One (row, query token, KV head) or dense unit; lanes are one query token's heads.
class Lanes {
 public:
  Lanes(const KernelShape& shape, const StepHeader& header, const RowRef& row, uint32_t token,
        uint32_t kv_head)
      : shape_(shape), header_(header), row_(row), pages_(shape), token_(token), kv_head_(kv_head) {
    const auto query_dtype = static_cast<DType>(header.query_dtype);
    for (uint32_t head = 0; head < header.group; ++head) {
      queries_.push_back(
          Load(query_dtype, header.queries + Slot(head) * shape.head_dim * DTypeBytes(query_dtype),
               shape.head_dim));
    }
  }

  void Run(bool one_more_exact, UnitResult* unit, uint8_t* fates) {
    ReadTokens();
    if (row_.kind == UnitKind::kClusters) {
      ReadClusters();
      Score();
      Select();
      if (one_more_exact) TakeOneMore();
    }
    for (uint32_t head = 0; head < header_.group; ++head) Answer(head);
    if (row_.kind == UnitKind::kClusters) Report(unit, fates);
  }

 private:
  // Place of a query head in queries and outputs.
  uint64_t Slot(uint32_t head) const {
    const uint64_t heads = uint64_t{header_.kv_heads} * header_.group;
    return (row_.first_query_token + token_) * heads + kv_head_ * header_.group + head;
  }
  const SegmentRef& SegmentAt(uint32_t s) const {
    return header_.segments[row_.segments_begin + s];
  }

  void ReadTokens() {
    for (uint32_t s = 0; s < row_.segment_count; ++s) {
      const SegmentRef& segment = SegmentAt(s);
      const std::byte* pages = segment.pages + kv_head_ * segment.pages_head_bytes;
      const uint32_t end = row_.kind == UnitKind::kDense ? segment.tokens : segment.unclustered;
      for (uint32_t t = 0; t < end; ++t)
        zone_.push_back({pages_.key(pages, t), pages_.value(pages, t)});
    }
    const uint32_t limit = row_.tail_limit + token_ * row_.causal;
    for (uint32_t t = row_.tail_begin; t < limit; ++t) {
      const std::byte* pages = header_.tail_blocks[row_.tail_blocks_begin + t / kTailBlock] +
                               kv_head_ * header_.tail_block_head_bytes;
      zone_.push_back({pages_.key(pages, t % kTailBlock), pages_.value(pages, t % kTailBlock)});
    }
  }

  void ReadClusters() {
    for (uint32_t s = 0; s < row_.segment_count; ++s) {
      const SegmentRef& segment = SegmentAt(s);
      const std::byte* index = segment.index + kv_head_ * segment.index_head_bytes;
      const uint32_t count = Read<uint32_t>(index, 0);
      for (uint32_t c = 0; c < count; ++c) {
        Cluster cluster;
        cluster.segment = s;
        cluster.slot = segment.first_slot + c;
        cluster.centroid =
            Load(shape_.dtype, index + segment.offsets.centroids + c * pages_.key_bytes,
                 shape_.head_dim);
        cluster.mean_value =
            Load(shape_.dtype, index + segment.offsets.mean_values + c * pages_.value_bytes,
                 shape_.value_dim);
        const double unit = Read<float>(index + segment.offsets.variance_unit, c);
        const uint32_t half = shape_.head_dim / 2;
        for (uint32_t j = 0; j < shape_.head_dim; ++j) {
          const auto byte = std::to_integer<uint32_t>(
              index[segment.offsets.deviation_codes + c * half + j % half]);
          const double code = j < half ? byte % 16 : byte / 16;
          cluster.variance.push_back(unit * code * code);
        }
        cluster.log_size = Read<float>(index + segment.offsets.log_size, c);
        cluster.spread = Read<float>(index + segment.offsets.spread, c);
        cluster.value_norm2 = Read<float>(index + segment.offsets.value_norm2, c);
        cluster.begin = Read<uint32_t>(index + segment.offsets.starts, c);
        cluster.end = Read<uint32_t>(index + segment.offsets.starts, c + 1);
        clusters_.push_back(std::move(cluster));
      }
    }
  }

  void Score() {
    for (const Vector& query : queries_) {
      Vector& log_mass = log_mass_.emplace_back();
      Vector& d2 = d2_.emplace_back();
      for (const Cluster& cluster : clusters_) {
        double variance = 0;
        for (size_t c = 0; c < query.size(); ++c) {
          const double q = query[c] * header_.softmax_scale;
          variance += q * q * cluster.variance[c];
        }
        d2.push_back(row_.second_order != 0 ? variance : 0);
        log_mass.push_back(header_.softmax_scale * Dot(query, cluster.centroid) + cluster.log_size +
                           std::min(d2.back(), kVarianceMax) / 2);
      }
    }
  }

  // Mean over heads of each head's softmax over `logs`.
  Vector MeanShare(const std::vector<Vector>& logs) const {
    Vector mean(clusters_.size(), 0.0);
    for (const Vector& log : logs) {
      const double max = *std::max_element(log.begin(), log.end());
      double sum = 0;
      for (const double x : log) sum += std::exp(x - max);
      for (size_t i = 0; i < log.size(); ++i) {
        mean[i] += std::exp(log[i] - max) / sum / static_cast<double>(logs.size());
      }
    }
    return mean;
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
    for (uint32_t h = 0; h < header_.group; ++h) {
      Softmax all = Zone(h);
      for (size_t i = 0; i < n; ++i) all.Add(log_mass_[h][i], clusters_[i].mean_value);
      const double norm = std::max(Norm(all.values) / all.sum, LeastNorm(h));
      for (size_t i = 0; i < n; ++i) {
        error2[i] += SquaredError(h, i, all.lse()) / (norm * norm) / header_.group;
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

  Softmax Zone(uint32_t head) const {
    Softmax zone(shape_.value_dim);
    for (const Token& token : zone_) {
      zone.Add(header_.softmax_scale * Dot(queries_[head], token.key), token.value);
    }
    return zone;
  }

  // The square of what leaving a cluster to its estimate errs by, in a softmax of that lse.
  double SquaredError(uint32_t head, size_t i, double lse) const {
    const double share = std::exp(log_mass_[head][i] - lse);
    return std::pow(share * clusters_[i].spread, 2) *
           std::expm1(std::min(d2_[head][i], kVarianceMax));
  }

  // 1e-3 of the values' root mean square under zones and estimates.
  double LeastNorm(uint32_t head) const {
    const Softmax zone = Zone(head);
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

  void Answer(uint32_t head) {
    Softmax state = Zone(head);
    Softmax estimate(shape_.value_dim), dropped(shape_.value_dim);
    for (size_t i = 0; i < clusters_.size(); ++i) {
      const Cluster& cluster = clusters_[i];
      if (fate_[i] == kFateEstimated) {
        estimate.Add(log_mass_[head][i], cluster.mean_value);
        state.Add(log_mass_[head][i], cluster.mean_value);
      } else if (fate_[i] == kFateDropped) {
        dropped.Add(log_mass_[head][i], cluster.mean_value);
      } else {
        const SegmentRef& segment = SegmentAt(cluster.segment);
        const std::byte* pages = segment.pages + kv_head_ * segment.pages_head_bytes;
        for (uint32_t t = cluster.begin; t < cluster.end; ++t) {
          state.Add(header_.softmax_scale * Dot(queries_[head], pages_.key(pages, t)),
                    pages_.value(pages, t));
        }
      }
    }
    Vector out(shape_.value_dim, 0.0);
    for (size_t c = 0; c < out.size() && state.sum > 0; ++c) out[c] = state.values[c] / state.sum;
    float* target = header_.out + Slot(head) * shape_.value_dim;
    for (size_t c = 0; c < out.size(); ++c) target[c] = static_cast<float>(out[c]);
    header_.lse[Slot(head)] = static_cast<float>(state.lse());

    LaneResult& result = header_.lane_results[Slot(head)];
    result = {1, 1, 0, 0};
    if (clusters_.empty() || state.sum == 0) return;
    const auto share = [&](const Softmax& part) {
      return part.sum > 0 ? std::exp(part.lse() - state.lse()) : 0;
    };
    const double total = 1 + share(dropped);
    result.covered_mass = static_cast<float>(1 / total);
    result.exact_mass = static_cast<float>(std::max(0.0, 1 - share(estimate)) / total);
    if (row_.second_order == 0) return;
    double error2 = 0;
    for (size_t i = 0; i < clusters_.size(); ++i) {
      if (fate_[i] == kFateEstimated) error2 += SquaredError(head, i, state.lse());
    }
    result.predicted_error =
        static_cast<float>(std::sqrt(error2) / std::max(Norm(out), LeastNorm(head)));
  }

  void Report(UnitResult* unit, uint8_t* fates) const {
    *unit = UnitResult{};
    for (size_t i = 0; i < clusters_.size(); ++i) {
      const uint32_t tokens = clusters_[i].end - clusters_[i].begin;
      fates[clusters_[i].slot] = fate_[i];
      ++unit->clusters;
      if (fate_[i] == kFateExact) unit->chosen_tokens += tokens;
      if (fate_[i] == kFateEstimated) unit->estimated_tokens += tokens;
      if (fate_[i] == kFateDropped) unit->dropped_tokens += tokens;
    }
  }

  const KernelShape& shape_;
  const StepHeader& header_;
  const RowRef& row_;
  const Pages pages_;
  const uint32_t token_;
  const uint32_t kv_head_;
  std::vector<Vector> queries_;  // [group]
  std::vector<Token> zone_;      // and, of dense rows, everything else
  std::vector<Cluster> clusters_;
  std::vector<Vector> log_mass_, d2_;  // [group][clusters]
  std::vector<uint8_t> fate_;          // [clusters]
};

}  // namespace

void RunStepReference(const KernelShape& shape, const StepHeader& header, uint32_t one_more_exact) {
  for (uint32_t u = 0; u < header.uploads; ++u) {
    const UploadRef& upload = header.upload_refs[u];
    std::memcpy(upload.to, header.upload_data + upload.from, upload.bytes);
  }
  for (uint32_t r = 0; r < header.rows; ++r) {
    const RowRef& row = header.row_refs[r];
    for (uint32_t token = 0; token < row.query_tokens; ++token) {
      for (uint32_t kv_head = 0; kv_head < header.kv_heads; ++kv_head) {
        const uint32_t unit = token / row.tokens_per_unit * header.kv_heads + kv_head;
        const bool one_more =
            one_more_exact == kEveryUnit || one_more_exact == row.first_unit + unit;
        Lanes(shape, header, row, token, kv_head)
            .Run(one_more, header.unit_results + row.first_unit + unit,
                 header.fates + row.first_fate + uint64_t{unit} * row.slots);
      }
    }
  }
}

}  // namespace attnd::gpu::test
