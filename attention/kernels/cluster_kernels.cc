// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/kernels/kernels.h"
#include "attention/policy/estimate_limits.h"

// The targets left out would only lengthen the build.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels/cluster_kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h.
#include "attention/kernels/kernels-inl.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd::attention::kernels {
namespace HWY_NAMESPACE {

// The 4-bit codes at p, one half of each byte, as floats; or their squares.
template <bool kSquared, class D>
HWY_INLINE hn::Vec<D> LoadLow(D d, const uint8_t* p) {
  const hn::Rebind<uint8_t, D> bytes;
  const hn::RebindToSigned<D> ints;
  const auto code = hn::And(hn::LoadU(bytes, p), hn::Set(bytes, uint8_t{15}));
  const auto f = hn::ConvertTo(d, hn::PromoteTo(ints, code));
  return kSquared ? hn::Mul(f, f) : f;
}
template <bool kSquared, class D>
HWY_INLINE hn::Vec<D> LoadHigh(D d, const uint8_t* p) {
  const hn::Rebind<uint8_t, D> bytes;
  const hn::RebindToSigned<D> ints;
  const auto wide = hn::PromoteTo(ints, hn::LoadU(bytes, p));
  const auto f = hn::ConvertTo(d, hn::ShiftRight<4>(wide));
  return kSquared ? hn::Mul(f, f) : f;
}

// The products of codes [first, end) of both halves of a row, or of their squares, with a quad
// ([4][dim]); whole vectors of D.
template <bool kSquared, class D>
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> DotNibblesIn(D d, const uint8_t* row, size_t first,
                                                         size_t end, size_t dim, const float* q) {
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (size_t c = first; c < end; c += hn::Lanes(d)) {
    const auto low = LoadLow<kSquared>(d, row + c);
    const auto high = LoadHigh<kSquared>(d, row + c);
    const float* qc = q + c;
    s0 = hn::MulAdd(low, hn::LoadU(d, qc), s0);
    s1 = hn::MulAdd(low, hn::LoadU(d, qc + dim), s1);
    s2 = hn::MulAdd(low, hn::LoadU(d, qc + 2 * dim), s2);
    s3 = hn::MulAdd(low, hn::LoadU(d, qc + 3 * dim), s3);
    qc += dim / 2;
    s0 = hn::MulAdd(high, hn::LoadU(d, qc), s0);
    s1 = hn::MulAdd(high, hn::LoadU(d, qc + dim), s1);
    s2 = hn::MulAdd(high, hn::LoadU(d, qc + 2 * dim), s2);
    s3 = hn::MulAdd(high, hn::LoadU(d, qc + 3 * dim), s3);
  }
  return SumFour(d, s0, s1, s2, s3);
}

template <bool kSquared>
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> DotNibbles(const uint8_t* row, size_t dim,
                                                       const float* q) {
  const F32 d;
  const size_t half = dim / 2;
  const size_t whole = half / hn::Lanes(d) * hn::Lanes(d);
  // Eight channels are left in each half when dim is 16 times an odd number, for vectors of 16.
  const hn::CappedTag<float, 8> d8;
  if (whole == 0) return DotNibblesIn<kSquared>(d8, row, 0, half, dim, q);
  const auto sum = DotNibblesIn<kSquared>(d, row, 0, whole, dim, q);
  if (whole == half) return sum;
  return hn::Add(sum, DotNibblesIn<kSquared>(d8, row, whole, half, dim, q));
}

void DotCodes(const uint8_t* codes, const float* scale, const float* least, size_t n, size_t width,
              const CodeQueries& queries, float* out) {
  const hn::CappedTag<float, 4> d4;
  const auto q_sum = hn::LoadU(d4, queries.q_sum);
  for (size_t i = 0; i < n; ++i) {
    const auto sum = DotNibbles<false>(codes + i * (width / 2), width, queries.q);
    const auto base = hn::Mul(q_sum, hn::Set(d4, least[i]));
    hn::StoreU(hn::MulAdd(sum, hn::Set(d4, scale[i]), base), d4, out + i * kQuad);
  }
}

SquaredQueries PrepareSquares(const float* q, float scale, size_t dim, float* memory,
                              bool rounded) {
  // So that the sum over channels, before it meets the clusters' units, is a float.
  constexpr float kGreatest = std::numeric_limits<float>::max() / (450.0f * kDimMax);
  for (size_t c = 0; c < kQuad * dim; ++c) {
    memory[c] = std::min(q[c] * scale * (q[c] * scale), kGreatest);
  }
  if (!rounded || HWY_TARGET > HWY_AVX3 || !HaveInt16Dot()) return {memory, {}};
  return {memory, MakeInt16Squares(memory, dim, reinterpret_cast<int16_t*>(memory + kQuad * dim))};
}

void DotDeviations(const uint8_t* codes, const float* unit, size_t n, size_t dim,
                   const SquaredQueries& queries, float* out) {
  if (queries.int16.values != nullptr) {
    return DotInt16Deviations(codes, unit, n, dim, queries.int16, out, kAheadBytes);
  }
  const hn::CappedTag<float, 4> d4;
  for (size_t i = 0; i < n; ++i) {
    const auto sum = DotNibbles<true>(codes + i * (dim / 2), dim, queries.squared);
    hn::StoreU(hn::Mul(sum, hn::Set(d4, unit[i])), d4, out + i * kQuad);
  }
}

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
  const auto capped = hn::Min(d2, hn::Set(d, kVarianceCap));
  hn::StoreU(hn::MulAdd(capped, hn::Set(d, 0.5f), base), d, args.log_mass + i * kQuad);
  if (args.optimistic == nullptr) return;
  hn::StoreU(hn::MulAdd(hn::Sqrt(d2), hn::Set(d, args.optimism), base), d,
             args.optimistic + i * kQuad);
}

