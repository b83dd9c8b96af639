// SPDX-License-Identifier: Apache-2.0
// The layer's answers by plain loops in double precision.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <utility>

#include "bench/gpu/gpu_layer.cuh"
#include "bench/gpu/gpu_memory.cuh"
#include "bench/gpu/greatest.h"

namespace attnd::gpu {
namespace {

template <typename T>
const T* PartAt(const std::byte* index, uint64_t offset) {
  return reinterpret_cast<const T*>(index + offset);
}

}  // namespace

// What the device holds of the layer, read back.
struct Layer::HostCopy {
  explicit HostCopy(const Layer& layer) {
    const uint32_t heads = layer.shape_.kv_heads;
    for (const auto& s : layer.segments_) {
      pages.push_back(ToHost(s.pages, s.pages_head_bytes * heads));
      indexes.push_back(ToHost(s.index, s.index_head_bytes * heads));
    }
    for (const auto* block : layer.blocks_) {
      tails.push_back(ToHost(block, layer.BlockHeadBytes() * heads));
    }
  }
  std::vector<std::vector<std::byte>> pages, indexes;  // of each segment
  std::vector<std::vector<std::byte>> tails;           // of each tail block
};

// What one unit, a query token and a KV head of a row, should answer.
class Layer::UnitReference {
 public:
  struct Cluster {
    uint32_t segment, number, begin, end;
    std::vector<double> log_mass, optimistic, d2;  // by query head of the group
    double score = 0;
    uint8_t fate = kFateDropped;
  };

  struct State {
    double max = -1e300, sum = 0;
    std::vector<double> values;  // empty before the first Add

    void Add(double x, uint32_t dim, const std::function<double(uint32_t)>& value) {
      if (values.empty()) values.assign(dim, 0.0);
      if (x > max) {
        const double f = std::exp(max - x);
        sum *= f;
        for (auto& v : values) v *= f;
        max = x;
      }
      const double w = std::exp(x - max);
      sum += w;
      for (uint32_t c = 0; c < dim; ++c) values[c] += w * value(c);
    }
    double Norm2() const {
      double norm2 = 0;
      for (const double v : values) norm2 += v * v;
      return norm2;
    }
  };

  UnitReference(const Layer& layer, HostCopy* copy, const Policy& policy, double scale,
                uint32_t row, uint32_t token, uint32_t head)
      : layer_(layer),
        copy_(*copy),
        policy_(policy),
        scale_(scale),
        row_(row),
        token_(token),
        head_(head),
        group_(layer.shape_.group),
        dim_(layer.shape_.dim),
        zone_(group_),
        least_(group_) {
    AddTail();
    for (uint32_t s = 0; s < layer.segments_of_row_; ++s) AddSegment(s);
    guess_ = zone_;
    for (const Cluster& c : clusters_) AddEstimate(c, &guess_);
    Choose();
    MeasureLeast();
    if (policy.cut == CutKind::kErrorBudget && std::isfinite(policy.tolerance)) ChooseByError();
    Answer();
  }

  // Of query head h of the group.
  const State& answer(uint32_t h) const { return all_[h]; }
  uint64_t exact_tokens() const { return exact_tokens_; }
  bool predicts_error() const { return policy_.second_order && !clusters_.empty(); }
  // norm: the answer's.
  double PredictedError(uint32_t h, double norm) const {
    double error = 0;
    for (const Cluster& c : clusters_) {
      if (c.fate != kFateEstimated) continue;
      const double e = std::exp(c.log_mass[h] - all_[h].max) * Number(c, &IndexOffsets::spread);
      error += e * e * std::expm1(std::min(c.d2[h], 8.0));
    }
    return std::sqrt(error) / all_[h].sum / std::max(norm, least_[h]);
  }

 private:
  // ---- what is there ----

