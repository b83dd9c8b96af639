// SPDX-License-Identifier: Apache-2.0
//
// Rows of stored elements: loading them as floats, their dot products with a quad of queries, and
// their weighted sums. Compiled once for each instruction set, as kernels-inl.h is.
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

#if defined(ATTND_ATTENTION_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_ATTENTION_ROWS_INL_H_
#undef ATTND_ATTENTION_ROWS_INL_H_
#else
#define ATTND_ATTENTION_ROWS_INL_H_
#endif

#include "attention/kernels/kernels-inl.h"
#include "attention/kernels/kernels.h"
#include "attention/kernels/x86_dot.h"

HWY_BEFORE_NAMESPACE();
namespace attnd::attention::kernels {
namespace HWY_NAMESPACE {

// Loaders of stored elements as floats. Load gives N neighbours. LoadTwo gives 2 N neighbours as
// two vectors in the order that costs least: for bf16 the even elements, then the odd ones (a shift
// and a mask, where widening in order would take two shuffles). The order does not change a dot
// product if the queries have the same order (ArrangeQueries).
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

struct LoadInt8 {
  static constexpr size_t kBytes = 1;
  static constexpr bool kEvenOdd = false;
  static HWY_INLINE VF Load(F32 d, const std::byte* p) {
    const hn::Rebind<int8_t, F32> bytes;
    const hn::RebindToSigned<F32> wide;
    return hn::ConvertTo(d,
                         hn::PromoteTo(wide, hn::LoadU(bytes, reinterpret_cast<const int8_t*>(p))));
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

// ---- dot products ----

// Prefetches rows, a few cache lines at a time between the arithmetic, as a burst would fill the
// queues of the cache. The hardware's own prefetcher stops following a stream at each 4 KiB page.
HWY_INLINE void PrefetchRow(const std::byte* row, size_t bytes) {
  constexpr size_t kCacheLineBytes = 64;
  constexpr int kRead = 0, kIntoSecondLevel = 2;
  for (size_t offset = 0; offset < bytes; offset += kCacheLineBytes) {
    __builtin_prefetch(row + offset, kRead, kIntoSecondLevel);
  }
}

// Rows that share the loads of q: as many as have sums in registers.
constexpr size_t kDotRows = HWY_TARGET <= HWY_AVX3 ? 4 : 2;

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

// Up to kRowBlock rows, wherever they lie.
struct RowBlock {
  const std::byte* rows[kRowBlock];
  size_t count = 0;

  // Rows [first, first + count) of n rows that lie side by side.
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

// out[i][j] = q[j] . row[i] of a block. ahead: as many rows to prefetch meanwhile, or null.
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

// ---- weighted sums ----

// AddWeightedBlock for kColumns vectors of columns: their part of each of the four sums stays in
// registers for all rows. sum: from column `column` on.
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

}  // namespace HWY_NAMESPACE
}  // namespace attnd::attention::kernels
HWY_AFTER_NAMESPACE();

#endif  // ATTND_ATTENTION_ROWS_INL_H_
