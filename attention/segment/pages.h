// SPDX-License-Identifier: Apache-2.0
//
// Pages: how keys and values lie in memory (docs/DESIGN.md, "Words").
//
// A page holds kPageTokens tokens of one (layer, KV head): first their keys, [16, head_dim], then
// their values, [16, value_dim], in the model's dtype; pages of a latent shape hold keys alone, as
// a value is the front of its key's row. Pages of one (layer, KV head) follow one another, so that
// token t's key is at page t / 16, row t % 16. The last page may be part filled.
#ifndef ATTND_ATTENTION_SEGMENT_PAGES_H_
#define ATTND_ATTENTION_SEGMENT_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "attention/segment/device_copy_slot.h"
#include "common/aligned_buffer.h"
#include "common/model_shape.h"

namespace attnd::attention {

inline constexpr uint32_t kPageTokens = 16;

struct PageGeometry {
  explicit PageGeometry(const ModelShape& shape)
      : dtype(shape.dtype),
        head_dim(shape.head_dim),
        value_dim(shape.value_dim),
        key_row_bytes(shape.head_dim * DTypeBytes(shape.dtype)),
        value_row_bytes(shape.latent ? 0 : shape.value_dim * DTypeBytes(shape.dtype)),
        value_stride_bytes(shape.latent ? key_row_bytes : value_row_bytes) {}

  // Whether values have rows of their own.
  bool stores_values() const { return value_row_bytes != 0; }
  size_t page_bytes() const { return kPageTokens * (key_row_bytes + value_row_bytes); }
  static uint64_t PagesFor(uint64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }
  size_t KeyOffset(uint64_t token) const {
    return token / kPageTokens * page_bytes() + token % kPageTokens * key_row_bytes;
  }
  size_t ValueOffset(uint64_t token) const {
    return token / kPageTokens * page_bytes() +
           (stores_values() ? kPageTokens * key_row_bytes : 0) +
           token % kPageTokens * value_stride_bytes;
  }
  // Copies token `from` of the pages at `source` to place `to` of the pages at `target`.
  void CopyToken(const std::byte* source, uint64_t from, std::byte* target, uint64_t to) const {
    std::memcpy(target + KeyOffset(to), source + KeyOffset(from), key_row_bytes);
    if (!stores_values()) return;
    std::memcpy(target + ValueOffset(to), source + ValueOffset(from), value_row_bytes);
  }

  DType dtype;
  uint32_t head_dim;
  uint32_t value_dim;
  size_t key_row_bytes;
  size_t value_row_bytes;     // 0 if a value is the front of its key
  size_t value_stride_bytes;  // from one value of a page to the next
};

// Tokens [begin, end) of pages that follow one another.
struct TokenRange {
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t size() const { return end - begin; }
  bool operator==(const TokenRange&) const = default;
};

class PagedPayload;

// Tokens `range` of the pages that follow one another from `pages` on.
struct TokenRun {
  const std::byte* pages = nullptr;
  TokenRange range;
  // Set, and `pages` null, while the run's pages have not been fetched.
  const PagedPayload* payload = nullptr;
  // [range.size()][quads], a bit for each of a quad's four lanes: whether the lane reads the token.
  // Null: all lanes read all tokens.
  const uint8_t* lanes = nullptr;
};

// TailBlock: kTailBlockTokens consecutive positions of every (layer, KV head). A tail grows by tail
// blocks, and forks share them.
//
// Thread-safety: a position's bytes are written once, before the length that covers the position is
// published under the owning sequence's lock; readers read only positions below the length that
// they were given.
inline constexpr uint32_t kTailBlockTokens = 64;

class TailBlock {
 public:
  explicit TailBlock(const ModelShape& shape)
      : kv_heads_(shape.kv_heads),
        run_bytes_(kTailBlockTokens / kPageTokens * PageGeometry(shape).page_bytes()),
        buffer_(Bytes(shape)) {}

  // Bytes of one tail block; fits 64 bits for every valid shape.
  static uint64_t Bytes(const ModelShape& shape) {
    return uint64_t{shape.layers} * shape.kv_heads * kTailBlockTokens * shape.token_bytes();
  }

  bool allocated() const { return buffer_.data() != nullptr; }
  // The kTailBlockTokens / kPageTokens pages of (layer, KV head).
  std::byte* pages(uint32_t layer, uint32_t kv_head) const {
    return buffer_.data() + (size_t{layer} * kv_heads_ + kv_head) * run_bytes_;
  }
  std::byte* data() const { return buffer_.data(); }
  size_t size() const { return buffer_.size(); }
  const DeviceCopySlot& device_copy() const { return device_copy_; }

 private:
  const uint32_t kv_heads_;
  const size_t run_bytes_;
  const AlignedBuffer buffer_;
  const DeviceCopySlot device_copy_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_PAGES_H_