  double Query(uint32_t h, uint32_t c) const {
    const size_t token = size_t{row_} * layer_.shape_.query_tokens + token_;
    const size_t lane = token * layer_.heads() + head_ * group_ + h;
    return double{FromBf16(layer_.queries_[lane * dim_ + c])};
  }
  size_t SegmentNumber(uint32_t s) const { return row_ * layer_.segments_of_row_ + s; }
  const HostSegment& SegmentAt(uint32_t s) const { return layer_.segments_[SegmentNumber(s)]; }
  std::byte* PagesAt(uint32_t s) const {
    return copy_.pages[SegmentNumber(s)].data() + head_ * SegmentAt(s).pages_head_bytes;
  }
  const std::byte* IndexAt(uint32_t s) const {
    return copy_.indexes[SegmentNumber(s)].data() + head_ * SegmentAt(s).index_head_bytes;
  }
  // A cluster's entry in an array of floats of its index.
  double Number(const Cluster& c, uint32_t IndexOffsets::*offset) const {
    return double{
        PartAt<float>(IndexAt(c.segment), SegmentAt(c.segment).offsets.*offset)[c.number]};
  }

  // ---- states ----

  void AddToken(std::byte* base, uint32_t token, std::vector<State>* states) const {
    const uint16_t* k = layer_.Row(base, token, false);
    const uint16_t* v = layer_.Row(base, token, true);
    for (uint32_t h = 0; h < group_; ++h) {
      double x = 0;
      for (uint32_t c = 0; c < dim_; ++c) x += Query(h, c) * FromBf16(k[c]);
      (*states)[h].Add(x * scale_, dim_, [&](uint32_t c) { return double{FromBf16(v[c])}; });
    }
  }
  void AddEstimate(const Cluster& c, std::vector<State>* states) const {
    const uint16_t* mean =
        PartAt<uint16_t>(IndexAt(c.segment), SegmentAt(c.segment).offsets.mean_values) +
        size_t{c.number} * dim_;
    for (uint32_t h = 0; h < group_; ++h) {
      (*states)[h].Add(c.log_mass[h], dim_, [&](uint32_t d) { return double{FromBf16(mean[d])}; });
    }
  }

  // ---- zones and clusters ----

  void AddTail() {
    const Shape& shape = layer_.shape_;
    const uint32_t begin = (shape.tokens - shape.tail) % kTailBlockRows;
    const uint32_t limit = begin + shape.tail - shape.query_tokens + 1 + token_;
    for (uint32_t i = begin; i < limit; ++i) {
      std::vector<std::byte>& block =
          copy_.tails[row_ * layer_.blocks_of_row_ + i / kTailBlockRows];
      AddToken(block.data() + head_ * layer_.BlockHeadBytes(), i % kTailBlockRows, &zone_);
    }
  }
  void AddSegment(uint32_t s) {
    const HostSegment& segment = SegmentAt(s);
    const bool dense = policy_.kind == UnitKind::kDense;
    const uint32_t zone_tokens = dense ? segment.tokens : segment.unclustered;
    for (uint32_t i = 0; i < zone_tokens; ++i) AddToken(PagesAt(s), i, &zone_);
    if (policy_.kind != UnitKind::kClusters) return;
    const auto* starts = PartAt<uint32_t>(IndexAt(s), segment.offsets.starts);
    for (uint32_t c = 0; c < segment.clusters; ++c) {
      clusters_.push_back({s, c, starts[c], starts[c + 1], {}, {}, {}});
      Score(&clusters_.back());
    }
  }
  void Score(Cluster* cluster) const {
    const IndexOffsets& offsets = SegmentAt(cluster->segment).offsets;
    const std::byte* index = IndexAt(cluster->segment);
    const size_t c = cluster->number;
    const auto* key = PartAt<uint16_t>(index, offsets.centroids) + c * dim_;
    const auto* codes = PartAt<uint8_t>(index, offsets.deviation_codes) + c * dim_ / 2;
    const double unit = PartAt<float>(index, offsets.variance_unit)[c];
    for (uint32_t h = 0; h < group_; ++h) {
      double x = 0, d2 = 0;
      for (uint32_t d = 0; d < dim_; ++d) {
        x += Query(h, d) * FromBf16(key[d]);
        const uint8_t byte = codes[d % (dim_ / 2)];
        const double code = d < dim_ / 2 ? byte & 15 : byte >> 4;
        d2 += std::pow(Query(h, d) * scale_ * code, 2) * unit;
      }
      x = x * scale_ + std::log(static_cast<double>(cluster->end - cluster->begin));
      cluster->d2.push_back(d2);
      cluster->optimistic.push_back(x + 2 * std::sqrt(d2));
      cluster->log_mass.push_back(policy_.second_order ? x + std::min(d2, 8.0) / 2 : x);
    }
  }

