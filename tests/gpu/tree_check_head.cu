// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/tree_check_head.cuh"

namespace attnd::gpu::test {
namespace {

// Multiply-adds of the reference that are worth waiting for.
constexpr double kReferenceWork = 4e9;
// Keys whose products are no floats: the device takes deviations beyond these for these, or for 0.
constexpr double kDeviationMax = 1e16, kDeviationMin = 1e-18;

double Bounded(double x) {
  if (std::abs(x) < kDeviationMin) return 0;
  return std::clamp(x, -kDeviationMax, kDeviationMax);
}

}  // namespace

TreeHeadCheck::TreeHeadCheck(const Case& c, const HeadRows& rows, const std::byte* index,
                             const std::byte* pages)
    : case_(c),
      rows_(rows),
      layout_(c.shape, c.tokens, c.unclustered, c.tree),
      index_(index),
      pages_(pages),
      dim_(c.shape.head_dim),
      value_dim_(c.shape.value_dim) {}

TreeFindings TreeHeadCheck::Run() {
  CheckOrder();
  if (findings_.failure.empty()) CheckGroups();
  if (!findings_.failure.empty()) return findings_;
  CheckPayload();
  LoadPoints();
  LoadAxes();
  CheckPart(layout_.tree.leaves, leaves_, "leaf");
  CheckPart(layout_.tree.groups, groups_, "group");
  CheckRegression();
  CheckObjective();
  return findings_;
}

void TreeHeadCheck::CheckOrder() {
  const TreePart& part = layout_.tree.leaves;
  const uint32_t n = findings_.leaves = Read<uint32_t>(0, 0);
  if (n < 1 || n > layout_.max_clusters) return Fail("%u leaves", n);
  for (uint32_t i = 0; i <= n; ++i) {
    leaves_.push_back(Read<uint32_t>(part.starts, i) - case_.unclustered);
    if (i > 0 && leaves_[i] <= leaves_[i - 1]) return Fail("leaf %u: no members", i - 1);
  }
  if (leaves_[0] != 0 || leaves_[n] != case_.tokens - case_.unclustered) {
    return Fail("leaves from %u to %u", leaves_[0], leaves_[n]);
  }
  std::vector<bool> seen(case_.tokens, false);
  for (uint32_t slot = 0; slot < case_.tokens; ++slot) {
    const uint32_t token = Read<uint16_t>(layout_.tree.positions, slot);
    if (token >= case_.tokens || seen[token]) return Fail("slot %u: token %u", slot, token);
    seen[token] = true;
    if (slot < case_.unclustered && token != slot) return Fail("sink slot %u: %u", slot, token);
    if (slot >= case_.unclustered) order_.push_back(token);
  }
  for (uint32_t i = 0; i < n; ++i) {
    if (!std::is_sorted(order_.begin() + leaves_[i], order_.begin() + leaves_[i + 1])) {
      return Fail("leaf %u: no token order", i);
    }
  }
}

void TreeHeadCheck::CheckGroups() {
  const TreePart& part = layout_.tree.groups;
  const uint32_t n = findings_.groups = Read<uint32_t>(part.count, 0);
  if (n < 1 || n > layout_.max_groups) return Fail("%u groups", n);
  for (uint32_t g = 0; g <= n; ++g) {
    const uint32_t member = Read<uint32_t>(part.first_members, g);
    if (member > findings_.leaves) return Fail("group %u: leaf %u", g, member);
    const uint32_t start = Read<uint32_t>(part.starts, g) - case_.unclustered;
    if (start != leaves_[member]) return Fail("group %u starts at %u", g, start);
    groups_.push_back(start);
    if (g > 0 && groups_[g] <= groups_[g - 1]) return Fail("group %u: no members", g - 1);
    if (g > 0) findings_.greatest = std::max(findings_.greatest, groups_[g] - groups_[g - 1]);
  }
  if (groups_.front() != 0 || groups_.back() != order_.size()) Fail("groups without tokens");
}

void TreeHeadCheck::CheckPayload() {
  const auto zeros = [&](size_t at, size_t bytes) {
    return std::all_of(pages_ + at, pages_ + at + bytes,
                       [](std::byte b) { return b == std::byte{}; });
  };
  for (uint32_t slot = 0; slot < case_.tokens; ++slot) {
    const size_t token = Read<uint16_t>(layout_.tree.positions, slot);
    if (std::memcmp(pages_ + layout_.Key(slot), &rows_.keys[token * dim_], layout_.key_bytes) !=
            0 ||
        std::memcmp(pages_ + layout_.Value(slot), &rows_.values[token * value_dim_],
                    layout_.value_bytes) != 0) {
      return Fail("payload of slot %u", slot);
    }
  }
  for (uint32_t slot = case_.tokens; slot % kPageTokens != 0; ++slot) {
    if (!zeros(layout_.Key(slot), layout_.key_bytes) ||
        !zeros(layout_.Value(slot), layout_.value_bytes)) {
      return Fail("padding %u", slot);
    }
  }
}

// What the tree's clusters are made of.
void TreeHeadCheck::LoadPoints() {
  Rows keys, values, key_mean, value_mean;
  const auto n = static_cast<uint32_t>(order_.size());
  Centre(0, n, &keys, &values, &key_mean, &value_mean);
  const auto scale = [&](const Rows& rows, double share) {
    double squares = 0;
    for (const double x : rows) squares += x * x;
    return share / std::max(std::sqrt(squares / n), 1e-30);
  };
  const double key_scale = scale(keys, 1), value_scale = scale(values, 0.5);
  points_.resize(size_t{n} * (dim_ + value_dim_));
  for (size_t i = 0; i < n; ++i) {
    double* point = &points_[(order_[i] - case_.unclustered) * (dim_ + value_dim_)];
    for (size_t k = 0; k < dim_; ++k) point[k] = keys[i * dim_ + k] * key_scale;
    for (size_t k = 0; k < value_dim_; ++k) {
      point[dim_ + k] = values[i * value_dim_ + k] * value_scale;
    }
  }
  for (uint32_t k = 0; k < dim_; ++k) {
    CheckFloat("key base", k, Read<float>(layout_.tree.key_base, k), key_mean[k],
               1e-6 * std::abs(key_mean[k]));
  }
  for (uint32_t k = 0; k < value_dim_; ++k) {
    CheckFloat("value base", k, Read<float>(layout_.tree.value_base, k), value_mean[k],
               1e-6 * std::abs(value_mean[k]));
  }
}

void TreeHeadCheck::LoadAxes() {
  for (size_t i = 0; i < size_t{dim_} * dim_; ++i) {
    axes_.push_back(ToDouble(DType::kBf16, Read<uint16_t>(layout_.tree.axes, i)));
  }
  for (size_t i = 0; i < size_t{dim_} * value_dim_; ++i) {
    slopes_.push_back(ToDouble(DType::kBf16, Read<uint16_t>(layout_.tree.slopes, i)));
  }
}

void TreeHeadCheck::Centre(uint32_t begin, uint32_t end, Rows* keys, Rows* values, Rows* key_mean,
                           Rows* value_mean) const {
  const auto centre = [&](const std::vector<uint16_t>& source, uint32_t dim, Rows* rows,
                          Rows* mean) {
    mean->assign(dim, 0.0);
    rows->clear();
    for (uint32_t i = begin; i < end; ++i) {
      for (uint32_t k = 0; k < dim; ++k) {
        rows->push_back(ToDouble(case_.shape.dtype, source[size_t{order_[i]} * dim + k]));
        (*mean)[k] += rows->back();  // exact where all rows are equal
      }
    }
    for (double& m : *mean) m /= end - begin;
    for (size_t i = 0; i < rows->size(); ++i) (*rows)[i] -= (*mean)[i % dim];
  };
  centre(rows_.keys, dim_, keys, key_mean);
  centre(rows_.values, value_dim_, values, value_mean);
}

TreeHeadCheck::Rows TreeHeadCheck::Turn(const Rows& keys, size_t count) const {
  Rows turned(count * dim_, 0.0);
  for (size_t i = 0; i < count; ++i) {
    for (size_t a = 0; a < dim_; ++a) {
      double sum = 0;
      for (size_t k = 0; k < dim_; ++k) sum += axes_[a * dim_ + k] * Bounded(keys[i * dim_ + k]);
      turned[i * dim_ + a] = sum;
    }
  }
  return turned;
}

void TreeHeadCheck::CheckBytes(const char* name, uint32_t codes, uint32_t scales, uint32_t base,
                               uint32_t i, const double* mean, uint32_t dim) {
  const double scale = Read<float>(scales, i);
  double greatest = 0;
  for (uint32_t k = 0; k < dim; ++k) {
    const double from = Read<float>(base, k);
    greatest = std::max(greatest, std::abs(mean[k] - from));
    const double stored = from + scale * Read<int8_t>(codes, size_t{i} * dim + k);
    CheckFloat(name, i, stored, mean[k],
               0.5001 * scale + 2e-6 * (std::abs(mean[k]) + std::abs(from)));
  }
  CheckFloat("scale", i, scale, greatest / 127, 1e-5 * greatest + 1e-37);
}

void TreeHeadCheck::CheckVariances(const TreePart& part, uint32_t i, const Rows& turned,
                                   size_t count) {
  std::vector<double> deviations(dim_, 0.0);
  double all = 0;
  for (size_t k = 0; k < turned.size(); ++k) {
    deviations[k % dim_] += turned[k] * turned[k] / static_cast<double>(count);
    all += turned[k] * turned[k] / static_cast<double>(count);
  }
  const double step = std::sqrt(double{Read<float>(part.variance_unit, i)});
  for (uint32_t a = 0; a < dim_; ++a) {
    const auto byte = Read<uint8_t>(part.deviation_codes, size_t{i} * dim_ / 2 + a % (dim_ / 2));
    const double stored = step * (a < dim_ / 2 ? byte & 15 : byte >> 4);
    const double error =
        std::max(0.0, std::abs(stored - std::sqrt(deviations[a])) - 0.5001 * step) /
        (std::sqrt(all) + 1e-17);
    findings_.deviation_error = std::max(findings_.deviation_error, error);
  }
}

void TreeHeadCheck::CheckSpread(const TreePart& part, uint32_t i, const Rows& turned,
                                const Rows& values, size_t count) {
  double rest2 = 0, all = 0;
  for (size_t t = 0; t < count; ++t) {
    for (size_t k = 0; k < value_dim_; ++k) {
      double rest = values[t * value_dim_ + k];
      all += rest * rest / static_cast<double>(count);
      for (size_t a = 0; a < dim_; ++a) {
        rest -= turned[t * dim_ + a] * slopes_[a * value_dim_ + k];
      }
      rest2 += rest * rest / static_cast<double>(count);
    }
  }
  const double error = std::abs(Read<float>(part.spread, i) - std::sqrt(rest2));
  findings_.spread_error =
      std::max(findings_.spread_error, error / (std::sqrt(std::max(all, rest2)) + 1e-6));
}

void TreeHeadCheck::CheckPart(const TreePart& part, const std::vector<uint32_t>& bounds,
                              const char* name) {
  for (uint32_t i = 0; i + 1 < bounds.size(); ++i) {
    const size_t count = bounds[i + 1] - bounds[i];
    Rows keys, values, key_mean, value_mean;
    Centre(bounds[i], bounds[i + 1], &keys, &values, &key_mean, &value_mean);
    CheckBytes("centroid", part.centroids, part.centroid_scales, layout_.tree.key_base, i,
               key_mean.data(), dim_);
    CheckBytes("mean value", part.mean_values, part.mean_value_scales, layout_.tree.value_base, i,
               value_mean.data(), value_dim_);
    double norm2 = 0;
    for (uint32_t k = 0; k < value_dim_; ++k) {
      const double stored = Read<float>(layout_.tree.value_base, k) +
                            double{Read<float>(part.mean_value_scales, i)} *
                                Read<int8_t>(part.mean_values, size_t{i} * value_dim_ + k);
      norm2 += stored * stored;
    }
    CheckFloat("value_norm2", i, Read<float>(part.value_norm2, i), norm2, 1e-5 * norm2 + 1e-30);
    CheckFloat("log_size", i, Read<float>(part.log_size, i), std::log(static_cast<double>(count)),
               1e-5);
    const Rows turned = Turn(keys, count);
    CheckVariances(part, i, turned, count);
    CheckSpread(part, i, turned, values, count);
    if (!findings_.failure.empty()) return Fail("%s %u", name, i);
  }
  if (!(findings_.deviation_error <= kDeviationErrorMax)) Fail("variances of %ss", name);
  if (!(findings_.spread_error <= kSpreadErrorMax)) Fail("spreads of %ss", name);
}

// Axes turn the moments within leaves into a diagonal, by descending variance, and slopes are those
// of a least-squares fit with its ridge.
void TreeHeadCheck::CheckRegression() {
  Rows moments(size_t{dim_} * dim_, 0.0), cross(size_t{dim_} * value_dim_, 0.0);
  Rows squares(dim_, 0.0);
  double values2 = 0;
  for (uint32_t i = 0; i < findings_.leaves; ++i) {
    const size_t count = leaves_[i + 1] - leaves_[i];
    Rows keys, values, key_mean, value_mean;
    Centre(leaves_[i], leaves_[i + 1], &keys, &values, &key_mean, &value_mean);
    const Rows turned = Turn(keys, count);
    for (size_t t = 0; t < count; ++t) {
      for (size_t a = 0; a < dim_; ++a) {
        const double y = turned[t * dim_ + a];
        squares[a] += y * y;
        for (size_t b = 0; b < dim_; ++b) moments[a * dim_ + b] += y * turned[t * dim_ + b];
        for (size_t k = 0; k < value_dim_; ++k) {
          cross[a * value_dim_ + k] += y * values[t * value_dim_ + k];
        }
      }
    }
    for (const double x : values) values2 += x * x;
  }
  CheckAxes(moments);
  const double ridge = 1 + dim_ / static_cast<double>(order_.size());
  double all = 0, error2 = 0;
  for (const double x : squares) all += x;
  for (size_t a = 0; a < dim_; ++a) {
    for (size_t k = 0; k < value_dim_ && squares[a] > 1e-5 * all; ++k) {
      const double best = cross[a * value_dim_ + k] / (ridge * squares[a]);
      const double error = slopes_[a * value_dim_ + k] - best;
      error2 += error * error * squares[a];
    }
  }
  findings_.slope_error = values2 > 0 ? std::sqrt(error2 / values2) : 0;
  if (!(findings_.slope_error <= kSlopeErrorMax)) Fail("slopes: %g", findings_.slope_error);
}

void TreeHeadCheck::CheckAxes(const Rows& moments) {
  double all = 0;
  for (const double x : moments) all += x * x;
  all = std::sqrt(all);
  for (size_t a = 0; a < dim_; ++a) {
    for (size_t b = 0; b < dim_; ++b) {
      double product = 0;
      for (size_t k = 0; k < dim_; ++k) product += axes_[a * dim_ + k] * axes_[b * dim_ + k];
      if (!(std::abs(product - (a == b)) <= 1e-2)) Fail("axes %zu, %zu: %g", a, b, product);
      if (a == b || all == 0) continue;
      findings_.off_diagonal =
          std::max(findings_.off_diagonal, std::abs(moments[a * dim_ + b]) / all);
    }
    const double next = a + 1 < dim_ ? moments[(a + 1) * (dim_ + 1)] : 0;
    if (next - moments[a * (dim_ + 1)] > 6e-3 * all) Fail("axis %zu: order", a);
  }
  if (!(findings_.off_diagonal <= kOffDiagonalMax)) Fail("axes: %g", findings_.off_diagonal);
}

double TreeHeadCheck::Objective(const std::vector<std::vector<uint32_t>>& parts) const {
  const size_t dim = dim_ + value_dim_;
  double sum = 0;
  for (const auto& part : parts) {
    std::vector<double> mean(dim, 0.0);
    for (const uint32_t i : part) {
      for (size_t k = 0; k < dim; ++k) {
        mean[k] += points_[i * dim + k] / static_cast<double>(part.size());
      }
    }
    for (const uint32_t i : part) {
      for (size_t k = 0; k < dim; ++k) {
        sum += (points_[i * dim + k] - mean[k]) * (points_[i * dim + k] - mean[k]);
      }
    }
  }
  return sum;
}

void TreeHeadCheck::CheckObjective() {
  const size_t dim = dim_ + value_dim_;
  const double work = double(order_.size()) * layout_.max_groups * double(dim) * kIterations;
  if (work > kReferenceWork) return;
  std::vector<std::vector<uint32_t>> own(findings_.leaves);
  for (uint32_t i = 0; i < findings_.leaves; ++i) {
    for (uint32_t slot = leaves_[i]; slot < leaves_[i + 1]; ++slot) {
      own[i].push_back(order_[slot] - case_.unclustered);
    }
  }
  const double got = Objective(own);
  const double want =
      Objective(ReferenceLeaves(points_, dim, layout_.max_groups, layout_.max_clusters));
  // Points are of length 1; what is left of equal ones is rounding.
  const double negligible = 1e-6 * static_cast<double>(order_.size());
  findings_.objective_ratio = (got + negligible) / (want + negligible);
  if (!(findings_.objective_ratio <= kTreeRatioMax)) Fail("objective: %g, not %g", got, want);
}

}  // namespace attnd::gpu::test
