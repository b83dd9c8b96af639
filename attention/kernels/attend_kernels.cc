// SPDX-License-Identifier: Apache-2.0
//
// Exact attention over runs of tokens: logits, weights and weighted values of one block of tokens
// after the other.
#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "attention/kernels/kernels.h"
#include "attention/segment/pages.h"

// The targets left out would only lengthen the build.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels/attend_kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h.
#include "attention/kernels/rows-inl.h"
#include "attention/kernels/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd::attention::kernels {
namespace HWY_NAMESPACE {

constexpr size_t kAheadBlocks = 1;  // how far ahead of the arithmetic memory is asked for

// The keys and values of up to kRowBlock tokens.
struct TokenBlock {
  RowBlock keys, values;
  const uint8_t* lanes[kRowBlock];  // [quads] of each token, or null
  bool masked = false;              // whether one of them is not null
};

// Walks along the tokens of runs.
class TokenCursor {
 public:
  TokenCursor(const PageGeometry& geometry, std::span<const TokenRun> runs, size_t quads)
      : geometry_(geometry), quads_(quads), run_(runs.begin()), end_(runs.end()) {
    if (run_ != end_) token_ = run_->range.begin;
  }

  // The next tokens, as many as there are; the pointers beyond repeat the last one.
  void Next(TokenBlock* block) {
    size_t count = 0;
    block->masked = false;
    while (count < kRowBlock && run_ != end_) {
      const uint32_t in_page =
          HWY_MIN(kPageTokens - token_ % kPageTokens, run_->range.end - token_);
      const size_t tokens = HWY_MIN(kRowBlock - count, size_t{in_page});
      const std::byte* key = run_->pages + geometry_.KeyOffset(token_);
      const std::byte* value = run_->pages + geometry_.ValueOffset(token_);
      block->masked |= run_->lanes != nullptr;
      for (size_t i = 0; i < tokens; ++i) {
        block->keys.rows[count + i] = key + i * geometry_.key_row_bytes;
        block->values.rows[count + i] = value + i * geometry_.value_stride_bytes;
        block->lanes[count + i] = run_->lanes == nullptr
                                      ? nullptr
                                      : run_->lanes + (token_ - run_->range.begin + i) * quads_;
      }
      count += tokens;
      token_ += static_cast<uint32_t>(tokens);
      if (token_ != run_->range.end) continue;
      ++run_;
      if (run_ != end_) token_ = run_->range.begin;
    }
    block->keys.count = block->values.count = count;
    for (size_t i = count; count > 0 && i < kRowBlock; ++i) {
      block->keys.rows[i] = block->keys.rows[count - 1];
      block->values.rows[i] = block->values.rows[count - 1];
    }
  }

 private:
  const PageGeometry& geometry_;
  const size_t quads_;
  std::span<const TokenRun>::iterator run_;
  const std::span<const TokenRun>::iterator end_;
  uint32_t token_ = 0;
};

// Raises the state's maxima to `max` and scales what it holds to them.
HWY_INLINE void Rescale(const float* max, size_t value_dim, QuadState* state) {
  const F32 d;
  for (size_t j = 0; j < kQuad; ++j) {
    if (max[j] == state->max[j]) continue;
    const float factor = std::exp(state->max[j] - max[j]);  // 0 for an empty state
    state->max[j] = max[j];
    state->sum[j] *= factor;
    float* values = state->values + j * value_dim;
    for (size_t c = 0; c < value_dim; c += hn::Lanes(d)) {
      hn::StoreU(hn::Mul(hn::LoadU(d, values + c), hn::Set(d, factor)), d, values + c);
    }
  }
}

// The lanes that do not read a token get a logit that counts as nothing.
HWY_INLINE void MaskLanes(const TokenBlock& block, size_t quad, float* logits) {
  for (size_t i = 0; i < block.keys.count; ++i) {
    if (block.lanes[i] == nullptr) continue;
    const uint32_t lanes = block.lanes[i][quad];
    for (size_t j = 0; j < kQuad; ++j) {
      if ((lanes >> j & 1) == 0) logits[i * kQuad + j] = -std::numeric_limits<float>::infinity();
    }
  }
}

template <class Loader>
HWY_INLINE void AttendBlock(const PageGeometry& g, const TokenBlock& block, const TokenBlock* ahead,
                            size_t quad, const Queries& q, QuadState* state) {
  const size_t count = block.keys.count;
  HWY_ALIGN float logits[kRowBlock * kQuad];
  DotBlock<Loader>(block.keys, ahead != nullptr ? ahead->keys.rows : nullptr, g.head_dim, q,
                   logits);
  if (block.masked) MaskLanes(block, quad, logits);
  HWY_ALIGN float max[kQuad];
  std::copy(state->max, state->max + kQuad, max);
  MaxQuadsImpl(logits, count, max);
  Rescale(max, g.value_dim, state);
  // A lane that has read nothing has no scale yet: any finite one gives it weights of 0.
  for (float& m : max) m = std::max(m, std::numeric_limits<float>::lowest());
  ExpQuadsImpl(logits, count, max, logits, state->sum);
  AddWeightedBlock<Loader>(block.values, ahead != nullptr ? ahead->values.rows : nullptr,
                           g.value_dim, logits, state->values);
}

void AttendRuns(const PageGeometry& g, std::span<const TokenRun> runs, const Queries* q,
                size_t quads, QuadState* states) {
  constexpr size_t kBlocks = kAheadBlocks + 1;
  WithLoader(g.dtype, [&](auto loader) {
    using Loader = decltype(loader);
    TokenCursor cursor(g, runs, quads);
    TokenBlock blocks[kBlocks];
    for (size_t b = 0; b < kAheadBlocks; ++b) cursor.Next(&blocks[b]);
    for (size_t b = 0; blocks[b % kBlocks].keys.count > 0; ++b) {
      TokenBlock* ahead = &blocks[(b + kAheadBlocks) % kBlocks];
      cursor.Next(ahead);
      if (ahead->keys.count == 0) ahead = nullptr;
      for (size_t quad = 0; quad < quads; ++quad) {  // all while the block is in cache
        AttendBlock<Loader>(g, blocks[b % kBlocks], quad == 0 ? ahead : nullptr, quad, q[quad],
                            &states[quad]);
      }
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd::attention::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd::attention::kernels {

HWY_EXPORT(AttendRuns);

void AttendRuns(const PageGeometry& geometry, std::span<const TokenRun> runs, const Queries* q,
                size_t quads, QuadState* states) {
  HWY_DYNAMIC_DISPATCH(AttendRuns)(geometry, runs, q, quads, states);
}

}  // namespace attnd::attention::kernels
#endif  // HWY_ONCE
