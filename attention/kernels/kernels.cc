// SPDX-License-Identifier: Apache-2.0
#include "attention/kernels/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

// The targets left out would only lengthen the build.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels/kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h.
#include "attention/kernels/kernels-inl.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd::attention::kernels {
namespace HWY_NAMESPACE {

constexpr size_t kAheadBlocks = 1;  // how far ahead of the arithmetic memory is asked for
constexpr float kMinExp = -100.0f;  // exp below is 0 in float, and -infinity must not reach Exp

// Loaders of stored elements as floats. Load gives N neighbours. LoadTwo gives 2 N neighbours as
// two vectors in the order that costs least: for bf16 the even ones, then the odd ones (a shift and
// a mask, where widening in order would take two shuffles). A dot product does not mind, if the
// queries stand in the same order (ArrangeQueries).
struct LoadBf16 {
  static constexpr size_t kBytes = 2;
  static constexpr bool kEvenOdd = true;
  static HWY_INLINE VF Load(F32 d, const std::byte* p) {
    const hn::Rebind<hwy::bfloat16_t, F32> half;
    return hn::PromoteTo(d, hn::LoadU(half, reinterpret_cast<const hwy::bfloat16_t*>(p)));
  }
  static HWY_INLINE void LoadTwo(F32 d, const std::byte* p, VF* first, VF* second) {
    const hn::RebindToUnsigned<F32> du;
    const auto pairs = hn::LoadU(du, reinterpret_cast<const uint32_t*>(p));
    *first = hn::BitCast(d, hn::ShiftLeft<16>(pairs));
    *second = hn::BitCast(d, hn::And(pairs, hn::Set(du, 0xFFFF0000u)));
  }
};
struct LoadFp16 {
  static constexpr size_t kBytes = 2;
  static constexpr bool kEvenOdd = false;
  static HWY_INLINE VF Load(F32 d, const std::byte* p) {
    const hn::Rebind<hwy::float16_t, F32> half;
    return hn::PromoteTo(d, hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(p)));
  }
  static HWY_INLINE void LoadTwo(F32 d, const std::byte* p, VF* first, VF* second) {
    *first = Load(d, p);
    *second = Load(d, p + hn::Lanes(d) * kBytes);
  }
};
struct LoadFp32 {
  static constexpr size_t kBytes = 4;
  static constexpr bool kEvenOdd = false;
  static HWY_INLINE VF Load(F32 d, const std::byte* p) {
    return hn::LoadU(d, reinterpret_cast<const float*>(p));
  }
  static HWY_INLINE void LoadTwo(F32 d, const std::byte* p, VF* first, VF* second) {
    *first = Load(d, p);
    *second = Load(d, p + hn::Lanes(d) * kBytes);
  }
};

// Calls f with the loader of dtype.
template <typename F>
HWY_INLINE void WithLoader(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBf16:
      return f(LoadBf16());
    case DType::kFp16:
      return f(LoadFp16());
    case DType::kFp32:
      return f(LoadFp32());
  }
}

