// SPDX-License-Identifier: Apache-2.0
//
// FeatureSums: sums of the learned features of some tokens of a (layer, KV head) (Top-K with
// Linear-Attention Completion, appendix C, equations 34 to 39). With l_j[f] = ln phi_k(k_j)[f]:
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

// Used by one thread at a time. Sums are in float32 within blocks of 16 tokens, and in double
// precision over these blocks. How the tokens are divided among calls of Add changes no bit of
// them. Nothing overflows, as |v| has a limit when it is appended.
class FeatureSums {
 public:
  // Bytes of memory that the sums take; the memory must be aligned to 64 bytes.
  static size_t Bytes(const ModelShape& shape);

  // Sums of no tokens, in `memory` of Bytes(shape) bytes. shift: [features] the m to use, which is
  // at least that of the tokens; null: the m of the tokens themselves. maps, shift and memory must
  // outlive the sums.
  FeatureSums(const FeatureMaps* maps, const ModelShape& shape, uint32_t layer, uint32_t kv_head,
              const float* shift, std::byte* memory);

  // Adds all tokens of a run, whatever its lanes say. The run's pages must be in memory.
  void Add(const TokenRun& run);
  // To be called once, at the end: only then do the sums below hold all tokens that were added.
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
  size_t pending_ = 0;             // tokens in the block of 16 that is being filled
  std::span<float> keys_;          // [16][head_dim]
  std::span<std::byte> values_;    // [16] rows
  std::span<float> log_features_;  // [4][features][4]
  std::span<float> m_;
  std::span<double> u_, t_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_COMPLETION_FEATURE_SUMS_H_
