// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/tree_reference.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

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
using reference::Token;
using reference::Unit;
using reference::Variances;
using reference::Vector;

// docs/POLICIES.md, "error-target".
constexpr double kLeafOptimism = 2, kGroupOptimism = 4;  // standard deviations
constexpr double kOpenedShare = 0.05;
constexpr double kOpenedPerFloor = 2;
constexpr size_t kOpenedLeast = 32;
constexpr double kClosedErrorShare = 0.3;  // of the tolerance
constexpr double kMassErrorShare = 0.5;
constexpr double kOwnErrorShare = 1.2;
constexpr double kCommonErrorShare = 0.7;
constexpr double kNormShare = 1e-3;  // of r

// A leaf or a group, as its segment's index describes it.
struct Item {
  uint32_t segment, row;  // row: of the segment's leaves or groups
  bool group;
  Vector centroid, mean_value, variance;
  double log_size, spread, value_norm2;
  uint32_t begin, end;  // tokens in the segment's order
  double tokens() const { return end - begin; }
};

// One segment's tree, for one KV head.
struct Tree {
  Vector key_base, value_base;
  std::vector<Vector> axes, slopes;  // [head_dim] rows
  std::vector<Item> leaves, groups;
  std::vector<uint32_t> first_members;  // of each group, and the number of leaves
};

// What one head makes of some items.
struct Scores {
  Vector log_mass, d2;
};
// The softmax of zones and estimates, and what the slopes add to its values.
struct Estimated {
  Softmax state;
  Vector shift;  // times exp(-state.max), as state.values are; these have it already
};
// What errors are relative to.
struct Scale {
  double lse, output_norm, least_norm;
};

Vector ByteRow(const std::byte* codes, double scale, const Vector& base, size_t row) {
  Vector values = base;
  for (size_t c = 0; c < base.size(); ++c) {
    values[c] += scale * Read<int8_t>(codes, row * base.size() + c);
  }
  return values;
}

Vector Floats(const std::byte* at, size_t count) {
  Vector values;
  for (size_t i = 0; i < count; ++i) values.push_back(Read<float>(at, i));
  return values;
}

std::vector<Item> ReadItems(const std::byte* index, const TreePart& at, const Tree& tree,
                            uint32_t segment, bool groups) {
  std::vector<Item> items;
  const size_t dim = tree.key_base.size();
  const uint32_t count = Read<uint32_t>(index + at.count, 0);
  for (uint32_t i = 0; i < count; ++i) {
    Item item;
    item.segment = segment;
    item.row = i;
    item.group = groups;
    item.centroid =
        ByteRow(index + at.centroids, Read<float>(index + at.centroid_scales, i), tree.key_base, i);
    item.mean_value = ByteRow(index + at.mean_values, Read<float>(index + at.mean_value_scales, i),
                              tree.value_base, i);
    item.variance = Variances(index + at.deviation_codes + i * dim / 2,
                              Read<float>(index + at.variance_unit, i), static_cast<uint32_t>(dim));
    item.log_size = Read<float>(index + at.log_size, i);
    item.spread = Read<float>(index + at.spread, i);
    item.value_norm2 = Read<float>(index + at.value_norm2, i);
    item.begin = Read<uint32_t>(index + at.starts, i);
    item.end = Read<uint32_t>(index + at.starts, i + 1);
    items.push_back(std::move(item));
  }
  return items;
}

Tree ReadTree(const Unit& unit, uint32_t segment) {
  const TreeOffsets& at = unit.header.trees[unit.row.trees_begin + segment].offsets;
  const std::byte* index = unit.IndexOf(segment);
  const size_t dim = unit.shape.head_dim, value_dim = unit.shape.value_dim;
  Tree tree;
  tree.key_base = Floats(index + at.key_base, dim);
  tree.value_base = Floats(index + at.value_base, value_dim);
  for (size_t a = 0; a < dim; ++a) {
    tree.axes.push_back(Load(DType::kBf16, index + at.axes + 2 * a * dim, dim));
    tree.slopes.push_back(Load(DType::kBf16, index + at.slopes + 2 * a * value_dim, value_dim));
  }
  tree.leaves = ReadItems(index, at.leaves, tree, segment, false);
  tree.groups = ReadItems(index, at.groups, tree, segment, true);
  for (size_t g = 0; g <= tree.groups.size(); ++g) {
    tree.first_members.push_back(Read<uint32_t>(index + at.groups.first_members, g));
  }
  return tree;
}

class TreeLanes {
 public:
  explicit TreeLanes(const Unit& unit)
      : unit_(unit),
        by_mass_(unit.row.cut != CutKind::kErrorBudget),
        limited_(std::isfinite(unit.row.tolerance)),
        zone_(unit.ReadTokens()) {
    for (uint32_t s = 0; s < unit.row.segment_count; ++s) trees_.push_back(ReadTree(unit, s));
  }

