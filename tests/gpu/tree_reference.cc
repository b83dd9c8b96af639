// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/tree_reference.h"

#include <glog/logging.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "tests/gpu/row_sums.h"

namespace attnd::gpu::test {
namespace {

using reference::Descending;
using reference::Dot;
using reference::Item;
using reference::kVarianceMax;
using reference::MeanShare;
using reference::Norm;
using reference::ShareIn;
using reference::ShareOf;
using reference::Softmax;
using reference::Tree;
using reference::TreesOfStep;
using reference::Unit;
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
constexpr double kHeadClosedShare = 0.5;
constexpr int kTriesBesideClosed = 2, kTries = 5;
constexpr double kSlack = 0.8;

// What one head makes of some items, and of the softmax of zones and all of their estimates.
struct Scores {
  Vector log_mass, d2;
  double lse = 0, norm = 0;
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

class TreeLanes {
 public:
  TreeLanes(const Unit& unit, TreesOfStep* trees)
      : unit_(unit),
        by_mass_(unit.row.cut == CutKind::kTopK || unit.row.cut == CutKind::kTopP),
        by_head_(unit.row.cut == CutKind::kHeadBudget),
        limited_(std::isfinite(unit.row.tolerance)),
        zones_(unit.ReadTokens()) {
    for (uint32_t s = 0; s < unit.row.segment_count; ++s) trees_.push_back(&trees->Of(unit, s));
  }

  void Run(bool one_more_exact, bool one_more_opened) {
    for (const Tree* tree : trees_) {
      for (const Item& group : tree->groups) items_.push_back(&group);
    }
    opened_.assign(items_.size(), by_mass_);
    if (!by_mass_) OpenGroups();
    if (one_more_opened) TakeOneMore(items_.size(), &opened_);
    TakeItems();
    by_mass_ ? ChooseByMass() : by_head_ ? ChooseByHead() : Choose();
    if (one_more_exact) TakeOneMore(leaves_, &exact_);
    Demote();
    Answer();
  }

