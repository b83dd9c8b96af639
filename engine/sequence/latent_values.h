// SPDX-License-Identifier: Apache-2.0
//
// Values of latent models: a value is the front of its key, and is not sent.
#ifndef ATTND_ENGINE_SEQUENCE_LATENT_VALUES_H_
#define ATTND_ENGINE_SEQUENCE_LATENT_VALUES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/dtype.h"
#include "common/model_shape.h"
#include "engine/sequence/magnitude.h"

namespace attnd::engine {

// InvalidArgument if new tokens have values and the model is latent, or if they have none and the
// model is not latent.
inline absl::Status CheckValuesSent(bool sent, const ModelShape& shape) {
  if (sent != shape.latent) return absl::OkStatus();
  if (sent) {
    return absl::InvalidArgumentError(
        "v is present; allowed is none, as the sequence's model is latent: its values are the "
        "front of its keys");
  }
  return absl::InvalidArgumentError(absl::StrCat("v is missing; the sequence needs shape [.., ",
                                                 shape.kv_heads, ", ", shape.value_dim, "]"));
}

// CheckValueMagnitude of the first value_dim elements of each of `tokens` keys of a latent shape,
// which are finite.
inline absl::Status CheckLatentValues(const ModelShape& shape, const std::byte* keys,
                                      uint64_t tokens) {
  const size_t row_bytes = shape.head_dim * DTypeBytes(shape.dtype);
  float magnitude = 0;
  for (uint64_t token = 0; token < tokens; ++token) {
    magnitude =
        std::max(magnitude, Magnitude(shape.dtype, keys + token * row_bytes, shape.value_dim));
  }
  return CheckValueMagnitude(magnitude, "k, whose front is the value,");
}

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_LATENT_VALUES_H_
