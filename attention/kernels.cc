// SPDX-License-Identifier: Apache-2.0
#include "attention/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

// Each target of this list is compiled from the code below; the rest of x86's would only lengthen
// the build.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// Must follow highway.h.
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd::attention::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, so that every dimension (a multiple of 16) is a whole number of vectors.
using F32 = hn::CappedTag<float, 16>;
using VF = hn::Vec<F32>;

constexpr size_t kRowBlock = 16;      // rows that pass one stage before the next stage
constexpr size_t kAheadBlocks = 1;    // how far ahead of the arithmetic memory is asked for
constexpr size_t kAheadBytes = 8192;  // the same along rows that lie side by side
constexpr float kD2Cap = 8.0f;        // docs/POLICIES.md: d2 is capped before it is exponentiated
constexpr float kMinExp = -100.0f;    // exp below is 0 in float, and -infinity must not reach Exp

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

// Adds the 128-bit blocks of v together: the result's lowest block is the sum.
template <class D>
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> SumBlocks([[maybe_unused]] D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return SumBlocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
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

// The sums of four vectors' lanes, as one block.
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> SumFour(F32 d, VF a, VF b, VF c, VF e) {
  const hn::RepartitionToWide<F32> wide;
  const VF ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const VF ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto lower = hn::InterleaveLower(wide, hn::BitCast(wide, ab), hn::BitCast(wide, ce));
  const auto upper = hn::InterleaveUpper(wide, hn::BitCast(wide, ab), hn::BitCast(wide, ce));
  return SumBlocks(d, hn::Add(hn::BitCast(d, lower), hn::BitCast(d, upper)));
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

// Squares of the 4-bit codes at p, one half of each byte, as floats.
HWY_INLINE VF LoadLowSquares(F32 d, const uint8_t* p) {
  const hn::Rebind<uint8_t, F32> bytes;
  const hn::RebindToSigned<F32> ints;
  const auto code = hn::And(hn::LoadU(bytes, p), hn::Set(bytes, uint8_t{15}));
  const VF f = hn::ConvertTo(d, hn::PromoteTo(ints, code));
  return hn::Mul(f, f);
}
HWY_INLINE VF LoadHighSquares(F32 d, const uint8_t* p) {
  const hn::Rebind<uint8_t, F32> bytes;
  const hn::RebindToSigned<F32> ints;
  const auto wide = hn::PromoteTo(ints, hn::LoadU(bytes, p));
  const VF f = hn::ConvertTo(d, hn::ShiftRight<4>(wide));
  return hn::Mul(f, f);
}

SquaredQueries PrepareSquares(const float* q, float scale, size_t dim, float* memory) {
  for (size_t c = 0; c < kQuad * dim; ++c) memory[c] = q[c] * scale * (q[c] * scale);
  if (HWY_TARGET > HWY_AVX3 || !HaveInt16Dot()) return {memory, {}};
  if (!std::all_of(memory, memory + kQuad * dim, [](float x) { return std::isfinite(x); })) {
    return {memory, {}};
  }
  return {memory, MakeInt16Squares(memory, dim, reinterpret_cast<int16_t*>(memory + kQuad * dim))};
}

void DotDeviations(const uint8_t* codes, const float* unit, size_t n, size_t dim,
                   const SquaredQueries& queries, float* out) {
  if (queries.int16.values != nullptr) {
    return DotInt16Deviations(codes, unit, n, dim, queries.int16, out, kAheadBytes);
  }
  const float* q = queries.squared;
  const F32 d16;
  const hn::CappedTag<float, 4> d4;
  const size_t half = dim / 2;
  const auto run = [&](size_t i) HWY_ATTR {
    const uint8_t* row = codes + i * half;
    VF s0 = hn::Zero(d16), s1 = s0, s2 = s0, s3 = s0;
    const size_t lanes = hn::Lanes(d16);
    size_t c = 0;
    for (; c + lanes <= half; c += lanes) {
      const VF low = LoadLowSquares(d16, row + c);
      const VF high = LoadHighSquares(d16, row + c);
      const float* qc = q + c;
      s0 = hn::MulAdd(low, hn::LoadU(d16, qc), s0);
      s1 = hn::MulAdd(low, hn::LoadU(d16, qc + dim), s1);
      s2 = hn::MulAdd(low, hn::LoadU(d16, qc + 2 * dim), s2);
      s3 = hn::MulAdd(low, hn::LoadU(d16, qc + 3 * dim), s3);
      qc += half;
      s0 = hn::MulAdd(high, hn::LoadU(d16, qc), s0);
      s1 = hn::MulAdd(high, hn::LoadU(d16, qc + dim), s1);
      s2 = hn::MulAdd(high, hn::LoadU(d16, qc + 2 * dim), s2);
      s3 = hn::MulAdd(high, hn::LoadU(d16, qc + 3 * dim), s3);
    }
    auto sum = SumFour(d16, s0, s1, s2, s3);
    if (c <
        half) {  // eight channels are left in each half: only when dim is 16 times an odd number
      float rest[kQuad] = {0, 0, 0, 0};
      for (; c < half; ++c) {
        const float low = static_cast<float>(row[c] & 15);
        const float high = static_cast<float>(row[c] >> 4);
        for (size_t j = 0; j < kQuad; ++j) {
          rest[j] += q[j * dim + c] * low * low + q[j * dim + half + c] * high * high;
        }
      }
      sum = hn::Add(sum, hn::LoadU(d4, rest));
    }
    hn::StoreU(hn::Mul(sum, hn::Set(d4, unit[i])), d4, out + i * kQuad);
  };
  for (size_t i = 0; i < n; ++i) run(i);
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

// ---- clusters ----

// A per-cluster value spread over a vector of quads: lanes [4k, 4k + 4) hold value[k].
template <class D>
HWY_INLINE hn::Vec<D> SpreadOverQuads(D d, const float* value) {
  if constexpr (hn::MaxLanes(D()) == 16) {
    alignas(64) static constexpr int32_t kLane[16] = {0, 0, 0, 0, 1, 1, 1, 1,
                                                      2, 2, 2, 2, 3, 3, 3, 3};
    return hn::TableLookupLanes(hn::LoadDup128(d, value), hn::SetTableIndices(d, kLane));
  } else if constexpr (hn::MaxLanes(D()) == 8) {
    const hn::Half<D> half;
    return hn::Combine(d, hn::Set(half, value[1]), hn::Set(half, value[0]));
  } else {
    return hn::Set(d, value[0]);
  }
}

template <class D>
HWY_INLINE hn::Vec<D> ScaleQuadsAt(D d, const float* x, const float* factor, size_t i, float* out) {
  const auto scaled = hn::Mul(hn::LoadU(d, x + i * kQuad), SpreadOverQuads(d, factor + i));
  if (out != nullptr) hn::StoreU(scaled, d, out + i * kQuad);
  return scaled;
}

void ScaleQuads(const float* x, const float* factor, size_t n, float* out, float* sum) {
  const F32 d;
  const hn::CappedTag<float, 4> d4;
  const size_t step = hn::Lanes(d) / kQuad;
  VF s = hn::Zero(d);
  size_t i = 0;
  for (; i + step <= n; i += step) s = hn::Add(s, ScaleQuadsAt(d, x, factor, i, out));
  auto s4 = hn::Add(hn::LoadU(d4, sum), SumBlocks(d, s));
  for (; i < n; ++i) s4 = hn::Add(s4, ScaleQuadsAt(d4, x, factor, i, out));
  hn::StoreU(s4, d4, sum);
}

void AddAcrossQuads(const float* x, const float* factor, size_t n, float* total) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    VF x0, x1, x2, x3;
    hn::LoadInterleaved4(d, x + i * kQuad, x0, x1, x2, x3);
    VF sum = hn::MulAdd(x0, hn::Set(d, factor[0]), hn::LoadU(d, total + i));
    sum = hn::MulAdd(x1, hn::Set(d, factor[1]), sum);
    sum = hn::MulAdd(x2, hn::Set(d, factor[2]), sum);
    hn::StoreU(hn::MulAdd(x3, hn::Set(d, factor[3]), sum), d, total + i);
  }
  for (; i < n; ++i) {
    for (size_t j = 0; j < kQuad; ++j) total[i] = std::fma(x[i * kQuad + j], factor[j], total[i]);
  }
}

template <class D>
HWY_INLINE void ClusterScoresAt(D d, const ClusterScoreArgs& args, size_t i) {
  const auto base =
      hn::Add(hn::LoadU(d, args.dot + i * kQuad), SpreadOverQuads(d, args.log_size + i));
  if (args.d2 == nullptr) return hn::StoreU(base, d, args.log_mass + i * kQuad);
  const auto d2 = hn::LoadU(d, args.d2 + i * kQuad);
  const auto capped = hn::Min(d2, hn::Set(d, kD2Cap));
  hn::StoreU(hn::MulAdd(capped, hn::Set(d, 0.5f), base), d, args.log_mass + i * kQuad);
  if (args.optimistic == nullptr) return;
  hn::StoreU(hn::MulAdd(hn::Sqrt(d2), hn::Set(d, 2.0f), base), d, args.optimistic + i * kQuad);
}

void ClusterScores(const ClusterScoreArgs& args, size_t n) {
  const F32 d;
  const size_t step = hn::Lanes(d) / kQuad;
  size_t i = 0;
  for (; i + step <= n; i += step) ClusterScoresAt(d, args, i);
  for (; i < n; ++i) ClusterScoresAt(hn::CappedTag<float, 4>(), args, i);
}

template <class D>
HWY_INLINE void ClusterErrorsAt(D d, const float* weight, const float* d2, const float* spread,
                                const float* unit, size_t i, float* error2) {
  const auto growth = hn::Expm1(d, hn::Min(hn::LoadU(d, d2 + i * kQuad), hn::Set(d, kD2Cap)));
  const auto value = hn::Mul(hn::Mul(hn::LoadU(d, weight + i * kQuad), hn::LoadDup128(d, unit)),
                             SpreadOverQuads(d, spread + i));
  hn::StoreU(hn::Mul(hn::Mul(value, value), growth), d, error2 + i * kQuad);
}

void ClusterErrors(const float* weight, const float* d2, const float* spread, const float* unit,
                   size_t n, float* error2) {
  const F32 d;
  const size_t step = hn::Lanes(d) / kQuad;
  size_t i = 0;
  for (; i + step <= n; i += step) ClusterErrorsAt(d, weight, d2, spread, unit, i, error2);
  for (; i < n; ++i) {
    ClusterErrorsAt(hn::CappedTag<float, 4>(), weight, d2, spread, unit, i, error2);
  }
}

// ---- exact attention ----

// The keys and values of up to kRowBlock tokens.
struct TokenBlock {
  RowBlock keys, values;
};

// Walks along the tokens of runs.
class TokenCursor {
 public:
  TokenCursor(const PageGeometry& geometry, std::span<const TokenRun> runs)
      : geometry_(geometry), run_(runs.begin()), end_(runs.end()) {
    if (run_ != end_) token_ = run_->range.begin;
  }

  // The next tokens, as many as there are; the pointers beyond repeat the last one.
  void Next(TokenBlock* block) {
    size_t count = 0;
    while (count < kRowBlock && run_ != end_) {
      const uint32_t in_page =
          HWY_MIN(kPageTokens - token_ % kPageTokens, run_->range.end - token_);
      const size_t tokens = HWY_MIN(kRowBlock - count, size_t{in_page});
      const std::byte* key = run_->pages + geometry_.KeyOffset(token_);
      const std::byte* value = run_->pages + geometry_.ValueOffset(token_);
      for (size_t i = 0; i < tokens; ++i) {
        block->keys.rows[count + i] = key + i * geometry_.key_row_bytes;
        block->values.rows[count + i] = value + i * geometry_.value_row_bytes;
      }
      count += tokens;
      token_ += static_cast<uint32_t>(tokens);
      if (token_ == run_->range.end && ++run_ != end_) token_ = run_->range.begin;
    }
    block->keys.count = block->values.count = count;
    for (size_t i = count; count > 0 && i < kRowBlock; ++i) {
      block->keys.rows[i] = block->keys.rows[count - 1];
      block->values.rows[i] = block->values.rows[count - 1];
    }
  }

 private:
  const PageGeometry& geometry_;
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

template <class Loader>
HWY_INLINE void AttendBlock(const PageGeometry& g, const TokenBlock& block, const TokenBlock* ahead,
                            const Queries& q, QuadState* state) {
  const size_t count = block.keys.count;
  HWY_ALIGN float logits[kRowBlock * kQuad];
  DotBlock<Loader>(block.keys, ahead != nullptr ? ahead->keys.rows : nullptr, g.head_dim, q,
                   logits);
  HWY_ALIGN float max[kQuad];
  std::copy(state->max, state->max + kQuad, max);
  MaxQuadsImpl(logits, count, max);
  Rescale(max, g.value_dim, state);
  ExpQuadsImpl(logits, count, max, logits, state->sum);
  AddWeightedBlock<Loader>(block.values, ahead != nullptr ? ahead->values.rows : nullptr,
                           g.value_dim, logits, state->values);
}

void AttendRuns(const PageGeometry& g, std::span<const TokenRun> runs, const Queries* q,
                size_t quads, QuadState* states) {
  constexpr size_t kBlocks = kAheadBlocks + 1;
  WithLoader(g.dtype, [&](auto loader) {
    using Loader = decltype(loader);
    TokenCursor cursor(g, runs);
    TokenBlock blocks[kBlocks];
    for (size_t b = 0; b < kAheadBlocks; ++b) cursor.Next(&blocks[b]);
    for (size_t b = 0; blocks[b % kBlocks].keys.count > 0; ++b) {
      TokenBlock* ahead = &blocks[(b + kAheadBlocks) % kBlocks];
      cursor.Next(ahead);
      if (ahead->keys.count == 0) ahead = nullptr;
      for (size_t quad = 0; quad < quads; ++quad) {  // all while the block is in cache
        AttendBlock<Loader>(g, blocks[b % kBlocks], quad == 0 ? ahead : nullptr, q[quad],
                            &states[quad]);
      }
    }
  });
}

// ---- k-means ----

// The best cluster of each of kPoints points; two vectors of clusters at a time.
template <size_t kPoints>
HWY_INLINE void AssignPoints(const float* points, size_t dim, const float* centroids_t,
                             const float* half_norms, size_t stride, uint32_t* assignment) {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  const size_t lanes = hn::Lanes(d);
  VF best[kPoints];
  hn::Vec<decltype(du)> where[kPoints];
  for (size_t p = 0; p < kPoints; ++p) {
    best[p] = hn::Set(d, -std::numeric_limits<float>::infinity());
    where[p] = hn::Zero(du);
  }
  for (size_t c = 0; c < stride; c += 2 * lanes) {
    // With 16 lanes the stride may be an odd number of vectors: the second one then repeats the
    // first.
    const size_t c1 = c + lanes < stride ? c + lanes : c;
    VF s0[kPoints], s1[kPoints];
    for (size_t p = 0; p < kPoints; ++p) s0[p] = s1[p] = hn::Zero(d);
    for (size_t k = 0; k < dim; ++k) {
      const VF v0 = hn::LoadU(d, centroids_t + k * stride + c);
      const VF v1 = hn::LoadU(d, centroids_t + k * stride + c1);
      for (size_t p = 0; p < kPoints; ++p) {
        const VF x = hn::Set(d, points[p * dim + k]);
        s0[p] = hn::MulAdd(x, v0, s0[p]);
        s1[p] = hn::MulAdd(x, v1, s1[p]);
      }
    }
    const VF n0 = hn::LoadU(d, half_norms + c), n1 = hn::LoadU(d, half_norms + c1);
    const auto i0 = hn::Iota(du, static_cast<uint32_t>(c));
    const auto i1 = hn::Iota(du, static_cast<uint32_t>(c1));
    for (size_t p = 0; p < kPoints; ++p) {
      const VF t0 = hn::Sub(s0[p], n0), t1 = hn::Sub(s1[p], n1);
      const auto m0 = hn::Gt(t0, best[p]);
      best[p] = hn::IfThenElse(m0, t0, best[p]);
      where[p] = hn::IfThenElse(hn::RebindMask(du, m0), i0, where[p]);
      const auto m1 = hn::Gt(t1, best[p]);
      best[p] = hn::IfThenElse(m1, t1, best[p]);
      where[p] = hn::IfThenElse(hn::RebindMask(du, m1), i1, where[p]);
    }
  }
  alignas(64) float value[16];
  alignas(64) uint32_t index[16];
  for (size_t p = 0; p < kPoints; ++p) {
    hn::Store(best[p], d, value);
    hn::Store(where[p], du, index);
    size_t lane = 0;
    for (size_t i = 1; i < lanes; ++i) {
      if (value[i] > value[lane] || (value[i] == value[lane] && index[i] < index[lane])) lane = i;
    }
    assignment[p] = index[lane];
  }
}

void AssignClosest(const float* points, size_t n, size_t dim, const float* centroids_t,
                   const float* half_norms, size_t stride, uint32_t* assignment) {
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    AssignPoints<4>(points + i * dim, dim, centroids_t, half_norms, stride, assignment + i);
  }
  for (; i < n; ++i) {
    AssignPoints<1>(points + i * dim, dim, centroids_t, half_norms, stride, assignment + i);
  }
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
HWY_EXPORT(PrepareSquares);
HWY_EXPORT(DotDeviations);
HWY_EXPORT(AddWeightedRows);
HWY_EXPORT(MaxQuads);
HWY_EXPORT(ExpQuads);
HWY_EXPORT(ScaleQuads);
HWY_EXPORT(AddAcrossQuads);
HWY_EXPORT(ClusterScores);
HWY_EXPORT(ClusterErrors);
HWY_EXPORT(AttendRuns);
HWY_EXPORT(AssignClosest);

const char* TargetName() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

Queries PrepareQueries(DType dtype, const float* q, float scale, size_t dim, float* memory) {
  return HWY_DYNAMIC_DISPATCH(PrepareQueries)(dtype, q, scale, dim, memory);
}

size_t SquaresFloats(size_t dim) {
  return kQuad * dim + Int16SquaresSize(dim) * sizeof(int16_t) / sizeof(float);
}

SquaredQueries PrepareSquares(const float* q, float scale, size_t dim, float* memory) {
  return HWY_DYNAMIC_DISPATCH(PrepareSquares)(q, scale, dim, memory);
}

void DotRows(DType dtype, const std::byte* rows, size_t row_bytes, size_t n, size_t dim,
             const Queries& q, float* out) {
  HWY_DYNAMIC_DISPATCH(DotRows)(dtype, rows, row_bytes, n, dim, q, out);
}

void DotDeviations(const uint8_t* codes, const float* unit, size_t n, size_t dim,
                   const SquaredQueries& q, float* out) {
  HWY_DYNAMIC_DISPATCH(DotDeviations)(codes, unit, n, dim, q, out);
}

void AddWeightedRows(DType dtype, const std::byte* rows, size_t row_bytes, size_t n, size_t dim,
                     const float* weight, float* sum) {
  HWY_DYNAMIC_DISPATCH(AddWeightedRows)(dtype, rows, row_bytes, n, dim, weight, sum);
}

void MaxQuads(const float* x, size_t n, float* max) { HWY_DYNAMIC_DISPATCH(MaxQuads)(x, n, max); }

void ExpQuads(const float* x, size_t n, const float* max, float* out, float* sum) {
  HWY_DYNAMIC_DISPATCH(ExpQuads)(x, n, max, out, sum);
}

void ScaleQuads(const float* x, const float* factor, size_t n, float* out, float* sum) {
  HWY_DYNAMIC_DISPATCH(ScaleQuads)(x, factor, n, out, sum);
}

void AddAcrossQuads(const float* x, const float* factor, size_t n, float* total) {
  HWY_DYNAMIC_DISPATCH(AddAcrossQuads)(x, factor, n, total);
}

void ClusterScores(const ClusterScoreArgs& args, size_t n) {
  HWY_DYNAMIC_DISPATCH(ClusterScores)(args, n);
}

void ClusterErrors(const float* weight, const float* d2, const float* spread, const float* unit,
                   size_t n, float* error2) {
  HWY_DYNAMIC_DISPATCH(ClusterErrors)(weight, d2, spread, unit, n, error2);
}

void AttendRuns(const PageGeometry& geometry, std::span<const TokenRun> runs, const Queries* q,
                size_t quads, QuadState* states) {
  HWY_DYNAMIC_DISPATCH(AttendRuns)(geometry, runs, q, quads, states);
}

void AssignClosest(const float* points, size_t n, size_t dim, const float* centroids_t,
                   const float* half_norms, size_t stride, uint32_t* assignment) {
  HWY_DYNAMIC_DISPATCH(AssignClosest)(points, n, dim, centroids_t, half_norms, stride, assignment);
}

}  // namespace attnd::attention::kernels
#endif  // HWY_ONCE
