// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/completion/completion_support.h"

#include <cmath>
#include <utility>
#include <vector>

namespace attnd::attention::test {
namespace {

FeatureMapParts Sized(const ModelShape& shape, uint32_t width, uint32_t inner) {
  FeatureMapParts parts;
  parts.layers = shape.layers;
  parts.query_heads = shape.query_heads;
  parts.kv_heads = shape.kv_heads;
  parts.head_dim = shape.head_dim;
  parts.softmax_scale = shape.softmax_scale;
  parts.width = width;
  parts.inner = inner;
  for (uint32_t head = 0; head < shape.layers * shape.query_heads; ++head) {
    parts.completed.push_back(head % 2);
  }
  parts.identity = "maps of a test";
  return parts;
}

oracle::Affine OracleAffine(const std::vector<float>& weight, const std::vector<float>& bias,
                            size_t head, size_t out, size_t in) {
  return {Rows(weight, in, head * out, out), Rows(bias, out, head, 1)[0]};
}

}  // namespace

FeatureMapParts RandomParts(const ModelShape& shape, uint32_t width, uint32_t inner,
                            Random* random) {
  FeatureMapParts parts = Sized(shape, width, inner);
  const size_t dim = shape.head_dim;
  const auto fill = [&](FeatureMapSide* side, size_t heads) {
    const auto matrix = [&](size_t out, size_t in) {
      return random->Normals(heads * out * in, 1 / std::sqrt(static_cast<double>(in)));
    };
    side->stem_weight = matrix(width, dim);
    side->stem_bias = random->Normals(heads * width, 0.3);
    side->inner_weight = matrix(inner, width);
    side->inner_bias = random->Normals(heads * inner, 0.3);
    side->outer_weight = matrix(width, inner);
    side->outer_bias = random->Normals(heads * width, 0.3);
    side->alpha = random->Normals(heads, 0.5);
    side->output_weight = matrix(dim, width);
    side->output_bias = random->Normals(heads * dim, 0.5);
  };
  fill(&parts.query, size_t{shape.layers} * shape.query_heads);
  fill(&parts.key, size_t{shape.layers} * shape.kv_heads);
  return parts;
}

FeatureMapParts KernelParts(const ModelShape& shape, float q0) {
  constexpr float kNone = -60;  // exp(2 kNone) counts for nothing
  const uint32_t width = kHeadDimMultiple;
  FeatureMapParts parts = Sized(shape, width, width);
  const size_t dim = shape.head_dim;
  const auto fill = [&](FeatureMapSide* side, size_t heads, float slope) {
    side->stem_weight.assign(heads * width * dim, 0);
    side->stem_bias.assign(heads * width, 0);
    side->inner_weight.assign(heads * width * width, 0.5f);
    side->inner_bias.assign(heads * width, 0.25f);
    side->outer_weight.assign(heads * width * width, 0.5f);
    side->outer_bias.assign(heads * width, 0.25f);
    side->alpha.assign(heads, 0);
    side->output_weight.assign(heads * dim * width, 0);
    side->output_bias.assign(heads * dim, kNone);
    for (size_t head = 0; head < heads; ++head) {
      side->stem_weight[head * width * dim] = 1;
      side->output_weight[head * dim * width] = slope;
      side->output_bias[head * dim] = 0;
    }
  };
  fill(&parts.query, size_t{shape.layers} * shape.query_heads, 0);
  fill(&parts.key, size_t{shape.layers} * shape.kv_heads, shape.softmax_scale * q0);
  return parts;
}

oracle::FeatureMap OracleMap(const FeatureMapParts& parts, const FeatureMapSide& side,
                             size_t head) {
  const size_t width = parts.width, inner = parts.inner, dim = parts.head_dim;
  oracle::FeatureMap map;
  map.stem = OracleAffine(side.stem_weight, side.stem_bias, head, width, dim);
  map.inner = OracleAffine(side.inner_weight, side.inner_bias, head, inner, width);
  map.outer = OracleAffine(side.outer_weight, side.outer_bias, head, width, inner);
  map.alpha = double{side.alpha[head]};
  map.output = OracleAffine(side.output_weight, side.output_bias, head, dim, width);
  return map;
}

}  // namespace attnd::attention::test
