// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/token_parts.h"

#include <algorithm>
#include <cstring>

#include "absl/status/status.h"
#include "attention/segment/pages.h"
#include "common/status.h"
#include "engine/sequence/latent_values.h"
#include "engine/sequence/magnitude.h"
#include "engine/sequence/tail.h"

namespace attnd::engine {
namespace {

using attention::kTailBlockTokens;
using attention::PageGeometry;

// Of keys and values of a part, if a tail block has no more: half of the second-level cache of a
// server's smaller cores.
constexpr size_t kPartBytes = size_t{512} << 10;

// Bytes of a token; no values of a latent model.
size_t KeyBytes(const ModelShape& shape) {
  return shape.kv_heads * PageGeometry(shape).key_row_bytes;
}

size_t ValueBytes(const ModelShape& shape) {
  return shape.kv_heads * PageGeometry(shape).value_row_bytes;
}

size_t TokenBytes(const ModelShape& shape) { return size_t{shape.kv_heads} * shape.token_bytes(); }

// `count` tokens behind the first `skip`.
NewTokens Slice(const ModelShape& shape, const NewTokens& tokens, uint64_t skip, uint64_t count) {
  NewTokens slice = tokens;
  slice.first_position += skip;
  slice.tokens = count;
  slice.keys += skip * KeyBytes(shape);
  if (!shape.latent) slice.values += skip * ValueBytes(shape);
  slice.token_ids = {};
  slice.key_magnitudes = {};
  return slice;
}

}  // namespace

uint64_t TokenParts::PartTokens(const ModelShape& shape) {
  const size_t block_bytes = kTailBlockTokens * TokenBytes(shape);
  return std::max<uint64_t>(kPartBytes / block_bytes, 1) * kTailBlockTokens;
}

TokenParts::TokenParts(const ModelShape& shape, const NewTokens& tokens)
    : shape_(shape), tokens_(tokens), part_tokens_(PartTokens(shape)) {
  if (tokens.kept == nullptr) return;
  const uint64_t most = std::min(tokens.tokens, part_tokens_);
  copy_ = std::make_unique_for_overwrite<std::byte[]>(most * TokenBytes(shape));
}

absl::StatusOr<NewTokens> TokenParts::Next() {
  const uint64_t begin = tokens_.first_position + taken_;
  // Up to the end of a tail block.
  const uint64_t count = std::min(tokens_.tokens - taken_, part_tokens_ - begin % kTailBlockTokens);
  NewTokens part = Slice(shape_, tokens_, taken_, count);
  if (part.kept != nullptr) Copy(&part);
  key_magnitudes_.clear();
  BlockMagnitudes(shape_.dtype, part.keys, begin, count,
                  uint64_t{shape_.kv_heads} * shape_.head_dim, &key_magnitudes_);
  for (const float magnitude : key_magnitudes_) {
    ATTND_RETURN_IF_ERROR(CheckFinite("k", magnitude));
  }
  ATTND_RETURN_IF_ERROR(CheckValues(part));
  part.key_magnitudes = key_magnitudes_;
  taken_ += count;
  return part;
}

void TokenParts::Copy(NewTokens* part) const {
  const size_t key_bytes = part->tokens * KeyBytes(shape_);
  std::memcpy(copy_.get(), part->keys, key_bytes);
  part->keys = copy_.get();
  if (!shape_.latent) {
    std::memcpy(copy_.get() + key_bytes, part->values, part->tokens * ValueBytes(shape_));
    part->values = copy_.get() + key_bytes;
  }
  part->kept = nullptr;
}

absl::Status TokenParts::CheckValues(const NewTokens& part) const {
  if (shape_.latent) return CheckLatentValues(shape_, part.keys, part.tokens);
  const float magnitude =
      Magnitude(shape_.dtype, part.values, part.tokens * shape_.kv_heads * shape_.value_dim);
  ATTND_RETURN_IF_ERROR(CheckFinite("v", magnitude));
  return CheckValueMagnitude(magnitude);
}

absl::Status NotKept() {
  return absl::CancelledError("the tokens' memory was given back before they were taken");
}

absl::Status CheckTokens(const ModelShape& shape, const NewTokens& tokens) {
  TokenParts parts(shape, tokens);
  while (!parts.done()) ATTND_RETURN_IF_ERROR(parts.Next().status());
  return absl::OkStatus();
}

std::vector<NewTokens> RunsFrom(const ModelShape& shape, const NewTokens& tokens, uint64_t begin,
                                uint32_t runs_max) {
  const uint64_t end = tokens.end_position();
  const uint64_t blocks = (Tail::BlocksOf(begin, end) + runs_max - 1) / runs_max;
  const uint64_t step = std::max(blocks * kTailBlockTokens, TokenParts::PartTokens(shape));
  std::vector<NewTokens> runs;
  while (begin < end) {
    const uint64_t count = std::min(end - begin, step - begin % kTailBlockTokens);
    runs.push_back(Slice(shape, tokens, begin - tokens.first_position, count));
    begin += count;
  }
  return runs;
}

}  // namespace attnd::engine