  // ---- choosing ----

  void SortByScore() {
    order_.resize(clusters_.size());
    std::iota(order_.begin(), order_.end(), 0u);
    std::stable_sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) {
      return clusters_[a].score > clusters_[b].score;
    });
  }
  // By the share of mass, mean over query heads.
  void Rank(const std::vector<double> Cluster::*values) {
    std::vector<double> max(group_, -1e300), sum(group_, 0);
    for (const Cluster& c : clusters_) {
      for (uint32_t h = 0; h < group_; ++h) max[h] = std::max(max[h], (c.*values)[h]);
    }
    for (const Cluster& c : clusters_) {
      for (uint32_t h = 0; h < group_; ++h) sum[h] += std::exp((c.*values)[h] - max[h]);
    }
    for (Cluster& c : clusters_) {
      c.score = 0;
      for (uint32_t h = 0; h < group_; ++h) {
        c.score += std::exp((c.*values)[h] - max[h]) / sum[h] / group_;
      }
    }
    SortByScore();
  }
  size_t ShareOf(double share) const {
    return static_cast<size_t>(std::ceil(share * static_cast<double>(clusters_.size()) - 1e-9));
  }
  // By mass, or of an error budget the floor.
  void Choose() {
    if (policy_.cut == CutKind::kErrorBudget) {
      Rank(&Cluster::optimistic);
      for (Cluster& c : clusters_) c.fate = kFateEstimated;
      for (size_t i = 0; i < ShareOf(policy_.floor); ++i) clusters_[order_[i]].fate = kFateExact;
      return;
    }
    Rank(&Cluster::log_mass);
    const size_t exact = ShareOf(policy_.exact_share);
    const size_t read = exact + ShareOf(policy_.estimated_share);
    double before = 0;
    for (size_t i = 0; i < order_.size(); ++i) {
      Cluster& c = clusters_[order_[i]];
      const bool top_k = policy_.cut == CutKind::kTopK;
      const bool is_exact = top_k ? i < exact : before < policy_.p2;
      const bool is_read = top_k ? i < read : before < policy_.p1;
      c.fate = is_exact ? kFateExact : is_read ? kFateEstimated : kFateDropped;
      before += c.score;
    }
  }
  // least_: the floor under an output's norm in relative errors.
  void MeasureLeast() {
    for (uint32_t h = 0; h < group_ && !clusters_.empty(); ++h) {
      double moment = 0;
      for (const Cluster& c : clusters_) {
        moment += std::exp(c.log_mass[h] - guess_[h].max) * Number(c, &IndexOffsets::value_norm2);
      }
      moment += zone_[h].Norm2() / zone_[h].sum * std::exp(zone_[h].max - guess_[h].max);
      least_[h] = 1e-3 * std::sqrt(moment / guess_[h].sum);
    }
  }
  // The clusters with the greatest errors are exact, so that the rest keeps within the tolerance.
  void ChooseByError() {
    for (Cluster& c : clusters_) {
      c.score = 0;
      for (uint32_t h = 0; h < group_; ++h) {
        const double norm = std::max(std::sqrt(guess_[h].Norm2()) / guess_[h].sum, least_[h]);
        const double e = std::exp(c.log_mass[h] - guess_[h].max) / guess_[h].sum / norm *
                         Number(c, &IndexOffsets::spread);
        c.score += e * e * std::expm1(std::min(c.d2[h], 8.0)) / group_;
      }
    }
    SortByScore();
    const double budget = policy_.tolerance * policy_.tolerance;
    double rest = 0;
    size_t marked = order_.size();
    while (marked > 0 && rest + clusters_[order_[marked - 1]].score <= budget) {
      rest += clusters_[order_[--marked]].score;
    }
    for (size_t i = 0; i < marked; ++i) clusters_[order_[i]].fate = kFateExact;
  }

  void Answer() {
    all_ = zone_;
    for (const Cluster& c : clusters_) {
      if (c.fate == kFateEstimated) AddEstimate(c, &all_);
      if (c.fate != kFateExact) continue;
      exact_tokens_ += c.end - c.begin;
      for (uint32_t i = c.begin; i < c.end; ++i) AddToken(PagesAt(c.segment), i, &all_);
    }
  }

  const Layer& layer_;
  HostCopy& copy_;
  const Policy& policy_;
  const double scale_;
  const uint32_t row_, token_, head_, group_, dim_;
  std::vector<State> zone_;   // of each query head; so below
  std::vector<State> guess_;  // zone_ and all clusters' estimates
  std::vector<State> all_;    // the answer
  std::vector<double> least_;
  std::vector<Cluster> clusters_;
  std::vector<uint32_t> order_;  // of clusters_, by descending score
  uint64_t exact_tokens_ = 0;
};

