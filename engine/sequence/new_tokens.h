// SPDX-License-Identifier: Apache-2.0
//
// NewTokens: what a caller appends to one layer of a sequence.
#ifndef ATTND_ENGINE_SEQUENCE_NEW_TOKENS_H_
#define ATTND_ENGINE_SEQUENCE_NEW_TOKENS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>

#include "attention/segment/pages.h"
#include "common/model_shape.h"

namespace attnd::engine {

// New tokens of one layer: keys [tokens, kv_heads, head_dim] and values [tokens, kv_heads,
// value_dim] in the model's dtype; no values if the model is latent.
struct NewTokens {
  uint32_t layer = 0;
  uint64_t first_position = 0;
  uint64_t tokens = 0;
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
  std::span<const uint32_t> token_ids;  // none or [tokens]
  // Whether a pass appends them, so that layer 0 must still have them when other layers get them.
  bool of_pass = false;
  const std::function<bool()>* kept = nullptr;  // AppendChunk::kept
  // Greatest absolute value of the keys in each tail block that the tokens touch (BlockMagnitudes);
  // none where nobody has looked at the keys yet.
  std::span<const float> key_magnitudes;

  uint64_t end_position() const { return first_position + tokens; }
  // How many of the tokens, from the first on, lie before the position.
  uint64_t PartBelow(uint64_t position) const {
    return std::clamp(position, first_position, end_position()) - first_position;
  }
};

// The rows of new tokens, by token and KV head. The tokens must outlive this object.
class NewRows {
 public:
  NewRows(const NewTokens& tokens, const ModelShape& shape)
      : geometry_(shape), keys_(tokens.keys), values_(tokens.values), kv_heads_(shape.kv_heads) {}

  // Whether the token is equal to the token at `place` of the pages from `pages` on.
  bool Equal(uint64_t token, uint32_t head, const std::byte* pages, uint64_t place) const {
    const bool keys_equal = std::memcmp(pages + geometry_.KeyOffset(place), Key(token, head),
                                        geometry_.key_row_bytes) == 0;
    if (!geometry_.stores_values() || !keys_equal) return keys_equal;
    return std::memcmp(pages + geometry_.ValueOffset(place), Value(token, head),
                       geometry_.value_row_bytes) == 0;
  }
  // Writes the token to `place` of the pages from `pages` on.
  void CopyTo(uint64_t token, uint32_t head, std::byte* pages, uint64_t place) const {
    std::memcpy(pages + geometry_.KeyOffset(place), Key(token, head), geometry_.key_row_bytes);
    if (!geometry_.stores_values()) return;
    std::memcpy(pages + geometry_.ValueOffset(place), Value(token, head),
                geometry_.value_row_bytes);
  }

 private:
  const std::byte* Key(uint64_t token, uint32_t head) const {
    return keys_ + (token * kv_heads_ + head) * geometry_.key_row_bytes;
  }
  const std::byte* Value(uint64_t token, uint32_t head) const {
    return values_ + (token * kv_heads_ + head) * geometry_.value_row_bytes;
  }

  const attention::PageGeometry geometry_;
  const std::byte* const keys_;
  const std::byte* const values_;
  const uint32_t kv_heads_;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_NEW_TOKENS_H_