template <class D>
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> MaxBlocks([[maybe_unused]] D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return MaxBlocks(half, hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// ---- dot products ----

// Asks for rows that will be wanted soon, a few lines at a time between the arithmetic, as a burst
// would fill the queues of the cache; the hardware by itself stops following a stream at each 4 KiB
// page.
HWY_INLINE void PrefetchRow(const std::byte* row, size_t bytes) {
  constexpr size_t kCacheLineBytes = 64;
  constexpr int kRead = 0, kIntoSecondLevel = 2;
  for (size_t offset = 0; offset < bytes; offset += kCacheLineBytes) {
    __builtin_prefetch(row + offset, kRead, kIntoSecondLevel);
  }
}

// Rows that share the loads of q: as many sums as the registers hold.
constexpr size_t kDotRows = HWY_TARGET <= HWY_AVX3 ? 4 : 2;

// A quad of queries in the loader's order; a last single vector stays as it is.
template <class Loader>
HWY_INLINE void ArrangeQueries(const float* HWY_RESTRICT q, size_t dim, float* HWY_RESTRICT out) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  for (size_t j = 0; j < kQuad; ++j, q += dim, out += dim) {
    size_t c = 0;
    for (; c + 2 * lanes <= dim; c += 2 * lanes) {
      VF first = hn::LoadU(d, q + c);
      VF second = hn::LoadU(d, q + c + lanes);
      if constexpr (Loader::kEvenOdd) {
        const VF even = hn::ConcatEven(d, second, first);
        second = hn::ConcatOdd(d, second, first);
        first = even;
      }
      hn::StoreU(first, d, out + c);
      hn::StoreU(second, d, out + c + lanes);
    }
    if (c < dim) hn::StoreU(hn::LoadU(d, q + c), d, out + c);
  }
}

// sums[r][j] += x[r] * q[j] over one vector.
template <size_t kRows>
HWY_INLINE void AddProducts(F32 d, const VF* x, const float* HWY_RESTRICT q, size_t dim,
                            VF (*sums)[kQuad]) {
  for (size_t j = 0; j < kQuad; ++j) {
    const VF qj = hn::LoadU(d, q + j * dim);
    for (size_t r = 0; r < kRows; ++r) sums[r][j] = hn::MulAdd(x[r], qj, sums[r][j]);
  }
}

// The dot products of kRows rows with an arranged quad.
template <class Loader, size_t kRows>
HWY_INLINE void DotSomeRows(const std::byte* const* rows, size_t dim, const float* HWY_RESTRICT q,
                            float* HWY_RESTRICT out) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  VF sums[kRows][kQuad];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t j = 0; j < kQuad; ++j) sums[r][j] = hn::Zero(d);
  }
  VF first[kRows], second[kRows];
  size_t c = 0;
  for (; c + 2 * lanes <= dim; c += 2 * lanes) {
    for (size_t r = 0; r < kRows; ++r) {
      Loader::LoadTwo(d, rows[r] + c * Loader::kBytes, &first[r], &second[r]);
    }
    AddProducts<kRows>(d, first, q + c, dim, sums);
    AddProducts<kRows>(d, second, q + c + lanes, dim, sums);
  }
  if (c < dim) {
    for (size_t r = 0; r < kRows; ++r) {
      first[r] = Loader::Load(d, rows[r] + c * Loader::kBytes);
    }
    AddProducts<kRows>(d, first, q + c, dim, sums);
  }
  const hn::CappedTag<float, 4> d4;
  for (size_t r = 0; r < kRows; ++r) {
    hn::StoreU(SumFour(d, sums[r][0], sums[r][1], sums[r][2], sums[r][3]), d4, out + r * kQuad);
  }
}

// Up to kRowBlock rows, wherever they are, and those to ask memory for meanwhile.
struct RowBlock {
  const std::byte* rows[kRowBlock];
  size_t count = 0;

  // Rows [first, first + count) of those that lie side by side.
  static HWY_INLINE RowBlock Of(const std::byte* all, size_t row_bytes, size_t first, size_t n) {
    RowBlock block;
    block.count = HWY_MIN(kRowBlock, n - first);
    for (size_t i = 0; i < block.count; ++i) block.rows[i] = all + (first + i) * row_bytes;
    return block;
  }
  // The same rows, kAheadBytes further.
  HWY_INLINE RowBlock Ahead() const {
    RowBlock block = *this;
    for (size_t i = 0; i < count; ++i) block.rows[i] += kAheadBytes;
    return block;
  }
};

// out[i][j] = q[j] . row[i] of a block. ahead: rows that will be wanted soon, as many, or null.
template <class Loader>
HWY_INLINE void DotBlock(const RowBlock& block, const std::byte* const* ahead, size_t dim,
                         const Queries& q, float* out) {
  if (Loader::kEvenOdd && q.bf16 != nullptr) {
    return DotBf16Rows(block.rows, ahead, block.count, dim, q.bf16, q.scale, out);
  }
  size_t i = 0;
  for (; i + kDotRows <= block.count; i += kDotRows) {
    for (size_t r = 0; ahead != nullptr && r < kDotRows; ++r) {
      PrefetchRow(ahead[i + r], dim * Loader::kBytes);
    }
    DotSomeRows<Loader, kDotRows>(block.rows + i, dim, q.arranged, out + i * kQuad);
  }
  for (; i < block.count; ++i) {
    DotSomeRows<Loader, 1>(block.rows + i, dim, q.arranged, out + i * kQuad);
  }
}

