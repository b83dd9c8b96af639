// SPDX-License-Identifier: Apache-2.0
#include "attention/completion/feature_maps.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::attention {
namespace {

absl::Status Wrong(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("feature maps: ", what));
}

absl::Status CheckExtent(absl::string_view name, uint32_t value, uint32_t max, uint32_t multiple) {
  if (value > 0 && value <= max && value % multiple == 0) return absl::OkStatus();
  return Wrong(
      absl::StrCat(name, " is ", value, "; allowed are multiples of ", multiple, " up to ", max));
}

absl::Status CheckWeights(absl::string_view name, const std::vector<float>& weights, size_t size) {
  if (weights.size() != size) {
    return Wrong(absl::StrCat(name, " has ", weights.size(), " numbers; allowed are ", size));
  }
  const auto within = [](float x) { return std::abs(x) <= kMapWeightMax; };  // false for NaN
  if (std::all_of(weights.begin(), weights.end(), within)) return absl::OkStatus();
  return Wrong(absl::StrCat(name, " has a weight that is no number of -", kMapWeightMax, "..",
                            kMapWeightMax));
}

absl::Status CheckSide(absl::string_view name, const FeatureMapSide& side, size_t heads,
                       const FeatureMapParts& parts) {
  const size_t width = parts.width, inner = parts.inner, dim = parts.head_dim;
  const auto check = [&](absl::string_view part, const std::vector<float>& weights, size_t size) {
    return CheckWeights(absl::StrCat(name, ".", part), weights, heads * size);
  };
  ATTND_RETURN_IF_ERROR(check("stem.weight", side.stem_weight, width * dim));
  ATTND_RETURN_IF_ERROR(check("stem.bias", side.stem_bias, width));
  ATTND_RETURN_IF_ERROR(check("inner.weight", side.inner_weight, inner * width));
  ATTND_RETURN_IF_ERROR(check("inner.bias", side.inner_bias, inner));
  ATTND_RETURN_IF_ERROR(check("outer.weight", side.outer_weight, width * inner));
  ATTND_RETURN_IF_ERROR(check("outer.bias", side.outer_bias, width));
  ATTND_RETURN_IF_ERROR(check("alpha", side.alpha, 1));
  ATTND_RETURN_IF_ERROR(check("output.weight", side.output_weight, dim * width));
  return check("output.bias", side.output_bias, dim);
}

// y = weight x + bias for a quad of x.   x: [4][in]; y: [out][4].
void Affine(const float* weight, const float* bias, size_t out, size_t in, const float* x,
            float* y) {
  alignas(64) float memory[kernels::QueriesFloats(kernels::kDimMax)];
  const kernels::Queries queries = kernels::PrepareQueries(DType::kFp32, x, 1, in, memory);
  kernels::DotRows(DType::kFp32, reinterpret_cast<const std::byte*>(weight), in * sizeof(float),
                   out, in, queries, y);
  for (size_t i = 0; i < out; ++i) {
    for (size_t lane = 0; lane < kQuad; ++lane) y[i * kQuad + lane] += bias[i];
  }
}

// [n][4] to [4][n].
void Transpose(const float* quads, size_t n, float* rows) {
  for (size_t lane = 0; lane < kQuad; ++lane) {
    for (size_t i = 0; i < n; ++i) rows[lane * n + i] = quads[i * kQuad + lane];
  }
}

float Gelu(float z) {
  constexpr float kInverseRoot2 = 0.70710678f;
  return 0.5f * z * (1.0f + std::erf(z * kInverseRoot2));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const FeatureMaps>> FeatureMaps::Make(FeatureMapParts parts) {
  ATTND_RETURN_IF_ERROR(CheckExtent("layers", parts.layers, kLayersMax, 1));
  ATTND_RETURN_IF_ERROR(CheckExtent("query_heads", parts.query_heads, kHeadsMax, 1));
  ATTND_RETURN_IF_ERROR(CheckExtent("kv_heads", parts.kv_heads, kHeadsMax, 1));
  ATTND_RETURN_IF_ERROR(CheckExtent("head_dim", parts.head_dim, kHeadDimMax, kHeadDimMultiple));
  ATTND_RETURN_IF_ERROR(CheckExtent("width", parts.width, kMapWidthMax, kHeadDimMultiple));
  ATTND_RETURN_IF_ERROR(CheckExtent("inner", parts.inner, kMapWidthMax, kHeadDimMultiple));
  const size_t query_heads = size_t{parts.layers} * parts.query_heads;
  const size_t key_heads = size_t{parts.layers} * parts.kv_heads;
  ATTND_RETURN_IF_ERROR(CheckSide("query", parts.query, query_heads, parts));
  ATTND_RETURN_IF_ERROR(CheckSide("key", parts.key, key_heads, parts));
  if (parts.completed.size() != query_heads) {
    return Wrong(absl::StrCat("completed has ", parts.completed.size(), " heads; allowed are ",
                              query_heads));
  }
  return std::shared_ptr<const FeatureMaps>(new FeatureMaps(std::move(parts)));
}

absl::Status FeatureMaps::CheckShape(const ModelShape& shape) const {
  const float difference = std::abs(shape.softmax_scale - parts_.softmax_scale);
  if (shape.layers == parts_.layers && shape.query_heads == parts_.query_heads &&
      shape.kv_heads == parts_.kv_heads && shape.head_dim == parts_.head_dim &&
      difference <= 1e-5f * std::abs(parts_.softmax_scale)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the server's feature maps are of ", parts_.layers, " layers, ", parts_.query_heads,
      " query heads, ", parts_.kv_heads, " KV heads, head_dim ", parts_.head_dim,
      " and softmax_scale ", parts_.softmax_scale, "; the model has ", shape.layers, ", ",
      shape.query_heads, ", ", shape.kv_heads, ", ", shape.head_dim, " and ", shape.softmax_scale));
}

void FeatureMaps::Evaluate(const FeatureMapSide& side, size_t head, const float* x,
                           float* log_features) const {
  const size_t width = parts_.width, inner = parts_.inner, dim = parts_.head_dim;
  float rows[kQuad * kernels::kDimMax], stem[kQuad * kMapWidthMax], hidden[kQuad * kMapWidthMax];
  for (size_t c = 0; c < kQuad * dim; ++c) rows[c] = std::clamp(x[c], -kMapInputMax, kMapInputMax);
  Affine(side.stem_weight.data() + head * width * dim, side.stem_bias.data() + head * width, width,
         dim, rows, stem);
  Transpose(stem, width, rows);
  Affine(side.inner_weight.data() + head * inner * width, side.inner_bias.data() + head * inner,
         inner, width, rows, hidden);
  for (size_t i = 0; i < kQuad * inner; ++i) hidden[i] = Gelu(hidden[i]);
  Transpose(hidden, inner, rows);
  Affine(side.outer_weight.data() + head * width * inner, side.outer_bias.data() + head * width,
         width, inner, rows, hidden);
  const float alpha = side.alpha[head];
  for (size_t i = 0; i < kQuad * width; ++i) stem[i] += alpha * hidden[i];
  Transpose(stem, width, rows);
  Affine(side.output_weight.data() + head * dim * width, side.output_bias.data() + head * dim, dim,
         width, rows, log_features);
  for (size_t i = 0; i < kQuad * dim; ++i) {
    log_features[i] = std::clamp(log_features[i], -kLogFeatureMax, kLogFeatureMax);
  }
}

}  // namespace attnd::attention