  void Report(UnitResult* result, uint8_t* fates) const {
    *result = UnitResult{};
    for (const Tree* tree : trees_) result->clusters += static_cast<uint32_t>(tree->leaves.size());
    uint8_t* leaf = fates;
    for (size_t i = 0; i < items_.size(); ++i) {
      const Item& item = *items_[i];
      const uint32_t tokens = item.end - item.begin;
      const uint8_t fate = FateOf(i);
      if (missed_[i]) result->missed_tokens += tokens;
      if (fate == kFateExact) result->chosen_tokens += tokens;
      if (fate == kFateEstimated) result->estimated_tokens += tokens;
      if (fate == kFateDropped) result->dropped_tokens += tokens;
      if (!item.group) *leaf++ = fate;
    }
    size_t number = 0;
    for (uint32_t s = 0; s < trees_.size(); ++s) {
      const TreeRef& tree = unit_.header.trees[unit_.row.trees_begin + s];
      uint8_t* own = fates + unit_.row.slots + tree.first_group_slot;
      for (size_t g = 0; g < trees_[s]->groups.size(); ++g, ++number) {
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

  void Demote() {
    missed_.assign(items_.size(), false);
    for (size_t i = 0; i < items_.size() && unit_.header.estimates_misses != 0; ++i) {
      missed_[i] = exact_[i] && unit_.Misses(items_[i]->segment, items_[i]->begin, items_[i]->end);
      if (missed_[i]) exact_[i] = false;
    }
  }

  // ---- choices ----

  std::vector<uint32_t> AllHeads() const {
    std::vector<uint32_t> all(heads());
    std::iota(all.begin(), all.end(), 0u);
    return all;
  }

  // All groups are the items; the outputs that errors are relative to stay those found here.
  void OpenGroups() {
    Score();
    const size_t n = items_.size();
    const double share = std::min(1.0, std::max(kOpenedShare, kOpenedPerFloor * unit_.row.floor));
    MarkFloor(n, std::max(ShareOf(share, n), std::min(kOpenedLeast, n)), kGroupOptimism, &opened_);
    if (!limited_) return;
    FindNorms();
    if (!by_head_)
      return MarkErrors(n, kClosedErrorShare * unit_.row.tolerance, AllHeads(), &opened_);
    const double limit = kHeadClosedShare * kClosedErrorShare * unit_.row.head_tolerance;
    for (uint32_t head = 0; head < heads(); ++head) MarkErrors(n, limit, {head}, &opened_);
  }

  void FindNorms() {
    output_norms_.clear();
    for (const Scores& scores : scores_) output_norms_.push_back(scores.norm);
  }

  // The items become the leaves of opened groups, and behind them the groups that stay closed.
  void TakeItems() {
    std::vector<const Item*> closed;
    items_.clear();
    size_t number = 0;
    for (const Tree* tree : trees_) {
      for (size_t g = 0; g < tree->groups.size(); ++g, ++number) {
        if (!opened_[number]) closed.push_back(&tree->groups[g]);
        for (uint32_t i = tree->first_members[g]; opened_[number] && i < tree->first_members[g + 1];
             ++i) {
          items_.push_back(&tree->leaves.at(i));
        }
      }
    }
    leaves_ = items_.size();
    items_.insert(items_.end(), closed.begin(), closed.end());
    exact_.assign(items_.size(), false);
    dropped_.assign(items_.size(), false);
    Score();
  }

  void Choose() {
    MarkLeafFloor();
    if (limited_) MarkErrors(leaves_, unit_.row.tolerance, AllHeads(), &exact_);
  }
  void MarkLeafFloor() {
    size_t all = 0;
    for (const Tree* tree : trees_) all += tree->leaves.size();
    MarkFloor(leaves_, std::min(ShareOf(unit_.row.floor, all), leaves_), kLeafOptimism, &exact_);
  }

  // Beside closed groups, then with all open; then all is read.
  void ChooseByHead() {
    const bool closed = leaves_ < items_.size();
    MarkLeafFloor();
    if (TryUntilWithin(closed ? kTriesBesideClosed : kTries)) return;
    if (closed) {
      opened_.assign(opened_.size(), true);
      TakeItems();
      MarkLeafFloor();
      FindNorms();
      if (TryUntilWithin(kTries)) return;
    }
    exact_.assign(items_.size(), true);
  }

  bool TryUntilWithin(int tries) {
    const double within = unit_.row.head_tolerance;
    Vector limits(heads(), within / kOwnErrorShare), wanted = limits;
    for (; tries > 0; --tries) {
      bool all_within = true;
      for (uint32_t head = 0; head < heads(); ++head) {
        if (std::isfinite(wanted[head])) MarkErrors(leaves_, wanted[head], {head}, &exact_);
      }
      for (uint32_t head = 0; head < heads(); ++head) {
        const double expected = ExpectedError(head);
        const bool is_within = expected <= within;
        if (!is_within) limits[head] *= std::isfinite(expected) ? kSlack * within / expected : 0;
        wanted[head] = is_within ? std::numeric_limits<double>::infinity() : limits[head];
        all_within = all_within && is_within;
      }
      if (all_within) return true;
    }
    return false;
  }

  // Of what is not read, before anything is read.
  double ExpectedError(uint32_t head) const {
    Marks estimated = exact_;
    estimated.flip();
    const Scale scale = ScaleOfScores(head);
    const Estimated left = Estimate(head, estimated, zones_[head]);
    return PredictedError(head, estimated, scale,
                          Norm(left.shift) * std::exp(left.state.max - scale.lse));
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

  // Of the first `count` items those that leave too much of an error, mean over some heads; that of
  // the others counts first.
  void MarkErrors(size_t count, double tolerance, const std::vector<uint32_t>& of_heads,
                  Marks* marks) const {
    Vector error2(items_.size(), 0.0);
    for (const uint32_t head : of_heads) {
      const Scale scale = ScaleOfScores(head);
      for (size_t i = 0; i < items_.size(); ++i) {
        error2[i] += SquaredError(head, i, scale) / static_cast<double>(of_heads.size());
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
    if (unit_.row.second_order == 0) return Vector(trees_[segment]->axes.size(), 0.0);
    for (const Vector& axis : trees_[segment]->axes) {
      rotated.push_back(unit_.header.softmax_scale * Dot(axis, unit_.queries[head]));
    }
    return rotated;
  }

  void Score() {
    scores_.clear();
    for (uint32_t head = 0; head < heads(); ++head) {
      Scores& scores = scores_.emplace_back();
      std::vector<Vector> squares;  // of the rotated query's numbers
      for (uint32_t s = 0; s < trees_.size(); ++s) {
        const Vector rotated = Rotated(head, s);
        Vector& own = squares.emplace_back(rotated.size(), 0.0);
        reference::AddSquares(1, rotated.data(), rotated.size(), own.data());
      }
      for (const Item* item : items_) {
        const double d2 = Dot(squares[item->segment], item->variance);
        scores.d2.push_back(d2);
        scores.log_mass.push_back(unit_.header.softmax_scale *
                                      Dot(unit_.queries[head], item->centroid) +
                                  item->log_size + Capped(d2) / 2);
      }
      const Softmax all = Estimate(head, Marks(items_.size(), true), zones_[head]).state;
      scores.lse = all.lse();
      scores.norm = Norm(all.Out());
    }
  }

  // In the softmax of zones and all items' estimates, relative to the outputs found first.
  Scale ScaleOfScores(uint32_t head) const {
    const double lse = scores_[head].lse;
    return {lse, output_norms_[head], LeastNorm(head, lse)};
  }

  // The marked items' estimates, added to a state.
  Estimated Estimate(uint32_t head, const Marks& marks, Softmax state) const {
    const Scores& scores = scores_[head];
    for (size_t i = 0; i < items_.size(); ++i) {
      if (marks[i]) state.Add(scores.log_mass[i], items_[i]->mean_value);
    }
    Vector shift(state.values.size(), 0.0);
    for (uint32_t s = 0; s < trees_.size(); ++s) {
      Vector moved(trees_[s]->axes.size(), 0.0);
      for (size_t i = 0; i < items_.size(); ++i) {
        if (!marks[i] || items_[i]->segment != s) continue;
        const double damped = std::min(1.0, kVarianceMax / scores.d2[i]);
        const double weight = std::exp(scores.log_mass[i] - state.max) * damped;
        CHECK_EQ(items_[i]->variance.size(), moved.size());
        reference::AddProducts(weight, items_[i]->variance.data(), moved.size(), moved.data());
      }
      const Vector rotated = Rotated(head, s);
      for (size_t a = 0; a < moved.size(); ++a) {
        const Vector& slope = trees_[s]->slopes[a];
        CHECK_EQ(slope.size(), shift.size());
        reference::AddProducts(rotated[a] * moved[a], slope.data(), slope.size(), shift.data());
      }
    }
    for (size_t c = 0; c < shift.size(); ++c) state.values[c] += shift[c];
    return {std::move(state), std::move(shift)};
  }

  // 1e-3 of the values' root mean square in the softmax of zones and all items' estimates.
  double LeastNorm(uint32_t head, double lse) const {
    const Softmax& zone = zones_[head];
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

  void Answer() {
    std::vector<Softmax> read = zones_;
    for (size_t i = 0; i < items_.size(); ++i) {
      if (exact_[i]) unit_.AddTokens(items_[i]->segment, items_[i]->begin, items_[i]->end, &read);
    }
    for (uint32_t head = 0; head < heads(); ++head) AnswerHead(head, read[head]);
  }

  void AnswerHead(uint32_t head, const Softmax& read) {
    Marks estimated(items_.size(), false);
    Softmax dropped(unit_.shape.value_dim);
    for (size_t i = 0; i < items_.size(); ++i) {
      estimated[i] = FateOf(i) == kFateEstimated;
      if (FateOf(i) == kFateDropped) dropped.Add(scores_[head].log_mass[i], items_[i]->mean_value);
    }
    const auto [state, shift] = Estimate(head, estimated, read);
    unit_.Write(head, state);
    LaneResult& result = unit_.header.lane_results[unit_.Slot(head)];
    const double covered = 1 / (1 + ShareIn(dropped, state.lse()));
    result = {static_cast<float>(covered), static_cast<float>(ShareIn(read, state.lse()) * covered),
              0, 0};
    for (size_t i = 0; i < items_.size(); ++i) {
      const double share = std::exp(scores_[head].log_mass[i] - state.lse()) * covered;
      if (missed_[i]) result.missed_mass += static_cast<float>(share);
    }
    if (std::count(estimated.begin(), estimated.end(), true) == 0) return;
    const Scale scale = {state.lse(), Norm(state.Out()), LeastNorm(head, scores_[head].lse)};
    result.predicted_error =
        static_cast<float>(PredictedError(head, estimated, scale, Norm(shift) / state.sum));
  }

  // moved: the length of what the slopes add to the output.
  double PredictedError(uint32_t head, const Marks& estimated, const Scale& scale,
                        double moved) const {
    double error2 = 0, mass = 0, variances = 0;
    for (size_t i = 0; i < items_.size(); ++i) {
      if (!estimated[i]) continue;
      error2 += SquaredError(head, i, scale);
      const double share = std::exp(scores_[head].log_mass[i] - scale.lse);
      mass += share;
      variances += share * Capped(scores_[head].d2[i]);
    }
    if (mass == 0) return 0;
    const double common = kCommonErrorShare * std::sqrt(variances / mass) * moved /
                          std::max(scale.output_norm, scale.least_norm);
    return std::hypot(kOwnErrorShare * std::sqrt(error2), common);
  }

  const Unit& unit_;
  const bool by_mass_, by_head_, limited_;
  const std::vector<Softmax> zones_;  // [group]
  std::vector<const Tree*> trees_;    // [segments]
  std::vector<const Item*> items_;  // that are chosen among, and behind leaves_ those that are not
  size_t leaves_ = 0;               // of items_
  std::vector<Scores> scores_;      // [group], of items_
  Vector output_norms_;             // [group], of a tolerance
  Marks opened_;                    // [groups]
  Marks exact_, dropped_;           // [items]
  Marks missed_;                    // [items] chosen, but their pages did not come
};

}  // namespace

void RunTreeReference(const Unit& unit, bool one_more_exact, bool one_more_opened,
                      TreesOfStep* trees, UnitResult* result, uint8_t* fates) {
  TreeLanes lanes(unit, trees);
  lanes.Run(one_more_exact, one_more_opened);
  lanes.Report(result, fates);
}

}  // namespace attnd::gpu::test
