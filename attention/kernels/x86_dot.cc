// SPDX-License-Identifier: Apache-2.0
//
// Functions carry their instruction set as an attribute: compiled with flags for the whole file,
// inline functions of headers would be, too, and the linker might choose those for a processor
// without it.
#include "attention/kernels/x86_dot.h"

#include <algorithm>
#include <cmath>

#if defined(__x86_64__)
#include <immintrin.h>

#define ATTND_AVX512 "avx512f,avx512bw,avx512vl,avx512dq"
#define ATTND_BF16 __attribute__((target(ATTND_AVX512 ",avx512bf16")))
#define ATTND_VNNI __attribute__((target(ATTND_AVX512 ",avx512vnni")))
// A function is inlined only where its caller has all its instruction sets.
#define ATTND_INLINE __attribute__((target(ATTND_AVX512))) inline __attribute__((always_inline))
#define ATTND_BF16_INLINE ATTND_BF16 inline __attribute__((always_inline))
#define ATTND_VNNI_INLINE ATTND_VNNI inline __attribute__((always_inline))

namespace attnd::attention::kernels {
namespace {

// What all functions here use besides their own extension.
bool HaveAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

constexpr size_t kQueries = 4;
constexpr size_t kRows = 4;  // rows that share the loads of q; 16 sums fill half the registers
constexpr size_t kPairs = kRows / 2;
constexpr size_t kElements = 32;  // bf16 numbers of a vector
constexpr size_t kLineBytes = 64;

inline void Prefetch(const void* p, size_t bytes) {
  for (size_t offset = 0; offset < bytes; offset += kLineBytes) {
    __builtin_prefetch(static_cast<const char*>(p) + offset, /*rw=*/0, /*locality=*/2);
  }
}

ATTND_BF16_INLINE __m512bh LoadPairs(__mmask32 mask, const void* p) {
  const __m512i bits = _mm512_maskz_loadu_epi16(mask, p);
  return reinterpret_cast<const __m512bh&>(bits);
}

// Block b of the result: partial sums b of the four vectors, side by side.
ATTND_INLINE __m512 Transpose4(const __m512* s) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(s[0], s[1]), _mm512_unpackhi_ps(s[0], s[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(s[2], s[3]), _mm512_unpackhi_ps(s[2], s[3]));
  const __m512d abd = _mm512_castps_pd(ab), cdd = _mm512_castps_pd(cd);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(abd, cdd)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(abd, cdd)));
}

// Two vectors of four blocks each become one: the sums of blocks 0 and 2, 1 and 3 of a, then of b.
ATTND_INLINE __m512 AddHalves(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
}

// The same of neighbouring blocks: the sums of blocks 0 and 1, 2 and 3 of a, then of b.
ATTND_INLINE __m512 AddNeighbours(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

// The 16 sums of four rows: [row][query].
ATTND_INLINE __m512 SumRows(const __m512 (*s)[kQueries]) {
  const __m512 first = AddHalves(Transpose4(s[0]), Transpose4(s[1]));
  const __m512 second = AddHalves(Transpose4(s[2]), Transpose4(s[3]));
  return AddNeighbours(first, second);
}

ATTND_BF16_INLINE void AddPairs(__mmask32 mask, const std::byte* const* rows, const uint16_t* q,
                                size_t dim, __m512 (*s)[kQueries]) {
  __m512bh row[kRows];
  for (size_t r = 0; r < kRows; ++r) row[r] = LoadPairs(mask, rows[r]);
  for (size_t j = 0; j < kQueries; ++j) {
    const __m512bh query = LoadPairs(mask, q + j * dim);
    for (size_t r = 0; r < kRows; ++r) s[r][j] = _mm512_dpbf16_ps(s[r][j], row[r], query);
  }
}

// A vector holds kCodeBytes of each of two rows; their squares are kCodeVectors vectors, with
// kCodeChannels of either row in each.
constexpr size_t kCodeBytes = 32;
constexpr size_t kCodeVectors = 4;
constexpr size_t kCodeChannels = 16;

// The channel that stands at `place` of squares vector `vector` of a chunk of kCodeBytes, dim for
// padding: the low halves of bytes hold the first half of a row's channels, and squares are widened
// by interleaving within blocks of 16 bytes.
size_t ChannelOf(size_t chunk, size_t vector, size_t place, size_t dim) {
  const size_t byte = place / 8 * 16 + vector % 2 * 8 + place % 8;
  const size_t channel = chunk * kCodeBytes + byte;
  return channel < dim / 2 ? vector / 2 * (dim / 2) + channel : dim;
}

ATTND_INLINE __m512i LoadCodes(__mmask32 first, __mmask32 second, const uint8_t* row,
                               size_t row_bytes) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(first, row)),
                            _mm256_maskz_loadu_epi8(second, row + row_bytes), 1);
}

