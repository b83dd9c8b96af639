// SPDX-License-Identifier: Apache-2.0
//
// Vector kernels of the CPU backend (Google Highway; the best instruction set of the machine is
// chosen at run time).
//
// Query vectors are handled four at a time, a "quad", because four query heads that share a KV head
// are the common case and because four dot products reduce together at the price of one. Per-quad
// arrays interleave the four: [n][4]. A quad with fewer than four vectors is padded with zeros.
//
// All kernels are deterministic: the same arguments give the same bits, whatever the thread.
#ifndef ATTND_ATTENTION_KERNELS_KERNELS_H_
#define ATTND_ATTENTION_KERNELS_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/kernels/softmax_state.h"
#include "attention/kernels/x86_dot.h"
#include "attention/segment/index_layout.h"
#include "attention/segment/pages.h"
#include "common/dtype.h"
#include "common/model_shape.h"

namespace attnd::attention::kernels {

inline constexpr uint32_t kRowBlock = 16;       // rows whose logits are made before their weights
inline constexpr size_t kDimMax = kHeadDimMax;  // of the kernels' buffers on the stack
static_assert(kDimMax % kHeadDimMultiple == 0 && kHeadDimMultiple % 16 == 0,
              "a row is whole vectors of at most 16 floats");
static_assert(sizeof(float) * kQuad * kDimMax <= size_t{16} << 10,
              "a quad's vectors fit the stack");

// Name of the instruction set in use, for example "AVX3".
const char* TargetName();

// A quad's queries in the forms that dot products with rows of one dtype need; made once, used for
// many rows. The memory belongs to the caller of PrepareQueries.
struct Queries {
  const float* arranged = nullptr;  // [4][dim], scaled, in the order of the kernels' loads
  const uint16_t* bf16 = nullptr;   // [4][dim], not scaled; null unless usable and exact
  float scale = 1;
};

// Floats of memory that PrepareQueries needs for one quad.
constexpr size_t QueriesFloats(size_t dim) { return kQuad * (dim + dim / 2); }

// Queries q ([4][dim]) times scale, for rows of dtype. `memory` holds QueriesFloats(dim), aligned
// to 64 bytes. bf16 rows and queries that are bf16 numbers are multiplied as such where the
// processor can and scale is not extreme: products are exact but for subnormal numbers, which count
// as 0, and the scale is applied to the sum.
Queries PrepareQueries(DType dtype, const float* q, float scale, size_t dim, float* memory);

// out[i][j] = scale * (q[j] . row[i]).   rows: [n, dim] of dtype, row_bytes apart; out: [n][4].
void DotRows(DType dtype, const std::byte* rows, size_t row_bytes, size_t n, size_t dim,
             const Queries& q, float* out);

// Squared queries in the forms that DotDeviations needs. The memory belongs to the caller of
// PrepareSquares.
struct SquaredQueries {
  const float* squared = nullptr;  // [4][dim]
  Int16Squares int16;              // values is null where they are not used
};

// Floats of memory that PrepareSquares needs for one quad.
size_t SquaresFloats(size_t dim);

// (q scale)^2 of q ([4][dim]), bounded to about 1e33 so that sums over channels stay finite.
// `memory` holds SquaresFloats(dim), aligned to 64 bytes. int16 squares are made only if `rounded`.
SquaredQueries PrepareSquares(const float* q, float scale, size_t dim, float* memory,
                              bool rounded = true);

// out[i][j] = unit[i] * sum_c q_squared[j][c] * code[i][c]^2, codes packed as in
// ClusterIndex::deviation_codes. codes: [n, dim / 2]; out: [n][4]; dim is a multiple of 16. With
// int16 squares, q_squared[j][c] counts rounded to 2^-16 of the greatest of j; the codes' own
// rounding is a thousand times that.
void DotDeviations(const uint8_t* codes, const float* unit, size_t n, size_t dim,
                   const SquaredQueries& q, float* out);

// sum[j] += sum_i weight[i][j] * row[i].   weight: [n][4]; sum: [4][dim].
void AddWeightedRows(DType dtype, const std::byte* rows, size_t row_bytes, size_t n, size_t dim,
                     const float* weight, float* sum);

// The same over rows in bytes, `stride` bytes apart. q is of floats (PrepareQueries with kFp32).
// out[i][j] = scales[i] * q.scale * (arranged[j] . codes[i]) + base_dot[j]: queries so large that
// their products with codes are no floats may be arranged in other units.
void DotByteRows(const ByteRows& rows, size_t stride, size_t n, size_t dim, const Queries& q,
                 const float* base_dot, float* out);
// sum[j] += sum_i weight[i][j] * scales[i] * codes[i]: the base is the caller's to add.
void AddWeightedByteRows(const ByteRows& rows, size_t stride, size_t n, size_t dim,
                         const float* weight, float* sum);

// max[j] = max(max[j], x[i][j] over i).
void MaxQuads(const float* x, size_t n, float* max);

// out[i][j] = exp(x[i][j] - max[j]);  sum[j] += their sum. out may be x. -infinity gives 0.
void ExpQuads(const float* x, size_t n, const float* max, float* out, float* sum);

// MaxQuads and ExpQuads in place: max[j] = max over i of x[i][j]; x becomes exp(x - max); sum[j] is
// the sum of the new x[.][j].
inline void SoftmaxQuads(float* x, size_t n, float* max, float* sum) {
  for (size_t j = 0; j < kQuad; ++j) {
    max[j] = kNegativeInfinity;
    sum[j] = 0;
  }
  MaxQuads(x, n, max);
  ExpQuads(x, n, max, x, sum);
}

// sum[j] += sum_i x[i][j] * factor[i], and out[i][j] = x[i][j] * factor[i] unless out is null. out
// may be x.   factor: [n].
void ScaleQuads(const float* x, const float* factor, size_t n, float* out, float* sum);

// total[i] += sum_j x[i][j] * factor[j].   factor: [4]; total: [n].
void AddAcrossQuads(const float* x, const float* factor, size_t n, float* total);

// Inputs and outputs of ClusterScores, [n][4] except where they say [n].
struct ClusterScoreArgs {
  const float* dot = nullptr;       // a q.C
  const float* d2 = nullptr;        // variance of the members' logits; null: first order
  const float* log_size = nullptr;  // [n]
  float* log_mass = nullptr;        // out: dot + log_size + min(d2, 8) / 2; may be dot
  float* optimistic = nullptr;      // out: dot + log_size + optimism sqrt(d2), null if not wanted
  float optimism = 0;
};
void ClusterScores(const ClusterScoreArgs& args, size_t n);

// error2[i][j] = min(weight[i][j] * unit[j] * spread[i], 1e14)^2 * expm1(min(d2[i][j], 8)).
void ClusterErrors(const float* weight, const float* d2, const float* spread, const float* unit,
                   size_t n, float* error2);

// With a regression, the squared error of estimating a cluster has two parts: the error of the
// values, and the error of the mass, which counts times the squared norm of the output.
struct RegressionErrorArgs {
  const float* weight = nullptr;       // [n][4] mass in any unit
  const float* d2 = nullptr;           // [n][4]
  const float* size = nullptr;         // [n] members
  const float* spread = nullptr;       // [n]
  const float* value_norm2 = nullptr;  // [n]
  const float* error_unit = nullptr;   // [4] makes weight * value an error
  const float* mass_unit = nullptr;    // [4] makes weight a share of all mass, at most 1
  // out: weight^2 (min(expm1(g), size - 1) spread^2 / size + share (g / 2)^2 value_norm2), each
  // term at most 1e28, with weight in error_unit and g = min(d2, 8)
  float* error2 = nullptr;
  float* mass2 = nullptr;  // out: share (weight g / 2)^2, with weight in mass_unit
};
void RegressionErrors(const RegressionErrorArgs& args, size_t n);

// sum[j][c] += sum_i weight[i][j] * min(1, 8 / d2[i][j]) * unit[i] * code[i][c]^2, codes packed as
// in ClusterIndex::deviation_codes. codes: [n, dim / 2]; weight, d2: [n][4]; sum: [4][dim]; dim is
// a multiple of 16.
void AddWeightedVariances(const uint8_t* codes, const float* unit, size_t n, size_t dim,
                          const float* d2, const float* weight, float* sum);

// out[i][j] = scale[i] * sum_c q[j][c] code[i][c] + least[i] * q_sum[j], codes packed as in
// KeyCodeIndex. codes: [n, width / 2]; q: [4][width]; out: [n][4]; width is a multiple of 16.
struct CodeQueries {
  const float* q = nullptr;  // [4][width]
  float q_sum[kQuad] = {};   // of each q
};
void DotCodes(const uint8_t* codes, const float* scale, const float* least, size_t n, size_t width,
              const CodeQueries& queries, float* out);

// Attends `quads` quads to the runs' tokens, in their order, and merges the tokens into the quads'
// states. q and states: [quads]. A token changes nothing of a lane that does not read it. The
// grouping of sums depends only on the tokens' numbers in the order: tokens are handled in blocks
// of kRowBlock from the first one on. So runs may be divided between two calls where a block ends,
// without a difference of a bit.
void AttendRuns(const PageGeometry& geometry, std::span<const TokenRun> runs, const Queries* q,
                size_t quads, QuadState* states);

// What clusters may hide: where the variance of a cluster's logits exceeds kVarianceCap, its mass
// is estimated as if the variance were that, and a member `optimism` standard deviations above the
// mean has exp(optimism (sqrt(d2) - sqrt(kVarianceCap))) times as much. hidden = the logarithm of
// that, -infinity for other clusters. log_mass, d2, hidden: [n][4].
void HiddenMass(const float* log_mass, const float* d2, float optimism, size_t n, float* hidden);

// k-means assignment. points: [n][dim] floats; centroids_t: [dim][stride], transposed, stride a
// multiple of 16 and at least `clusters`; half_norms: [stride] |c|^2 / 2, +infinity from `clusters`
// on. assignment[i] = the cluster with the least |point - centroid|, the lower one of equals.
void AssignClosest(const float* points, size_t n, size_t dim, const float* centroids_t,
                   const float* half_norms, size_t clusters, size_t stride, uint32_t* assignment);

}  // namespace attnd::attention::kernels

#endif  // ATTND_ATTENTION_KERNELS_KERNELS_H_
