// SPDX-License-Identifier: Apache-2.0
//
// ClusterScores: what the indexes say of a unit's items (ClusterItems) for one query token: how
// much mass each has, how far its members' logits spread, and how much mass it might have at best.
#ifndef ATTND_ATTENTION_CPU_CLUSTER_SCORES_H_
#define ATTND_ATTENTION_CPU_CLUSTER_SCORES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "attention/cpu/cluster_items.h"
#include "attention/cpu/middle_unit.h"
#include "attention/cpu/regression_terms.h"
#include "attention/kernels/kernels.h"

namespace attnd::attention {

// Life: construct; Score every segment, from any threads; Weigh; after Open or OpenAll, which
// change the items, Weigh again.
class ClusterScores {
 public:
  using Span = ClusterItems::Span;

  // Of four query heads; arrays are [items][4].
  struct Quad {
    kernels::Queries queries;         // for centroids
    kernels::SquaredQueries squares;  // not for the first order, not with a regression
    float* log_mass = nullptr;        // and, after Weigh, the weights: exp(log_mass - max)
    float* d2 = nullptr;              // variance of the members' logits; null for the first order
    float* optimistic = nullptr;      // ClusterScoreArgs::optimistic; null for the first order
    float* hidden = nullptr;          // kernels::HiddenMass, after Weigh; null unless has_hidden()
    float* base_dot = nullptr;        // [segments][4] (DotBase)
    float* kept_log_mass = nullptr;   // [rows above clusters][4] of those that were items
    float* kept_d2 = nullptr;
    float max[kQuad] = {};  // scale of the weights
    float sum[kQuad] = {};  // of all weights
  };

  static size_t ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head,
                           size_t quads);
  // levels: of ClusterItems.
  ClusterScores(const UnitQuery& query, bool levels, StepArena* arena);

  const ClusterItems& items() const { return items_; }
  size_t segments() const { return items_.segments(); }
  std::span<Quad> quads() { return quads_; }
  // [items] tokens of each; empty without a regression.
  std::span<const float> sizes() const { return sizes_; }
  // Whether variances count.
  bool second_order() const { return second_order_; }
  // Of the second order, if segments have one; else null.
  RegressionTerms* regression() { return regression_.has_value() ? &*regression_ : nullptr; }
  bool has_regression() const { return regression_.has_value(); }
  // Whether what items may hide is found: with a regression, of latent shapes. The predictions of
  // others are right without it, and a GPU's do not have it (docs/research/ERROR_TARGET.md).
  bool has_hidden() const { return has_regression() && shape_.latent; }

  // About how many rows of the index Score reads.
  uint64_t ScoreRows(size_t segment) const;
  void Score(size_t segment);
  // Turns log masses into weights relative to each head's greatest.
  void Weigh();
  // ClusterItems::Open, and scores what the items are then.
  void Open(std::span<const Fate> fate);
  // Makes all clusters the items, and scores them.
  void OpenAll();

 private:
  void ScoreSpan(const Span& span);
  void ScoreItems(TreeLevel exposed);
  void FindHidden();
  size_t KeptRow(const Span& span) const;
  void KeepScores(const Span& span);
  void RestoreScores(const Span& span);
  void UseItems();

  const UnitQuery query_;
  const ModelShape& shape_;
  const bool second_order_;
  ClusterItems items_;
  std::span<Quad> quads_;
  std::span<float> size_memory_;    // for as many items as there are clusters
  std::span<float> sizes_;          // of the items in use
  std::span<uint32_t> first_kept_;  // [segments] of each one's first group, then first section
  std::optional<RegressionTerms> regression_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_CLUSTER_SCORES_H_