// The squares of 64 codes, one in each byte, as 16-bit integers.
ATTND_INLINE void WidenSquares(__m512i codes, __m512i* squares) {
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 1, 4, 9, 16, 25, 36, 49, 64, 81, 100, 121, static_cast<char>(144),
                    static_cast<char>(169), static_cast<char>(196), static_cast<char>(225)));
  const __m512i bytes = _mm512_shuffle_epi8(table, codes);
  squares[0] = _mm512_unpacklo_epi8(bytes, _mm512_setzero_si512());
  squares[1] = _mm512_unpackhi_epi8(bytes, _mm512_setzero_si512());
}

// s[pair][query] += the products of one chunk of two pairs of rows. bytes: of codes in the chunk.
ATTND_VNNI_INLINE void AddChunk(const uint8_t* row, size_t row_bytes, size_t count, size_t bytes,
                                const int16_t* q, __m512i (*s)[kQueries]) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const __mmask32 mask = ~__mmask32{0} >> (kCodeBytes - bytes);
  __m512i squares[kPairs][kCodeVectors];
  for (size_t p = 0; p < kPairs; ++p) {
    const __m512i codes = LoadCodes(2 * p < count ? mask : 0, 2 * p + 1 < count ? mask : 0,
                                    row + 2 * p * row_bytes, row_bytes);
    WidenSquares(_mm512_and_si512(codes, nibble), squares[p]);
    WidenSquares(_mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble), squares[p] + 2);
  }
  for (size_t v = 0; v < kCodeVectors; ++v) {
    for (size_t j = 0; j < kQueries; ++j, q += kCodeChannels) {
      const __m512i query =
          _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)));
      for (size_t p = 0; p < kPairs; ++p) {
        s[p][j] = _mm512_dpwssd_epi32(s[p][j], squares[p][v], query);
      }
    }
  }
}

// The sums of two pairs of rows: [row][query].
ATTND_INLINE __m512 SumPairs(const __m512i (*s)[kQueries]) {
  __m512 blocks[kPairs];
  for (size_t p = 0; p < kPairs; ++p) {
    __m512 floats[kQueries];
    for (size_t j = 0; j < kQueries; ++j) floats[j] = _mm512_cvtepi32_ps(s[p][j]);
    blocks[p] = Transpose4(floats);
  }
  return AddNeighbours(blocks[0], blocks[1]);
}

}  // namespace

bool HaveBf16Dot() { return HaveAvx512() && __builtin_cpu_supports("avx512bf16"); }

ATTND_BF16 void DotBf16Rows(const std::byte* const* rows, const std::byte* const* ahead, size_t n,
                            size_t dim, const uint16_t* q, float scale, float* out) {
  const __m512 scales = _mm512_set1_ps(scale);
  for (size_t i = 0; i < n; i += kRows) {
    const size_t count = n - i < kRows ? n - i : kRows;
    const std::byte* row[kRows];
    for (size_t r = 0; r < kRows; ++r) row[r] = rows[i + (r < count ? r : 0)];
    for (size_t r = 0; ahead != nullptr && r < count; ++r) {
      Prefetch(ahead[i + r], dim * sizeof(uint16_t));
    }
    __m512 s[kRows][kQueries];
    for (auto& of_row : s) {
      for (__m512& sum : of_row) sum = _mm512_setzero_ps();
    }
    size_t c = 0;
    for (; c + kElements <= dim; c += kElements) {
      AddPairs(~__mmask32{0}, row, q + c, dim, s);
      for (const std::byte*& p : row) p += kElements * sizeof(uint16_t);
    }
    if (c < dim) AddPairs((__mmask32{1} << (dim - c)) - 1, row, q + c, dim, s);
    const auto stored = static_cast<__mmask16>((1u << (count * kQueries)) - 1);
    _mm512_mask_storeu_ps(out + i * kQueries, stored, _mm512_mul_ps(SumRows(s), scales));
  }
}