  void Run(bool one_more_exact, bool one_more_opened) {
    for (const Tree& tree : trees_) {
      for (const Item& group : tree.groups) items_.push_back(&group);
    }
    opened_.assign(items_.size(), by_mass_);
    if (!by_mass_) OpenGroups();
    if (one_more_opened) TakeOneMore(items_.size(), &opened_);
    TakeItems();
    exact_.assign(items_.size(), false);
    dropped_.assign(items_.size(), false);
    by_mass_ ? ChooseByMass() : Choose();
    if (one_more_exact) TakeOneMore(leaves_, &exact_);
    for (uint32_t head = 0; head < heads(); ++head) Answer(head);
  }

  void Report(UnitResult* result, uint8_t* fates) const {
    *result = UnitResult{};
    for (const Tree& tree : trees_) result->clusters += static_cast<uint32_t>(tree.leaves.size());
    uint8_t* leaf = fates;
    for (size_t i = 0; i < items_.size(); ++i) {
      const Item& item = *items_[i];
      const uint32_t tokens = item.end - item.begin;
      const uint8_t fate = FateOf(i);
      if (fate == kFateExact) result->chosen_tokens += tokens;
      if (fate == kFateEstimated) result->estimated_tokens += tokens;
      if (fate == kFateDropped) result->dropped_tokens += tokens;
      if (!item.group) *leaf++ = fate;
    }
    size_t number = 0;
    for (uint32_t s = 0; s < trees_.size(); ++s) {
      const TreeRef& tree = unit_.header.trees[unit_.row.trees_begin + s];
      uint8_t* own = fates + unit_.row.slots + tree.first_group_slot;
      for (size_t g = 0; g < trees_[s].groups.size(); ++g, ++number) {
        own[g] = opened_[number] ? kFateExact : kFateEstimated;
      }
    }
  }

 private:
  using Marks = std::vector<bool>;

  size_t heads() const { return unit_.queries.size(); }
  uint8_t FateOf(size_t i) const {
    return exact_[i] ? kFateExact : dropped_[i] ? kFateDropped : kFateEstimated;
  }

  // ---- choices ----

  // All groups are the items; the outputs that errors are relative to stay those found here.
  void OpenGroups() {
    Score();
    const size_t n = items_.size();
    const double share = std::min(1.0, std::max(kOpenedShare, kOpenedPerFloor * unit_.row.floor));
    MarkFloor(n, std::max(ShareOf(share, n), std::min(kOpenedLeast, n)), kGroupOptimism, &opened_);
    if (!limited_) return;
    for (uint32_t head = 0; head < heads(); ++head) {
      output_norms_.push_back(Norm(Estimate(head, Marks(n, true), Zone(head)).state.Out()));
    }
    MarkErrors(n, kClosedErrorShare * unit_.row.tolerance, &opened_);
  }

  // The items become the leaves of opened groups, and behind them the groups that stay closed.
  void TakeItems() {
    std::vector<const Item*> closed;
    items_.clear();
    size_t number = 0;
    for (const Tree& tree : trees_) {
      for (size_t g = 0; g < tree.groups.size(); ++g, ++number) {
        if (!opened_[number]) closed.push_back(&tree.groups[g]);
        for (uint32_t i = tree.first_members[g]; opened_[number] && i < tree.first_members[g + 1];
             ++i) {
          items_.push_back(&tree.leaves.at(i));
        }
      }
    }
    leaves_ = items_.size();
    items_.insert(items_.end(), closed.begin(), closed.end());
    Score();
  }

  void Choose() {
    size_t all = 0;
    for (const Tree& tree : trees_) all += tree.leaves.size();
    MarkFloor(leaves_, std::min(ShareOf(unit_.row.floor, all), leaves_), kLeafOptimism, &exact_);
    if (limited_) MarkErrors(leaves_, unit_.row.tolerance, &exact_);
  }

  // All leaves are the items.
  void ChooseByMass() {
    const RowRef& row = unit_.row;
    const size_t n = items_.size();
    const size_t exact = ShareOf(row.exact_share, n);
    const size_t kept = exact + std::min(ShareOf(row.estimated_share, n), n - exact);
    const Vector mass = MeanShare(LogMasses(n));
    double before = 0;
    size_t rank = 0;
    for (const size_t i : Descending(mass)) {
      const auto within = [&](double p, size_t count) {
        return row.cut == CutKind::kTopP ? p >= 1 || before < p : rank < count;
      };
      exact_[i] = within(row.p2, exact);
      dropped_[i] = !within(row.p1, kept);
      before += mass[i];
      ++rank;
    }
  }

