// SPDX-License-Identifier: Apache-2.0
//
// TokenParts: the tokens of an upload, a few at a time, each part checked.
#ifndef ATTND_ENGINE_SEQUENCE_TOKEN_PARTS_H_
#define ATTND_ENGINE_SEQUENCE_TOKEN_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model_shape.h"
#include "engine/sequence/new_tokens.h"

namespace attnd::engine {

// A part is small enough to stay in a processor's cache between the check and whatever its caller
// does with it, so that an upload's keys and values are read from memory once. Tokens that others
// may write to meanwhile (NewTokens::kept) are copied first: what is checked is what a part has.
//
// Parts come in order and have whole tail blocks, but for the first block and the last.
class TokenParts {
 public:
  // How many tokens a part has at most: whole tail blocks.
  static uint64_t PartTokens(const ModelShape& shape);

  // What the arguments refer to must outlive this object.
  TokenParts(const ModelShape& shape, const NewTokens& tokens);

  bool done() const { return taken_ == tokens_.tokens; }
  // The next part, valid until the next call. It has no token ids, and nobody writes to it.
  // InvalidArgument, naming k or v: a NaN, an infinity, |v| beyond kValueMax.
  absl::StatusOr<NewTokens> Next();

 private:
  void Copy(NewTokens* part) const;
  absl::Status CheckValues(const NewTokens& part) const;

  const ModelShape& shape_;
  const NewTokens tokens_;
  const uint64_t part_tokens_;
  uint64_t taken_ = 0;
  std::unique_ptr<std::byte[]> copy_;  // of a part's keys, and values behind them; null: none
  std::vector<float> key_magnitudes_;  // of the part
};

// Cancelled: what NewTokens::kept says no to.
absl::Status NotKept();

// What TokenParts::Next says of the first part that it refuses.
absl::Status CheckTokens(const ModelShape& shape, const NewTokens& tokens);

// The tokens from position `begin` on, which is not before their first, as runs of about equal
// length for threads to take side by side: at most runs_max, which is at least 1. Runs end where
// tail blocks do, and have about a part or more, but for the last. None without tokens.
std::vector<NewTokens> RunsFrom(const ModelShape& shape, const NewTokens& tokens, uint64_t begin,
                                uint32_t runs_max);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_TOKEN_PARTS_H_
