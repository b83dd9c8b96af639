// SPDX-License-Identifier: Apache-2.0
#include "common/model_shape.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd {
namespace {

absl::Status CheckCount(const char* field, uint32_t value, uint32_t max) {
  if (value >= 1 && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("model.shape.", field, " is ", value, "; allowed are 1..", max));
}

absl::Status CheckHeadDim(const char* field, uint32_t value) {
  if (value >= kHeadDimMultiple && value <= kHeadDimMax && value % kHeadDimMultiple == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("model.shape.", field, " is ", value,
                                                 "; allowed are multiples of ", kHeadDimMultiple,
                                                 " up to ", kHeadDimMax));
}

absl::Status CheckLatent(uint32_t kv_heads, uint32_t head_dim, uint32_t value_dim) {
  if (kv_heads != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("model.shape.kv_heads is ", kv_heads, "; allowed is 1 if latent"));
  }
  if (value_dim > head_dim) {
    return absl::InvalidArgumentError(absl::StrCat("model.shape.value_dim is ", value_dim,
                                                   "; allowed are multiples of ", kHeadDimMultiple,
                                                   " up to head_dim (", head_dim, ") if latent"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ModelShape::Validate() const {
  ATTND_RETURN_IF_ERROR(CheckCount("layers", layers, kLayersMax));
  ATTND_RETURN_IF_ERROR(CheckCount("query_heads", query_heads, kHeadsMax));
  ATTND_RETURN_IF_ERROR(CheckCount("kv_heads", kv_heads, kHeadsMax));
  ATTND_RETURN_IF_ERROR(CheckHeadDim("head_dim", head_dim));
  ATTND_RETURN_IF_ERROR(CheckHeadDim("value_dim", value_dim));
  if (latent) ATTND_RETURN_IF_ERROR(CheckLatent(kv_heads, head_dim, value_dim));
  if (query_heads % kv_heads != 0 || query_heads / kv_heads > kGroupMax) {
    return absl::InvalidArgumentError(absl::StrCat("model.shape.query_heads is ", query_heads,
                                                   "; allowed are multiples of kv_heads (",
                                                   kv_heads, ") up to ", kGroupMax, " times it"));
  }
  if (!std::isfinite(softmax_scale) || softmax_scale <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("model.shape.softmax_scale is ", softmax_scale,
                                                   "; allowed are finite positive numbers"));
  }
  return absl::OkStatus();
}

}  // namespace attnd