double Layer::Reference(const Policy& policy, const StepHeader& step) {
  const uint32_t dim = shape_.dim, group = shape_.group;
  const size_t lanes = size_t{step.query_tokens} * heads();
  const AnswerPlaces places = ToHost(step.answer, 1).front();
  const auto out = ToHost(reinterpret_cast<const float*>(places.out), lanes * dim);
  const auto lse = ToHost(step.lse, lanes);
  const auto results = ToHost(step.lane_results, lanes);
  const auto units = ToHost(step.last_results, step.units);
  HostCopy copy(*this);
  Greatest worst, worst_error;
  uint32_t plan_differences = 0;
  const auto compare = [&](const UnitReference& unit, uint32_t h, size_t slot) {
    const UnitReference::State& answer = unit.answer(h);
    double norm2 = 0, difference = 0;
    for (uint32_t c = 0; c < dim; ++c) {
      const double expected = answer.values[c] / answer.sum;
      norm2 += expected * expected;
      difference += std::pow(expected - out[slot * dim + c], 2);
    }
    worst.Take(std::sqrt(difference / norm2));
    worst.Take(std::abs(answer.max + std::log(answer.sum) - lse[slot]));
    if (!unit.predicts_error()) return;
    const double error = unit.PredictedError(h, std::sqrt(norm2));
    worst_error.Take(std::abs(error - results[slot].predicted_error) / std::max(error, 1e-6));
  };
  for (uint32_t r = 0; r < shape_.rows; ++r) {
    for (uint32_t t = 0; t < shape_.query_tokens; ++t) {
      const size_t token = size_t{r} * shape_.query_tokens + t;
      for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
        const UnitReference unit(*this, &copy, policy, step.softmax_scale, r, t, head);
        if (policy.kind == UnitKind::kClusters) {
          const auto& result = units[token * shape_.kv_heads + head];
          if (result.chosen_tokens != unit.exact_tokens()) ++plan_differences;
        }
        for (uint32_t h = 0; h < group; ++h) {
          compare(unit, h, token * heads() + head * group + h);
        }
      }
    }
  }
  std::printf("  %-34s output %.1e  predicted error %.1e  plans that differ %u of %u\n",
              policy.name, worst.value(), worst_error.value(), plan_differences, step.units);
  return std::max(worst.value(), worst_error.value() * 0.1) +
         (plan_differences > step.units / 50 ? 1 : 0);
}

}  // namespace attnd::gpu
