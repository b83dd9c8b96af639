// SPDX-License-Identifier: Apache-2.0
//
// FeatureMaps: the learned positive feature maps of one model (docs/POLICIES.md, "Retrieval with
// completion"; Top-K with Linear-Attention Completion, section 4 and appendix J): exp(scale q.k) is
// replaced by phi_q(q) . phi_k(k), with a phi_q for each query head and a phi_k for each KV head of
// each layer. Features are given by their natural logarithms.
//
//   g0 = W x + b                            the stem; x a rotated query or key, not scaled
//   d  = W2 GELU(W1 g0 + b1) + b2           GELU with the normal distribution function
//   g1 = g0 + alpha d                       the ReZero block
//   ln phi(x) = Wo g1 + bo                  as many features as the head has channels
#ifndef ATTND_ATTENTION_COMPLETION_FEATURE_MAPS_H_
#define ATTND_ATTENTION_COMPLETION_FEATURE_MAPS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/kernels/kernels.h"
#include "common/model_shape.h"

namespace attnd::attention {

// The most elements of g0 and of the hidden vector; both sizes are multiples of kHeadDimMultiple.
inline constexpr uint32_t kMapWidthMax = 512;
// No weight is greater than kMapWeightMax, and no channel of a query or a key counts as more than
// kMapInputMax, so that all intermediate numbers stay within float32.
inline constexpr float kMapWeightMax = 1e4f;
inline constexpr float kMapInputMax = 1e6f;
// No logarithm of a feature counts as more than this, as no logit is greater.
inline constexpr float kLogFeatureMax = 1e18f;

// The maps of one side (queries or keys); heads = layers * heads of a layer. Row-major.
struct FeatureMapSide {
  std::vector<float> stem_weight;    // [heads][width][head_dim] W
  std::vector<float> stem_bias;      // [heads][width] b
  std::vector<float> inner_weight;   // [heads][inner][width] W1
  std::vector<float> inner_bias;     // [heads][inner] b1
  std::vector<float> outer_weight;   // [heads][width][inner] W2
  std::vector<float> outer_bias;     // [heads][width] b2
  std::vector<float> alpha;          // [heads]
  std::vector<float> output_weight;  // [heads][head_dim][width] Wo
  std::vector<float> output_bias;    // [heads][head_dim] bo
};

struct FeatureMapParts {
  uint32_t layers = 0;
  uint32_t query_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  float softmax_scale = 0;  // that the maps were trained for
  uint32_t width = 0;       // of g0
  uint32_t inner = 0;       // of the block's hidden vector
  FeatureMapSide query;     // heads: layer * query_heads + query head
  FeatureMapSide key;       // heads: layer * kv_heads + KV head
  // [layers * query_heads] whether this head is completed, unless the policy says otherwise.
  std::vector<uint8_t> completed;
  std::string identity;  // a hash of the file; different maps have different identities
};

// Immutable: safe from any thread.
class FeatureMaps {
 public:
  // InvalidArgument, naming the part and what is allowed, for sizes beyond their limits, for parts
  // whose sizes do not match, and for weights that are NaN or beyond kMapWeightMax.
  static absl::StatusOr<std::shared_ptr<const FeatureMaps>> Make(FeatureMapParts parts);

  const std::string& identity() const { return parts_.identity; }
  uint32_t features() const { return parts_.head_dim; }
  bool completed(uint32_t layer, uint32_t query_head) const {
    return parts_.completed[size_t{layer} * parts_.query_heads + query_head] != 0;
  }
  // FailedPrecondition, naming both shapes, if the maps are for another shape than the model's.
  absl::Status CheckShape(const ModelShape& shape) const;

  // x: [4][head_dim]; log_features: [features][4]. The features of a vector do not depend on the
  // other vectors of the quad.
  void QueryFeatures(uint32_t layer, uint32_t query_head, const float* x,
                     float* log_features) const {
    Evaluate(parts_.query, size_t{layer} * parts_.query_heads + query_head, x, log_features);
  }
  void KeyFeatures(uint32_t layer, uint32_t kv_head, const float* x, float* log_features) const {
    Evaluate(parts_.key, size_t{layer} * parts_.kv_heads + kv_head, x, log_features);
  }

 private:
  explicit FeatureMaps(FeatureMapParts parts) : parts_(std::move(parts)) {}
  void Evaluate(const FeatureMapSide& side, size_t head, const float* x, float* log_features) const;

  const FeatureMapParts parts_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_COMPLETION_FEATURE_MAPS_H_