  // Of the first `count` items the `wanted` of most optimistic mass for each token.
  void MarkFloor(size_t count, size_t wanted, double optimism, Marks* marks) const {
    std::vector<Vector> optimistic;
    for (const Scores& scores : scores_) {
      Vector& own = optimistic.emplace_back();
      for (size_t i = 0; i < count; ++i) {
        own.push_back(scores.log_mass[i] - Capped(scores.d2[i]) / 2 +
                      optimism * std::sqrt(scores.d2[i]));
      }
    }
    const std::vector<size_t> order = ByToken(MeanShare(optimistic));
    for (size_t k = 0; k < wanted; ++k) (*marks)[order[k]] = true;
  }

  // Of the first `count` items those that leave too much of an error; that of the others counts
  // first.
  void MarkErrors(size_t count, double tolerance, Marks* marks) const {
    Vector error2(items_.size(), 0.0);
    for (uint32_t head = 0; head < heads(); ++head) {
      const Softmax first = Estimate(head, Marks(items_.size(), true), Zone(head)).state;
      const Scale scale = {first.lse(), output_norms_[head], LeastNorm(head, first.lse())};
      for (size_t i = 0; i < items_.size(); ++i) {
        error2[i] += SquaredError(head, i, scale) / static_cast<double>(heads());
      }
    }
    double budget = tolerance * tolerance;
    for (size_t i = count; i < items_.size(); ++i) budget -= error2[i];
    budget = std::max(budget, 0.0);
    error2.resize(count);
    std::vector<size_t> order = ByToken(error2);
    double rest = 0;
    while (!order.empty() && rest + error2[order.back()] <= budget) {
      rest += error2[order.back()];
      order.pop_back();
    }
    for (const size_t i : order) (*marks)[i] = true;
  }

  // Of the first `count` items, of each head.
  std::vector<Vector> LogMasses(size_t count) const {
    std::vector<Vector> mass;
    for (const Scores& scores : scores_) {
      mass.emplace_back(scores.log_mass.begin(),
                        scores.log_mass.begin() + static_cast<ptrdiff_t>(count));
    }
    return mass;
  }

