// SPDX-License-Identifier: Apache-2.0
//
// DenseRow: dense attention of one query token over a view's tokens, in pieces and without keeping
// the view.
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

// It holds no segment and no tail block but while it reads a piece of it: what their sequence gives
// up is freed at once, and the rest can then no longer be computed.
//
// Sums are in single precision within the tail and within a segment, in double across them: the
// result differs from one in double by some 1e-6 of the values' size, whatever the length.
//
// Used by one thread at a time. Life: construct, Start, Advance until it is done, results.
class DenseRow {
 public:
  // Memory that it takes, from construction on and after Start.
  static uint64_t Bytes(const attention::SequenceView& view);

  // Over the first `tokens` positions of a layer, at least 1, all of them in the view, whose
  // segments are whole. Throws std::bad_alloc.
  DenseRow(const attention::SequenceView& view, uint32_t layer, uint64_t tokens);

  // q: [query_heads, head_dim]. Throws std::bad_alloc.
  void Start(std::span<const float> q);

  enum class Progress { kMore, kDone, kGone };
  // Reads about kPieceTokens tokens for four query heads, which takes some tens of microseconds.
  // kGone: what is to be read next is no longer there.
  Progress Advance();
  static constexpr uint32_t kPieceTokens = 1024;

  // When it is done.
  std::span<const double> out() const { return out_; }  // [query_heads, value_dim]
  std::span<const double> lse() const { return lse_; }  // [query_heads]

 private:
  // Tokens [begin, end) of a segment's order or of a tail block; one of the two is set.
  struct Source {
    std::weak_ptr<const attention::Segment> segment;
    std::weak_ptr<const attention::TailBlock> block;
    uint32_t begin = 0;
    uint32_t end = 0;
    bool last = false;  // of the tail or of its segment
  };

  size_t QuadsPerHead() const { return (shape_.group() + attention::kQuad - 1) / attention::kQuad; }
  // Attends tokens [token_, end) of a source for the KV head at hand.
  void Attend(const std::byte* pages, uint32_t end);
  // Goes on with the next head or source; folds at the end of a part.
  void Next();
  // Adds the states to the results, which are then unnormalised, and clears them.
  void Fold();
  void Normalise();

  const ModelShape shape_;
  const uint32_t layer_;
  std::vector<Source> sources_;  // the tail first: it is what changes soonest

  // Set by Start. Quads of a KV head after one another, KV heads after one another.
  AlignedBuffer memory_;                              // what the two lists below point into
  std::vector<attention::kernels::Queries> queries_;  // [kv_heads][quads]
  std::vector<attention::QuadState> states_;          // [kv_heads][quads]
  std::vector<double> max_, out_, lse_;               // lse_: the sum, until it is done

  // Where Advance goes on.
  size_t source_ = 0;
  uint32_t head_ = 0;
  uint32_t token_ = 0;
};

// An answer beside the dense one.
struct Comparison {
  double error_mean = 0;  // as AuditedRow's
  double error_max = 0;
  double covered_mass = 0;
};
// out: [query_heads, value_dim]; lse: [query_heads]; `dense` is done.
Comparison CompareWithDense(std::span<const float> out, std::span<const float> lse,
                            const DenseRow& dense);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_AUDIT_DENSE_ROW_H_