Queries PrepareQueries(DType dtype, const float* q, float scale, size_t dim, float* memory) {
  HWY_ALIGN float scaled[kQuad * kDimMax];
  for (size_t c = 0; c < kQuad * dim; ++c) scaled[c] = q[c] * scale;
  WithLoader(dtype, [&](auto loader) { ArrangeQueries<decltype(loader)>(scaled, dim, memory); });
  Queries queries{memory, nullptr, scale};
  if (HWY_TARGET > HWY_AVX3 || dtype != DType::kBf16 || !HaveBf16Dot()) return queries;
  // The engine bounds scaled logits; with a scale like this, those before it are as far from
  // float32's limits.
  if (!(scale > 0x1p-32f && scale < 0x1p32f)) return queries;
  auto* bf16 = reinterpret_cast<uint16_t*>(memory + kQuad * dim);
  uint32_t lost = 0;
  for (size_t c = 0; c < kQuad * dim; ++c) {
    uint32_t bits;
    std::memcpy(&bits, q + c, sizeof(bits));
    lost |= bits & 0xFFFF;
    bf16[c] = static_cast<uint16_t>(bits >> 16);
  }
  if (lost == 0) queries.bf16 = bf16;
  return queries;
}

void DotRows(DType dtype, const std::byte* rows, size_t row_bytes, size_t n, size_t dim,
             const Queries& q, float* out) {
  WithLoader(dtype, [&](auto loader) {
    for (size_t i = 0; i < n; i += kRowBlock) {
      const RowBlock block = RowBlock::Of(rows, row_bytes, i, n);
      DotBlock<decltype(loader)>(block, block.Ahead().rows, dim, q, out + i * kQuad);
    }
  });
}

// ---- weighted sums ----

// kColumns vectors of each of the four sums stay in registers while all rows pass. sum is that of
// column `column` onward.
template <class Loader, size_t kColumns>
HWY_INLINE void AddColumns(const RowBlock& block, const std::byte* const* ahead, size_t column,
                           size_t dim, const float* HWY_RESTRICT weight, float* HWY_RESTRICT sum) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  VF s[kQuad][4];
  for (size_t j = 0; j < kQuad; ++j) {
    for (size_t k = 0; k < kColumns; ++k) s[j][k] = hn::LoadU(d, sum + j * dim + k * lanes);
  }
  for (size_t i = 0; i < block.count; ++i) {
    const std::byte* row = block.rows[i] + column * Loader::kBytes;
    if (ahead != nullptr) {
      PrefetchRow(ahead[i] + column * Loader::kBytes, kColumns * lanes * Loader::kBytes);
    }
    const VF w0 = hn::Set(d, weight[i * kQuad]), w1 = hn::Set(d, weight[i * kQuad + 1]);
    const VF w2 = hn::Set(d, weight[i * kQuad + 2]), w3 = hn::Set(d, weight[i * kQuad + 3]);
    for (size_t k = 0; k < kColumns; ++k) {
      const VF v = Loader::Load(d, row + k * lanes * Loader::kBytes);
      s[0][k] = hn::MulAdd(w0, v, s[0][k]);
      s[1][k] = hn::MulAdd(w1, v, s[1][k]);
      s[2][k] = hn::MulAdd(w2, v, s[2][k]);
      s[3][k] = hn::MulAdd(w3, v, s[3][k]);
    }
  }
  for (size_t j = 0; j < kQuad; ++j) {
    for (size_t k = 0; k < kColumns; ++k) hn::StoreU(s[j][k], d, sum + j * dim + k * lanes);
  }
}

// sum[j] += sum_i weight[i][j] * row[i] of a block.
template <class Loader>
HWY_INLINE void AddWeightedBlock(const RowBlock& block, const std::byte* const* ahead, size_t dim,
                                 const float* weight, float* sum) {
  const size_t lanes = hn::Lanes(F32());
  // 16 sums need the 32 registers of AVX-512; elsewhere 8.
  constexpr size_t kWide = HWY_TARGET <= HWY_AVX3 ? 4 : 2;
  size_t c = 0;
  for (; c + kWide * lanes <= dim; c += kWide * lanes) {
    AddColumns<Loader, kWide>(block, ahead, c, dim, weight, sum + c);
  }
  for (; c < dim; c += lanes) AddColumns<Loader, 1>(block, ahead, c, dim, weight, sum + c);
}

void AddWeightedRows(DType dtype, const std::byte* rows, size_t row_bytes, size_t n, size_t dim,
                     const float* weight, float* sum) {
  WithLoader(dtype, [&](auto loader) {
    for (size_t i = 0; i < n; i += kRowBlock) {
      const RowBlock block = RowBlock::Of(rows, row_bytes, i, n);
      AddWeightedBlock<decltype(loader)>(block, block.Ahead().rows, dim, weight + i * kQuad, sum);
    }
  });
}

