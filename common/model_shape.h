// SPDX-License-Identifier: Apache-2.0
//
// What one model shard's attention looks like, and the limits on it.
#ifndef ATTND_COMMON_MODEL_SHAPE_H_
#define ATTND_COMMON_MODEL_SHAPE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/dtype.h"

namespace attnd {

inline constexpr uint32_t kLayersMax = 1024;
inline constexpr uint32_t kHeadsMax = 1024;
inline constexpr uint32_t kGroupMax = 128;  // query heads that share one KV head
// Of a key, query or value head: a latent head (MLA) has keys of 512 + 64 and values of 512.
inline constexpr uint32_t kHeadDimMax = 576;
inline constexpr uint32_t kHeadDimMultiple = 16;

struct ModelShape {
  uint32_t layers = 0;
  uint32_t query_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t value_dim = 0;
  DType dtype = DType::kBf16;
  float softmax_scale = 0;  // logits are softmax_scale * q.k; positive
  // Multi-head latent attention: one KV head, whose value is the first value_dim elements of its
  // key. Values are then neither sent nor stored.
  bool latent = false;

  uint32_t group() const { return query_heads / kv_heads; }
  // Bytes that are stored of one token in one (layer, KV head): K and V; K alone if latent.
  uint32_t token_bytes() const { return (head_dim + (latent ? 0 : value_dim)) * DTypeBytes(dtype); }

  // InvalidArgument that names the field and its range. Every other member may be used only after
  // this passed.
  absl::Status Validate() const;

  bool operator==(const ModelShape&) const = default;
};

}  // namespace attnd

#endif  // ATTND_COMMON_MODEL_SHAPE_H_
