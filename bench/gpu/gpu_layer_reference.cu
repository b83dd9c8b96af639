// SPDX-License-Identifier: Apache-2.0
// The layer's answers by plain loops in double precision.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>

#include "bench/gpu/gpu_layer.cuh"
#include "bench/gpu/gpu_memory.cuh"
#include "bench/gpu/greatest.h"

namespace attnd::gpu {
namespace {

struct Cluster {
  uint32_t segment, number, begin, end;
  std::vector<double> log_mass, optimistic, d2;  // by query head of the group
  double score = 0;
  uint8_t fate = kFateDropped;
};

}  // namespace

double Layer::Reference(const Policy& policy, const StepHeader& step) {
  const uint32_t dim = shape_.dim, group = shape_.group;
  const double scale = step.softmax_scale;
  const size_t lanes = size_t{step.query_tokens} * heads();
  const auto out = ToHost(step.out, lanes * dim);
  const auto lse = ToHost(step.lse, lanes);
  const auto results = ToHost(step.lane_results, lanes);
  const auto units = ToHost(step.unit_results, step.units);
  std::vector<std::vector<std::byte>> pages, indexes, tails;
  for (const auto& s : segments_) {
    pages.push_back(ToHost(s.pages, s.pages_head_bytes * shape_.kv_heads));
    indexes.push_back(ToHost(s.index, s.index_head_bytes * shape_.kv_heads));
  }
  for (const auto* block : blocks_)
    tails.push_back(ToHost(block, BlockHeadBytes() * shape_.kv_heads));
  Greatest worst, worst_error;
  uint32_t plan_differences = 0;
  const uint32_t tail_begin = (shape_.tokens - shape_.tail) % kTailBlockRows;
  for (uint32_t r = 0; r < shape_.rows; ++r) {
    for (uint32_t t = 0; t < shape_.query_tokens; ++t) {
      for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
        const auto query = [&](uint32_t h, uint32_t c) {
          const size_t token = size_t{r} * shape_.query_tokens + t;
          return double{FromBf16(queries_[(token * heads() + head * group + h) * dim + c])};
        };
        struct State {
          double max = -1e300, sum = 0;
          std::vector<double> values;
        };
        std::vector<State> zone(group), all(group);
        const auto add = [&](State* s, double x, const std::function<double(uint32_t)>& value) {
          if (s->values.empty()) s->values.assign(dim, 0.0);
          if (x > s->max) {
            const double f = std::exp(s->max - x);
            s->sum *= f;
            for (auto& v : s->values) v *= f;
            s->max = x;
          }
          const double w = std::exp(x - s->max);
          s->sum += w;
          for (uint32_t c = 0; c < dim; ++c) s->values[c] += w * value(c);
        };
        const auto add_token = [&](std::byte* base, uint32_t token, std::vector<State>* states) {
          const uint16_t* k = Row(base, token, false);
          const uint16_t* v = Row(base, token, true);
          for (uint32_t h = 0; h < group; ++h) {
            double x = 0;
            for (uint32_t c = 0; c < dim; ++c) x += query(h, c) * FromBf16(k[c]);
            add(&(*states)[h], x * scale, [&](uint32_t c) { return double{FromBf16(v[c])}; });
          }
        };
        const uint32_t limit = tail_begin + shape_.tail - shape_.query_tokens + 1 + t;
        for (uint32_t i = tail_begin; i < limit; ++i) {
          add_token(tails[r * blocks_of_row_ + i / kTailBlockRows].data() + head * BlockHeadBytes(),
                    i % kTailBlockRows, &zone);
        }
        std::vector<Cluster> clusters;
        for (uint32_t s = 0; s < segments_of_row_; ++s) {
          const size_t number = r * segments_of_row_ + s;
          const HostSegment& segment = segments_[number];
          std::byte* base = pages[number].data() + head * segment.pages_head_bytes;
          const uint32_t zone_tokens =
              policy.kind == UnitKind::kDense ? segment.tokens : segment.unclustered;
          for (uint32_t i = 0; i < zone_tokens; ++i) add_token(base, i, &zone);
          if (policy.kind != UnitKind::kClusters) continue;
          const std::byte* index = indexes[number].data() + head * segment.index_head_bytes;
          const auto* starts = reinterpret_cast<const uint32_t*>(index + segment.offsets.starts);
          for (uint32_t c = 0; c < segment.clusters; ++c) {
            Cluster cluster{s, c, starts[c], starts[c + 1], {}, {}, {}};
            const auto* key = reinterpret_cast<const uint16_t*>(index + segment.offsets.centroids) +
                              size_t{c} * dim;
            const auto* codes =
                reinterpret_cast<const uint8_t*>(index + segment.offsets.deviation_codes) +
                size_t{c} * dim / 2;
            const double unit =
                reinterpret_cast<const float*>(index + segment.offsets.variance_unit)[c];
            for (uint32_t h = 0; h < group; ++h) {
              double x = 0, d2 = 0;
              for (uint32_t d = 0; d < dim; ++d) {
                x += query(h, d) * FromBf16(key[d]);
                const uint8_t byte = codes[d % (dim / 2)];
                const double code = d < dim / 2 ? byte & 15 : byte >> 4;
                d2 += std::pow(query(h, d) * scale * code, 2) * unit;
              }
              x = x * scale + std::log(static_cast<double>(cluster.end - cluster.begin));
              cluster.d2.push_back(d2);
              cluster.optimistic.push_back(x + 2 * std::sqrt(d2));
              cluster.log_mass.push_back(policy.second_order ? x + std::min(d2, 8.0) / 2 : x);
            }
            clusters.push_back(std::move(cluster));
          }
        }
        const auto part = [&](const Cluster& c, uint32_t IndexOffsets::*offset) {
          const size_t number = r * segments_of_row_ + c.segment;
          return double{reinterpret_cast<const float*>(
              indexes[number].data() + head * segments_[number].index_head_bytes +
              segments_[number].offsets.*offset)[c.number]};
        };
        const auto mean_value = [&](const Cluster& c, uint32_t d) {
          const size_t number = r * segments_of_row_ + c.segment;
          const std::byte* index =
              indexes[number].data() + head * segments_[number].index_head_bytes;
          return double{FromBf16(reinterpret_cast<const uint16_t*>(
              index + segments_[number].offsets.mean_values)[size_t{c.number} * dim + d])};
        };
        // ---- choose ----
        std::vector<uint32_t> order(clusters.size());
        const auto rank = [&](const std::vector<double> Cluster::*values) {
          std::vector<double> max(group, -1e300), sum(group, 0);
          for (const auto& c : clusters) {
            for (uint32_t h = 0; h < group; ++h) max[h] = std::max(max[h], (c.*values)[h]);
          }
          for (const auto& c : clusters) {
            for (uint32_t h = 0; h < group; ++h) sum[h] += std::exp((c.*values)[h] - max[h]);
          }
          for (auto& c : clusters) {
            c.score = 0;
            for (uint32_t h = 0; h < group; ++h) {
              c.score += std::exp((c.*values)[h] - max[h]) / sum[h] / group;
            }
          }
          std::iota(order.begin(), order.end(), 0u);
          std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
            return clusters[a].score > clusters[b].score;
          });
        };
        const auto share = [&](double s) {
          return static_cast<size_t>(std::ceil(s * static_cast<double>(clusters.size()) - 1e-9));
        };
        if (policy.cut == CutKind::kErrorBudget) {
          rank(&Cluster::optimistic);
          for (auto& c : clusters) c.fate = kFateEstimated;
          for (size_t i = 0; i < share(policy.floor); ++i) clusters[order[i]].fate = kFateExact;
        } else {
          rank(&Cluster::log_mass);
          double before = 0;
          for (size_t i = 0; i < order.size(); ++i) {
            Cluster& c = clusters[order[i]];
            if (policy.cut == CutKind::kTopK) {
              c.fate = i < share(policy.exact_share) ? kFateExact
                       : i < share(policy.exact_share) + share(policy.estimated_share)
                           ? kFateEstimated
                           : kFateDropped;
            } else {
              c.fate = before < policy.p2   ? kFateExact
                       : before < policy.p1 ? kFateEstimated
                                            : kFateDropped;
            }
            before += c.score;
          }
        }
        std::vector<double> moments(group), least(group);
        const bool limited = policy.cut == CutKind::kErrorBudget && std::isfinite(policy.tolerance);
        std::vector<State> guess = zone;
        for (const auto& c : clusters) {
          for (uint32_t h = 0; h < group; ++h) {
            add(&guess[h], c.log_mass[h], [&](uint32_t d) { return mean_value(c, d); });
          }
        }
        for (uint32_t h = 0; h < group && !clusters.empty(); ++h) {
          double moment = 0;
          for (const auto& c : clusters) {
            moment += std::exp(c.log_mass[h] - guess[h].max) * part(c, &IndexOffsets::value_norm2);
          }
          double norm2 = 0;
          for (const double v : zone[h].values) norm2 += v * v;
          moment += norm2 / zone[h].sum * std::exp(zone[h].max - guess[h].max);
          least[h] = 1e-3 * std::sqrt(moment / guess[h].sum);
        }
        if (limited) {
          for (auto& c : clusters) {
            c.score = 0;
            for (uint32_t h = 0; h < group; ++h) {
              double norm2 = 0;
              for (const double v : guess[h].values) norm2 += v * v;
              const double norm = std::max(std::sqrt(norm2) / guess[h].sum, least[h]);
              const double e = std::exp(c.log_mass[h] - guess[h].max) / guess[h].sum / norm *
                               part(c, &IndexOffsets::spread);
              c.score += e * e * std::expm1(std::min(c.d2[h], 8.0)) / group;
            }
          }
          std::iota(order.begin(), order.end(), 0u);
          std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
            return clusters[a].score > clusters[b].score;
          });
          double rest = 0;
          size_t marked = order.size();
          while (marked > 0 &&
                 rest + clusters[order[marked - 1]].score <= policy.tolerance * policy.tolerance) {
            rest += clusters[order[--marked]].score;
          }
          for (size_t i = 0; i < marked; ++i) clusters[order[i]].fate = kFateExact;
        }
        // ---- answer ----
        all = zone;
        uint64_t exact_tokens = 0;
        for (const auto& c : clusters) {
          const size_t number = r * segments_of_row_ + c.segment;
          if (c.fate == kFateExact) {
            exact_tokens += c.end - c.begin;
            std::byte* base = pages[number].data() + head * segments_[number].pages_head_bytes;
            for (uint32_t i = c.begin; i < c.end; ++i) add_token(base, i, &all);
          } else if (c.fate == kFateEstimated) {
            for (uint32_t h = 0; h < group; ++h) {
              add(&all[h], c.log_mass[h], [&](uint32_t d) { return mean_value(c, d); });
            }
          }
        }
        if (policy.kind == UnitKind::kClusters) {
          const auto& unit = units[(size_t{r} * shape_.query_tokens + t) * shape_.kv_heads + head];
          if (unit.chosen_tokens != exact_tokens) ++plan_differences;
        }
        for (uint32_t h = 0; h < group; ++h) {
          const size_t slot = (size_t{r} * shape_.query_tokens + t) * heads() + head * group + h;
          double norm = 0, difference = 0;
          for (uint32_t c = 0; c < dim; ++c) {
            const double expected = all[h].values[c] / all[h].sum;
            norm += expected * expected;
            difference += std::pow(expected - out[slot * dim + c], 2);
          }
          worst.Take(std::sqrt(difference / norm));
          worst.Take(std::abs(all[h].max + std::log(all[h].sum) - lse[slot]));
          if (!policy.second_order || clusters.empty()) continue;
          double error = 0;
          for (const auto& c : clusters) {
            if (c.fate != kFateEstimated) continue;
            const double e = std::exp(c.log_mass[h] - all[h].max) * part(c, &IndexOffsets::spread);
            error += e * e * std::expm1(std::min(c.d2[h], 8.0));
          }
          error = std::sqrt(error) / all[h].sum / std::max(std::sqrt(norm), least[h]);
          worst_error.Take(std::abs(error - results[slot].predicted_error) / std::max(error, 1e-6));
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