bool HaveInt16Dot() { return HaveAvx512() && __builtin_cpu_supports("avx512vnni"); }

Int16Squares MakeInt16Squares(const float* q_squared, size_t dim, int16_t* memory) {
  constexpr float kGreatest = 32767;
  Int16Squares squares;
  squares.values = memory;
  float scale[kQueries];
  for (size_t j = 0; j < kQueries; ++j) {
    const float greatest = *std::max_element(q_squared + j * dim, q_squared + (j + 1) * dim);
    squares.unit[j] = greatest / kGreatest;
    scale[j] = squares.unit[j] > 0 ? 1 / squares.unit[j] : 0;
    // So small a query that its reciprocal overflows has no logits worth a variance.
    if (std::isinf(scale[j])) scale[j] = 0;
  }
  for (size_t chunk = 0; chunk * 2 * kCodeBytes < dim; ++chunk) {
    for (size_t vector = 0; vector < kCodeVectors; ++vector) {
      for (size_t j = 0; j < kQueries; ++j) {
        for (size_t place = 0; place < kCodeChannels; ++place) {
          const size_t channel = ChannelOf(chunk, vector, place, dim);
          const float value = channel < dim ? q_squared[j * dim + channel] * scale[j] : 0;
          *memory++ = static_cast<int16_t>(std::min(std::nearbyint(value), kGreatest));
        }
      }
    }
  }
  return squares;
}

// A lane's sum stays below dim / 8 * 225 * 32767, far from 2^31 for every dim up to kDimMax.
ATTND_VNNI void DotInt16Deviations(const uint8_t* codes, const float* unit, size_t n, size_t dim,
                                   const Int16Squares& q, float* out, size_t ahead) {
  const size_t half = dim / 2;
  const __m512 query_units = _mm512_broadcast_f32x4(_mm_loadu_ps(q.unit));
  const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  for (size_t i = 0; i < n; i += kRows) {
    const size_t count = n - i < kRows ? n - i : kRows;
    const uint8_t* row = codes + i * half;
    Prefetch(row + ahead, count * half);
    __m512i s[kPairs][kQueries];
    for (auto& of_pair : s) {
      for (__m512i& sum : of_pair) sum = _mm512_setzero_si512();
    }
    const int16_t* query = q.values;
    for (size_t c = 0; c < half;
         c += kCodeBytes, query += kCodeVectors * kQueries * kCodeChannels) {
      AddChunk(row + c, half, count, half - c < kCodeBytes ? half - c : kCodeBytes, query, s);
    }
    const __m512 units = _mm512_castps128_ps512(
        _mm_maskz_loadu_ps(static_cast<__mmask8>((1u << count) - 1), unit + i));
    const __m512 sums = _mm512_mul_ps(SumPairs(s), query_units);
    const auto stored = static_cast<__mmask16>((1u << (count * kQueries)) - 1);
    _mm512_mask_storeu_ps(out + i * kQueries, stored,
                          _mm512_mul_ps(sums, _mm512_permutexvar_ps(spread, units)));
  }
}

}  // namespace attnd::attention::kernels

#else

namespace attnd::attention::kernels {
bool HaveBf16Dot() { return false; }
bool HaveInt16Dot() { return false; }
void DotBf16Rows(const std::byte* const*, const std::byte* const*, size_t, size_t, const uint16_t*,
                 float, float*) {}
Int16Squares MakeInt16Squares(const float*, size_t, int16_t*) { return {}; }
void DotInt16Deviations(const uint8_t*, const float*, size_t, size_t, const Int16Squares&, float*,
                        size_t) {}
}  // namespace attnd::attention::kernels

#endif
