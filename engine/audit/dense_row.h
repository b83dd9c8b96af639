// SPDX-License-Identifier: Apache-2.0
//
// DenseRow: dense attention of one query token over a view's tokens, computed in pieces and without
// keeping the view.
#ifndef ATTND_ENGINE_AUDIT_DENSE_ROW_H_
#define ATTND_ENGINE_AUDIT_DENSE_ROW_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/backend.h"
#include "attention/kernels/kernels.h"
#include "common/aligned_buffer.h"
#include "common/model_shape.h"

namespace attnd::engine {

// A DenseRow holds a segment or tail block only while it reads a piece of it. So what the sequence
// gives up is freed at once, and the rest of the row can then no longer be computed.
//
// Sums are in single precision within the tail and within a segment, and in double precision across
// them: the result differs from one in double precision by some 1e-6 of the values' size, whatever
// the length.
//
// Used by one thread at a time. Life: construct, Start, Advance until kDone, results.
class DenseRow {
 public:
  // Bytes of memory that a row over the view takes, those of Start included.
  static uint64_t Bytes(const attention::SequenceView& view);

  // A row over the first `tokens` positions of a layer, at least 1. The view must hold all of them,
  // and its segments must be whole. Throws std::bad_alloc.
  DenseRow(const attention::SequenceView& view, uint32_t layer, uint64_t tokens);

  // q: [query_heads, head_dim]. Throws std::bad_alloc.
  void Start(std::span<const float> q);

  enum class Progress { kMore, kDone, kGone };
  // Reads about kPieceTokens tokens for four query heads, which takes some tens of microseconds.
  // kGone: the tokens to be read next are no longer in memory.
  Progress Advance();
  static constexpr uint32_t kPieceTokens = 1024;

  // After kDone.
  std::span<const double> out() const { return out_; }  // [query_heads, value_dim]
  std::span<const double> lse() const { return lse_; }  // [query_heads]

 private:
  // Tokens [begin, end) of a segment's order or of a tail block; one of the two is set.
  struct Source {
    std::weak_ptr<const attention::Segment> segment;
    std::weak_ptr<const attention::TailBlock> block;
    uint32_t begin = 0;
    uint32_t end = 0;
    bool last = false;  // the last source of the tail or of its segment
  };

  size_t QuadsPerHead() const { return (shape_.group() + attention::kQuad - 1) / attention::kQuad; }
  // Attends tokens [token_, end) of the source at hand for the KV head at hand.
  void Attend(const std::byte* pages, uint32_t end);
  // Goes on with the next head or source; folds after the last source of the tail or of a segment.
  void Next();
  // Adds the states to the unnormalised results, and clears the states.
  void Fold();
  void Normalise();

  const ModelShape shape_;
  const uint32_t layer_;
  std::vector<Source> sources_;  // the tail first, as it changes soonest

  // Set by Start.
  AlignedBuffer memory_;                              // into which the two lists below point
  std::vector<attention::kernels::Queries> queries_;  // [kv_heads][quads]
  std::vector<attention::QuadState> states_;          // [kv_heads][quads]
  std::vector<double> max_, out_, lse_;               // before kDone, lse_ is the sum

  // Where Advance goes on.
  size_t source_ = 0;
  uint32_t head_ = 0;
  uint32_t token_ = 0;
};

// How an answer compares with the dense one.
struct Comparison {
  double error_mean = 0;  // these three as in AuditedRow
  double error_max = 0;
  double covered_mass = 0;
};
// out: [query_heads, value_dim]; lse: [query_heads]; `dense` must have reached kDone.
Comparison CompareWithDense(std::span<const float> out, std::span<const float> lse,
                            const DenseRow& dense);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_AUDIT_DENSE_ROW_H_
