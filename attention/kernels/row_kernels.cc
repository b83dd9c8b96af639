// SPDX-License-Identifier: Apache-2.0
//
// Kernels over rows that lie side by side, and over their logits.
#include <cstring>

#include "attention/kernels/kernels.h"
#include "attention/kernels/x86_dot.h"

// The targets left out would only lengthen the build.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels/row_kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h.
#include "attention/kernels/rows-inl.h"
#include "attention/kernels/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd::attention::kernels {
namespace HWY_NAMESPACE {

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

void AddWeightedRows(DType dtype, const std::byte* rows, size_t row_bytes, size_t n, size_t dim,
                     const float* weight, float* sum) {
  WithLoader(dtype, [&](auto loader) {
    for (size_t i = 0; i < n; i += kRowBlock) {
      const RowBlock block = RowBlock::Of(rows, row_bytes, i, n);
      AddWeightedBlock<decltype(loader)>(block, block.Ahead().rows, dim, weight + i * kQuad, sum);
    }
  });
}

void DotByteRows(const ByteRows& rows, size_t stride, size_t n, size_t dim, const Queries& q,
                 const float* base_dot, float* out) {
  const auto* codes = reinterpret_cast<const std::byte*>(rows.codes);
  for (size_t i = 0; i < n; i += kRowBlock) {
    const RowBlock block = RowBlock::Of(codes, stride, i, n);
    float* const dots = out + i * kQuad;
    DotBlock<LoadInt8>(block, block.Ahead().rows, dim, q, dots);
    for (size_t r = 0; r < block.count; ++r) {
      for (size_t j = 0; j < kQuad; ++j) {
        dots[r * kQuad + j] = rows.scales[i + r] * q.scale * dots[r * kQuad + j] + base_dot[j];
      }
    }
  }
}

void AddWeightedByteRows(const ByteRows& rows, size_t stride, size_t n, size_t dim,
                         const float* weight, float* sum) {
  const auto* codes = reinterpret_cast<const std::byte*>(rows.codes);
  float scaled[kRowBlock * kQuad];
  for (size_t i = 0; i < n; i += kRowBlock) {
    const RowBlock block = RowBlock::Of(codes, stride, i, n);
    for (size_t r = 0; r < block.count; ++r) {
      for (size_t j = 0; j < kQuad; ++j) {
        scaled[r * kQuad + j] = weight[(i + r) * kQuad + j] * rows.scales[i + r];
      }
    }
    AddWeightedBlock<LoadInt8>(block, block.Ahead().rows, dim, scaled, sum);
  }
}

void MaxQuads(const float* x, size_t n, float* max) { MaxQuadsImpl(x, n, max); }

void ExpQuads(const float* x, size_t n, const float* max, float* out, float* sum) {
  ExpQuadsImpl(x, n, max, out, sum);
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
HWY_EXPORT(DotByteRows);
HWY_EXPORT(AddWeightedByteRows);
HWY_EXPORT(MaxQuads);
HWY_EXPORT(ExpQuads);

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

void DotByteRows(const ByteRows& rows, size_t stride, size_t n, size_t dim, const Queries& q,
                 const float* base_dot, float* out) {
  HWY_DYNAMIC_DISPATCH(DotByteRows)(rows, stride, n, dim, q, base_dot, out);
}

void AddWeightedByteRows(const ByteRows& rows, size_t stride, size_t n, size_t dim,
                         const float* weight, float* sum) {
  HWY_DYNAMIC_DISPATCH(AddWeightedByteRows)(rows, stride, n, dim, weight, sum);
}

void MaxQuads(const float* x, size_t n, float* max) { HWY_DYNAMIC_DISPATCH(MaxQuads)(x, n, max); }

void ExpQuads(const float* x, size_t n, const float* max, float* out, float* sum) {
  HWY_DYNAMIC_DISPATCH(ExpQuads)(x, n, max, out, sum);
}

}  // namespace attnd::attention::kernels
#endif  // HWY_ONCE