  // By the number for each token that is read, descending.
  std::vector<size_t> ByToken(Vector numbers) const {
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] /= items_[i]->tokens();
    return Descending(numbers);
  }

  // The planted faults: marks the best of the first `count` items that is not marked.
  void TakeOneMore(size_t count, Marks* marks) const {
    for (const size_t i : Descending(MeanShare(LogMasses(count)))) {
      if ((*marks)[i]) continue;
      (*marks)[i] = true;
      return;
    }
  }

  // ---- scores and estimates ----

  static double Capped(double d2) { return std::min(d2, kVarianceMax); }

  // The head's scaled query along the segment's axes; nothing in the first order.
  Vector Rotated(uint32_t head, uint32_t segment) const {
    Vector rotated;
    if (unit_.row.second_order == 0) return Vector(trees_[segment].axes.size(), 0.0);
    for (const Vector& axis : trees_[segment].axes) {
      rotated.push_back(unit_.header.softmax_scale * Dot(axis, unit_.queries[head]));
    }
    return rotated;
  }

  void Score() {
    scores_.clear();
    for (uint32_t head = 0; head < heads(); ++head) {
      Scores& scores = scores_.emplace_back();
      std::vector<Vector> rotated;
      for (uint32_t s = 0; s < trees_.size(); ++s) rotated.push_back(Rotated(head, s));
      for (const Item* item : items_) {
        double d2 = 0;
        for (size_t a = 0; a < item->variance.size(); ++a) {
          d2 += std::pow(rotated[item->segment][a], 2) * item->variance[a];
        }
        scores.d2.push_back(d2);
        scores.log_mass.push_back(unit_.header.softmax_scale *
                                      Dot(unit_.queries[head], item->centroid) +
                                  item->log_size + Capped(d2) / 2);
      }
    }
  }

  Softmax Zone(uint32_t head) const { return unit_.StateOf(head, zone_); }

  // The marked items' estimates, added to a state.
  Estimated Estimate(uint32_t head, const Marks& marks, Softmax state) const {
    const Scores& scores = scores_[head];
    for (size_t i = 0; i < items_.size(); ++i) {
      if (marks[i]) state.Add(scores.log_mass[i], items_[i]->mean_value);
    }
    Vector shift(state.values.size(), 0.0);
    for (uint32_t s = 0; s < trees_.size(); ++s) {
      Vector moved(trees_[s].axes.size(), 0.0);
      for (size_t i = 0; i < items_.size(); ++i) {
        if (!marks[i] || items_[i]->segment != s) continue;
        const double damped = std::min(1.0, kVarianceMax / scores.d2[i]);
        const double weight = std::exp(scores.log_mass[i] - state.max) * damped;
        for (size_t a = 0; a < moved.size(); ++a) moved[a] += weight * items_[i]->variance[a];
      }
      const Vector rotated = Rotated(head, s);
      for (size_t a = 0; a < moved.size(); ++a) {
        for (size_t c = 0; c < shift.size(); ++c) {
          shift[c] += rotated[a] * moved[a] * trees_[s].slopes[a][c];
        }
      }
    }
    for (size_t c = 0; c < shift.size(); ++c) state.values[c] += shift[c];
    return {std::move(state), std::move(shift)};
  }

  // 1e-3 of the values' root mean square in the softmax of zones and all items' estimates.
  double LeastNorm(uint32_t head, double lse) const {
    const Softmax zone = Zone(head);
    const double of_zone = Norm(zone.Out());
    double moment = ShareIn(zone, lse) * of_zone * of_zone;
    for (size_t i = 0; i < items_.size(); ++i) {
      moment += std::exp(scores_[head].log_mass[i] - lse) * items_[i]->value_norm2;
    }
    return kNormShare * std::sqrt(moment);
  }

  // The square of what leaving an item to its estimate errs by.
  double SquaredError(uint32_t head, size_t i, const Scale& scale) const {
    const Item& item = *items_[i];
    const double g = Capped(scores_[head].d2[i]);
    const double norm = std::max(scale.output_norm, scale.least_norm);
    const double share = std::exp(scores_[head].log_mass[i] - scale.lse) / norm;
    const double of_values =
        std::min(std::expm1(g), item.tokens() - 1) * item.spread * item.spread / item.tokens();
    const double of_mass = kMassErrorShare * g / 2 * g / 2 *
                           (item.value_norm2 + scale.output_norm * scale.output_norm);
    return share * share * (of_values + of_mass);
  }

  void Answer(uint32_t head) {
    Marks estimated(items_.size(), false);
    Softmax read = Zone(head), dropped(unit_.shape.value_dim);
    for (size_t i = 0; i < items_.size(); ++i) {
      estimated[i] = FateOf(i) == kFateEstimated;
      if (FateOf(i) == kFateDropped) dropped.Add(scores_[head].log_mass[i], items_[i]->mean_value);
      if (exact_[i]) {
        unit_.AddTokens(head, items_[i]->segment, items_[i]->begin, items_[i]->end, &read);
      }
    }
    const auto [state, shift] = Estimate(head, estimated, read);
    unit_.Write(head, state);
    LaneResult& result = unit_.header.lane_results[unit_.Slot(head)];
    const double covered = 1 / (1 + ShareIn(dropped, state.lse()));
    result = {static_cast<float>(covered), static_cast<float>(ShareIn(read, state.lse()) * covered),
              0, 0};
    if (std::count(estimated.begin(), estimated.end(), true) == 0) return;
    const double first = Estimate(head, Marks(items_.size(), true), Zone(head)).state.lse();
    const Scale scale = {state.lse(), Norm(state.Out()), LeastNorm(head, first)};
    double error2 = 0, mass = 0, variances = 0;
    for (size_t i = 0; i < items_.size(); ++i) {
      if (!estimated[i]) continue;
      error2 += SquaredError(head, i, scale);
      const double share = std::exp(scores_[head].log_mass[i] - scale.lse);
      mass += share;
      variances += share * Capped(scores_[head].d2[i]);
    }
    const double common = kCommonErrorShare * std::sqrt(variances / mass) * Norm(shift) /
                          state.sum / std::max(scale.output_norm, scale.least_norm);
    result.predicted_error =
        static_cast<float>(std::hypot(kOwnErrorShare * std::sqrt(error2), common));
  }

  const Unit& unit_;
  const bool by_mass_, limited_;
  const std::vector<Token> zone_;
  std::vector<Tree> trees_;         // [segments]
  std::vector<const Item*> items_;  // that are chosen among, and behind leaves_ those that are not
  size_t leaves_ = 0;               // of items_
  std::vector<Scores> scores_;      // [group], of items_
  Vector output_norms_;             // [group], of a tolerance
  Marks opened_;                    // [groups]
  Marks exact_, dropped_;           // [items]
};

}  // namespace

void RunTreeReference(const Unit& unit, bool one_more_exact, bool one_more_opened,
                      UnitResult* result, uint8_t* fates) {
  TreeLanes lanes(unit);
  lanes.Run(one_more_exact, one_more_opened);
  lanes.Report(result, fates);
}

}  // namespace attnd::gpu::test
