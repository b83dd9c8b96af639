// SPDX-License-Identifier: Apache-2.0
//
// AnswerPlaces, AnswerSignal: where a step's answer goes, and who is told of it.
#ifndef ATTND_GPU_LAYOUT_ANSWER_PLACES_H_
#define ATTND_GPU_LAYOUT_ANSWER_PLACES_H_

#include <cstddef>
#include <cstdint>

namespace attnd::gpu {

// How the host learns that a step has written its answers, before its last kernel has ended and the
// stream is idle. Null: by waiting for the stream.
struct AnswerSignal {
  // In pinned memory, 0 before the step: behind all outputs there kAnswered, or kAnsweredAndTold if
  // AnswerPlaces::turn is written, too.
  uint32_t* answered;
  uint32_t* blocks;  // thread blocks that have answered, and kFlawed; comes with the input, as 0
};
inline constexpr uint32_t kAnswered = 1, kAnsweredAndTold = 2;
// Of AnswerSignal::blocks: some lse is no number.
inline constexpr uint32_t kFlawed = 1u << 31;

// Where the kernels that answer write out, and whom they tell. It comes with the input, with the
// host's own buffers; a step that has taken a client's tokens gets the client's (StepGate).
struct AnswerPlaces {
  std::byte* out;  // [query_tokens][query_heads][value_dim] of StepHeader::out_dtype
  float* lse;      // a second one, beside StepHeader::lse; null: none
  // Once more, in the device's memory: where the client looks if it is told at `turn`. Null: none.
  std::byte* twin_out;
  float* twin_lse;
  // A pair of words that become {epoch, 0} behind out and lse, if the host allows it and every lse
  // is a number; null: the host tells.
  uint64_t* turn;
  uint32_t epoch;
  uint32_t taken;    // 1: these are a client's, whose tokens the step has taken
  uint32_t allowed;  // 1: the host has found these tokens good
  uint32_t reserved;
};
static_assert(sizeof(AnswerPlaces) == 56);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_LAYOUT_ANSWER_PLACES_H_