void ClusterScores(const ClusterScoreArgs& args, size_t n) {
  const F32 d;
  const size_t step = hn::Lanes(d) / kQuad;
  size_t i = 0;
  for (; i + step <= n; i += step) ClusterScoresAt(d, args, i);
  for (; i < n; ++i) ClusterScoresAt(hn::CappedTag<float, 4>(), args, i);
}

void HiddenMass(const float* log_mass, const float* d2, float optimism, size_t n, float* hidden) {
  const hn::CappedTag<float, 4> d4;
  const auto cap = hn::Set(d4, kVarianceCap);
  const auto none = hn::Set(d4, -std::numeric_limits<float>::infinity());
  for (size_t i = 0; i < n * kQuad; i += kQuad) {
    const auto spread = hn::LoadU(d4, d2 + i);
    const auto beyond = hn::Sub(hn::Sqrt(spread), hn::Sqrt(cap));
    const auto most = hn::MulAdd(beyond, hn::Set(d4, optimism), hn::LoadU(d4, log_mass + i));
    hn::StoreU(hn::IfThenElse(hn::Gt(spread, cap), most, none), d4, hidden + i);
  }
}

template <class D>
HWY_INLINE void ClusterErrorsAt(D d, const float* weight, const float* d2, const float* spread,
                                const float* unit, size_t i, float* error2) {
  const auto growth = hn::Expm1(d, hn::Min(hn::LoadU(d, d2 + i * kQuad), hn::Set(d, kVarianceCap)));
  // Its square stays a float: where an output cancels to nothing the unit is huge, and infinity
  // times a cluster's growth of 0 would be NaN.
  const auto value =
      hn::Min(hn::Mul(hn::Mul(hn::LoadU(d, weight + i * kQuad), hn::LoadDup128(d, unit)),
                      SpreadOverQuads(d, spread + i)),
              hn::Set(d, kErrorMax));
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

template <class D>
HWY_INLINE void RegressionErrorsAt(D d, const RegressionErrorArgs& args, size_t i) {
  const auto capped = hn::Min(hn::LoadU(d, args.d2 + i * kQuad), hn::Set(d, kVarianceCap));
  const auto size = SpreadOverQuads(d, args.size + i);
  // Among s weights none can have more than all: their relative variance is at most s - 1.
  const auto growth = hn::Min(hn::Expm1(d, capped), hn::Sub(size, hn::Set(d, 1.0f)));
  const auto weight = hn::LoadU(d, args.weight + i * kQuad);
  const auto in_error = hn::Mul(weight, hn::LoadDup128(d, args.error_unit));
  const auto in_mass = hn::Mul(weight, hn::LoadDup128(d, args.mass_unit));
  const auto most = hn::Set(d, kErrorMax);  // as in ClusterErrorsAt
  const auto rest = hn::Min(hn::Mul(in_error, SpreadOverQuads(d, args.spread + i)), most);
  const auto value_norm = hn::Sqrt(SpreadOverQuads(d, args.value_norm2 + i));
  const auto half = hn::Mul(capped, hn::Set(d, 0.5f));
  const auto moved = hn::Min(hn::Mul(in_error, hn::Mul(half, value_norm)), most);
  const auto share = hn::Set(d, kMassErrorShare);
  const auto of_rest = hn::Mul(hn::Mul(rest, rest), hn::Div(growth, size));
  hn::StoreU(hn::MulAdd(hn::Mul(moved, moved), share, of_rest), d, args.error2 + i * kQuad);
  const auto mass = hn::Mul(in_mass, half);
  hn::StoreU(hn::Mul(hn::Mul(mass, mass), share), d, args.mass2 + i * kQuad);
}

void RegressionErrors(const RegressionErrorArgs& args, size_t n) {
  const F32 d;
  const size_t step = hn::Lanes(d) / kQuad;
  size_t i = 0;
  for (; i + step <= n; i += step) RegressionErrorsAt(d, args, i);
  for (; i < n; ++i) RegressionErrorsAt(hn::CappedTag<float, 4>(), args, i);
}

// sum [4][dim] += weight [n][4] times the squares of the codes in a vector of bytes at `codes`,
// half a row's bytes from row to row; `c` is the first byte's channel.
template <class D>
HWY_INLINE void AddSquaredCodes(D d, const uint8_t* codes, size_t n, size_t dim, size_t c,
                                const float* weight, float* sum) {
  using V = hn::Vec<D>;
  const hn::Rebind<uint8_t, D> bytes;
  const hn::RebindToSigned<D> ints;
  const size_t half = dim / 2;
  V low[kQuad], high[kQuad];
  for (size_t j = 0; j < kQuad; ++j) {
    low[j] = hn::LoadU(d, sum + j * dim + c);
    high[j] = hn::LoadU(d, sum + j * dim + half + c);
  }
  for (size_t i = 0; i < n; ++i) {
    const auto wide = hn::PromoteTo(ints, hn::LoadU(bytes, codes + i * half + c));
    const V a = hn::ConvertTo(d, hn::And(wide, hn::Set(ints, 15)));
    const V b = hn::ConvertTo(d, hn::ShiftRight<4>(wide));
    const V a2 = hn::Mul(a, a), b2 = hn::Mul(b, b);
    for (size_t j = 0; j < kQuad; ++j) {
      const V w = hn::Set(d, weight[i * kQuad + j]);
      low[j] = hn::MulAdd(a2, w, low[j]);
      high[j] = hn::MulAdd(b2, w, high[j]);
    }
  }
  for (size_t j = 0; j < kQuad; ++j) {
    hn::StoreU(low[j], d, sum + j * dim + c);
    hn::StoreU(high[j], d, sum + j * dim + half + c);
  }
}

void AddWeightedVariances(const uint8_t* codes, const float* unit, size_t n, size_t dim,
                          const float* d2, const float* weight, float* sum) {
  constexpr size_t kRows = 64;  // whose codes stay in the first cache
  const F32 d;
  const hn::CappedTag<float, 4> d4;
  const hn::CappedTag<float, 8> d8;
  const size_t half = dim / 2;
  float scaled[kRows * kQuad];
  for (size_t first = 0; first < n; first += kRows) {
    const size_t rows = std::min(kRows, n - first);
    for (size_t i = 0; i < rows; ++i) {
      const size_t at = (first + i) * kQuad;
      const auto cap = hn::Set(d4, kVarianceCap);
      const auto spread = hn::Max(hn::LoadU(d4, d2 + at), cap);
      const auto share = hn::Div(cap, spread);
      const auto w = hn::Mul(hn::LoadU(d4, weight + at), hn::Set(d4, unit[first + i]));
      hn::StoreU(hn::Mul(w, share), d4, scaled + i * kQuad);
    }
    size_t c = 0;
    const uint8_t* const block = codes + first * half;
    for (; c + hn::Lanes(d) <= half; c += hn::Lanes(d)) {
      AddSquaredCodes(d, block, rows, dim, c, scaled, sum);
    }
    // Eight channels are left in each half: only when dim is 16 times an odd number.
    for (; c < half; c += hn::Lanes(d8)) AddSquaredCodes(d8, block, rows, dim, c, scaled, sum);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd::attention::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd::attention::kernels {

HWY_EXPORT(DotCodes);
HWY_EXPORT(PrepareSquares);
HWY_EXPORT(DotDeviations);
HWY_EXPORT(ScaleQuads);
HWY_EXPORT(AddAcrossQuads);
HWY_EXPORT(ClusterScores);
HWY_EXPORT(HiddenMass);
HWY_EXPORT(ClusterErrors);
HWY_EXPORT(RegressionErrors);
HWY_EXPORT(AddWeightedVariances);

size_t SquaresFloats(size_t dim) {
  return kQuad * dim + Int16SquaresSize(dim) * sizeof(int16_t) / sizeof(float);
}

void DotCodes(const uint8_t* codes, const float* scale, const float* least, size_t n, size_t width,
              const CodeQueries& queries, float* out) {
  HWY_DYNAMIC_DISPATCH(DotCodes)(codes, scale, least, n, width, queries, out);
}

SquaredQueries PrepareSquares(const float* q, float scale, size_t dim, float* memory,
                              bool rounded) {
  return HWY_DYNAMIC_DISPATCH(PrepareSquares)(q, scale, dim, memory, rounded);
}

void DotDeviations(const uint8_t* codes, const float* unit, size_t n, size_t dim,
                   const SquaredQueries& q, float* out) {
  HWY_DYNAMIC_DISPATCH(DotDeviations)(codes, unit, n, dim, q, out);
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

void HiddenMass(const float* log_mass, const float* d2, float optimism, size_t n, float* hidden) {
  HWY_DYNAMIC_DISPATCH(HiddenMass)(log_mass, d2, optimism, n, hidden);
}

void ClusterErrors(const float* weight, const float* d2, const float* spread, const float* unit,
                   size_t n, float* error2) {
  HWY_DYNAMIC_DISPATCH(ClusterErrors)(weight, d2, spread, unit, n, error2);
}

void RegressionErrors(const RegressionErrorArgs& args, size_t n) {
  HWY_DYNAMIC_DISPATCH(RegressionErrors)(args, n);
}

void AddWeightedVariances(const uint8_t* codes, const float* unit, size_t n, size_t dim,
                          const float* d2, const float* weight, float* sum) {
  HWY_DYNAMIC_DISPATCH(AddWeightedVariances)(codes, unit, n, dim, d2, weight, sum);
}

}  // namespace attnd::attention::kernels
#endif  // HWY_ONCE
