// SPDX-License-Identifier: Apache-2.0
//
// AnswerMemory: whose memory a step's answer is written to. It is the caller's: the backend writes
// each output where the caller wants it, and the engine keeps no copy.
#ifndef ATTND_ENGINE_ANSWER_MEMORY_H_
#define ATTND_ENGINE_ANSWER_MEMORY_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

namespace attnd::engine {

// How large a step's answer is. The counts of floats below do not overflow: Engine::Decode checks
// the products before it asks for memory.
struct AnswerExtents {
  uint64_t query_tokens = 0;  // of all rows together
  uint64_t query_heads = 0;
  uint64_t value_dim = 0;  // 0 if no row was accepted

  uint64_t lse_floats() const { return query_tokens * query_heads; }
  uint64_t out_floats() const { return lse_floats() * value_dim; }
};

// Memory for one answer, in extents.out_floats() and extents.lse_floats() elements.
struct AnswerBuffers {
  std::span<float> out;  // [query_tokens, query_heads, value_dim]
  std::span<float> lse;  // [query_tokens, query_heads]
  // Of DecodeArgs::final_dtype; empty if that is kFp32. A backend that can writes a row's out here
  // in place of `out` (DecodeRowResult::out_is_final). Others leave it as it is.
  std::span<std::byte> final_out = {};  // [query_tokens, query_heads, value_dim]
  // Every element of out and lse is NaN: the caller has had the time to write them.
  bool blank = false;
};

// Gives the memory of a step's answer. Engine::Decode calls it at most once, on the thread that
// called Decode: after the rows have been checked and the memory budget has reserved the answer's
// bytes, before the backend runs. The buffers stay the caller's and must live until Decode returns.
// A status ends the step, as std::bad_alloc does; the step's tokens may have been appended then.
using AnswerMemory = absl::FunctionRef<absl::StatusOr<AnswerBuffers>(const AnswerExtents&)>;

// An AnswerMemory for callers who know how large the answer may be: memory of theirs, of which the
// answer takes the front. InvalidArgument if the answer is larger.
class AnswerSpans {
 public:
  explicit AnswerSpans(const AnswerBuffers& buffers) : buffers_(buffers) {}
  absl::StatusOr<AnswerBuffers> operator()(const AnswerExtents& extents) const;

 private:
  const AnswerBuffers buffers_;
};

// An AnswerMemory for callers who have none: vectors, which keep the last answer.
class AnswerVectors {
 public:
  absl::StatusOr<AnswerBuffers> operator()(const AnswerExtents& extents) const;
  const std::vector<float>& out() const { return out_; }
  const std::vector<float>& lse() const { return lse_; }

 private:
  // Mutable, as absl::FunctionRef calls const objects alone.
  mutable std::vector<float> out_;
  mutable std::vector<float> lse_;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ANSWER_MEMORY_H_