// ---- softmax ----

HWY_INLINE void MaxQuadsImpl(const float* x, size_t n, float* max) {
  const F32 d;
  const hn::CappedTag<float, 4> d4;
  const size_t lanes = hn::Lanes(d);
  const size_t total = n * kQuad;
  size_t i = 0;
  auto m4 = hn::LoadU(d4, max);
  if (total >= lanes) {
    VF m = hn::LoadU(d, x);
    for (i = lanes; i + lanes <= total; i += lanes) m = hn::Max(m, hn::LoadU(d, x + i));
    m4 = hn::Max(m4, MaxBlocks(d, m));
  }
  for (; i < total; i += kQuad) m4 = hn::Max(m4, hn::LoadU(d4, x + i));
  hn::StoreU(m4, d4, max);
}

void MaxQuads(const float* x, size_t n, float* max) { MaxQuadsImpl(x, n, max); }

template <class D>
HWY_INLINE hn::Vec<D> ExpClamped(D d, hn::Vec<D> x) {
  const auto floor = hn::Set(d, kMinExp);
  return hn::IfThenElseZero(hn::Gt(x, floor), hn::Exp(d, hn::Max(x, floor)));
}

HWY_INLINE void ExpQuadsImpl(const float* x, size_t n, const float* max, float* out, float* sum) {
  const F32 d;
  const hn::CappedTag<float, 4> d4;
  const size_t lanes = hn::Lanes(d);
  const size_t total = n * kQuad;
  const VF m = hn::LoadDup128(d, max);
  VF s = hn::Zero(d);
  size_t i = 0;
  for (; i + lanes <= total; i += lanes) {
    const VF e = ExpClamped(d, hn::Sub(hn::LoadU(d, x + i), m));
    hn::StoreU(e, d, out + i);
    s = hn::Add(s, e);
  }
  auto s4 = hn::Add(hn::LoadU(d4, sum), SumBlocks(d, s));
  const auto m4 = hn::LoadU(d4, max);
  for (; i < total; i += kQuad) {
    const auto e = ExpClamped(d4, hn::Sub(hn::LoadU(d4, x + i), m4));
    hn::StoreU(e, d4, out + i);
    s4 = hn::Add(s4, e);
  }
  hn::StoreU(s4, d4, sum);
}

void ExpQuads(const float* x, size_t n, const float* max, float* out, float* sum) {
  ExpQuadsImpl(x, n, max, out, sum);
}

// ---- exact attention ----

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

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace attnd::attention::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd::attention::kernels {

HWY_EXPORT(TargetName);
HWY_EXPORT(PrepareQueries);
HWY_EXPORT(DotRows);
HWY_EXPORT(AddWeightedRows);
HWY_EXPORT(MaxQuads);
HWY_EXPORT(ExpQuads);
HWY_EXPORT(AttendRuns);

const char* TargetName() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

Queries PrepareQueries(DType dtype, const float* q, float scale, size_t dim, float* memory) {
  return HWY_DYNAMIC_DISPATCH(PrepareQueries)(dtype, q, scale, dim, memory);
}

void DotRows(DType dtype, const std::byte* rows, size_t row_bytes, size_t n, size_t dim,
             const Queries& q, float* out) {
  HWY_DYNAMIC_DISPATCH(DotRows)(dtype, rows, row_bytes, n, dim, q, out);
}

void AddWeightedRows(DType dtype, const std::byte* rows, size_t row_bytes, size_t n, size_t dim,
                     const float* weight, float* sum) {
  HWY_DYNAMIC_DISPATCH(AddWeightedRows)(dtype, rows, row_bytes, n, dim, weight, sum);
}

void MaxQuads(const float* x, size_t n, float* max) { HWY_DYNAMIC_DISPATCH(MaxQuads)(x, n, max); }

void ExpQuads(const float* x, size_t n, const float* max, float* out, float* sum) {
  HWY_DYNAMIC_DISPATCH(ExpQuads)(x, n, max, out, sum);
}

void AttendRuns(const PageGeometry& geometry, std::span<const TokenRun> runs, const Queries* q,
                size_t quads, QuadState* states) {
  HWY_DYNAMIC_DISPATCH(AttendRuns)(geometry, runs, q, quads, states);
}

}  // namespace attnd::attention::kernels
#endif  // HWY_ONCE
