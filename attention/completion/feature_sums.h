// SPDX-License-Identifier: Apache-2.0
//
// FeatureSums: what tokens add to the summary of a (layer, KV head) (Top-K with Linear-Attention
// Completion, appendix C, equations 34 to 39): with l_j[f] = ln phi_k(k_j)[f],
//   m[f] = max_j l_j[f],  u[f] = sum_j exp(l_j[f] - m[f]),  T[f] = sum_j exp(l_j[f] - m[f]) v_j
#ifndef ATTND_ATTENTION_COMPLETION_FEATURE_SUMS_H_
#define ATTND_ATTENTION_COMPLETION_FEATURE_SUMS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/completion/feature_maps.h"
#include "attention/segment/pages.h"
#include "common/model_shape.h"

namespace attnd::attention {

// Used by one thread at a time. Sums are in double precision over blocks of 16 tokens in float32;
// where calls end does not show in them. |v| is at most what a sequence may have: nothing
// overflows.
class FeatureSums {
 public:
  // Memory that the sums take, aligned to 64 bytes.
  static size_t Bytes(const ModelShape& shape);

  // Sums of no tokens, in `memory`, which holds Bytes. shift: [features] the m to use, as for
  // tokens of a summary that is there; null: that of the tokens themselves. Everything outlives
  // this.
  FeatureSums(const FeatureMaps* maps, const ModelShape& shape, uint32_t layer, uint32_t kv_head,
              const float* shift, std::byte* memory);

  // The tokens of a run whose pages are there, all of them, whatever its lanes say.
  void Add(const TokenRun& run);
  // Everything that was added is in what follows; call it once, at the end.
  void Finish();

  uint64_t tokens() const { return tokens_; }
  std::span<const float> m() const { return m_; }   // [features]; -infinity without tokens
  std::span<const double> u() const { return u_; }  // [features]
  std::span<const double> t() const { return t_; }  // [features][value_dim]

 private:
  static constexpr size_t kBlock = 16;

  void Flush();
  void RaiseShift(const float* log_features, size_t feature);

  const FeatureMaps* const maps_;
  const PageGeometry geometry_;
  const size_t value_bytes_;  // of one gathered value
  const uint32_t layer_, kv_head_;
  const bool own_shift_;
  uint64_t tokens_ = 0;
  size_t pending_ = 0;             // tokens of the block that is being filled
  std::span<float> keys_;          // [16][head_dim]
  std::span<std::byte> values_;    // [16] rows
  std::span<float> log_features_;  // [4][features][4]
  std::span<float> m_;
  std::span<double> u_, t_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_COMPLETION_FEATURE_SUMS_H_
