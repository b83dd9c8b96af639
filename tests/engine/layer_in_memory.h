// SPDX-License-Identifier: Apache-2.0
//
// LayerInMemory: a layer of a pass whose tensors lie, and whose answer is to lie, in memory that a
// client shares with the engine's backend.
#ifndef ATTND_TESTS_ENGINE_LAYER_IN_MEMORY_H_
#define ATTND_TESTS_ENGINE_LAYER_IN_MEMORY_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "engine/pass.h"
#include "tests/engine/support.h"
#include "tests/shared_pages.h"

namespace attnd::engine::test {

class LayerInMemory {
 public:
  // The message's tensors are there; the client has not rung. final_dtype: of the answer; floats
  // have no place there.
  LayerInMemory(const attention::Backend& backend, const Message& message, DType final_dtype)
      : message_(message),
        pages_(backend,
               BytesOf(message.args.q) + BytesOf(message.args.k) + BytesOf(message.args.v) +
                   OutBytes(message.args, final_dtype) + LanesOf(message.args) * sizeof(float),
               /*pieces=*/7),
        ring_(reinterpret_cast<uint32_t*>(pages_.Take(sizeof(uint32_t)))),
        answer_(reinterpret_cast<uint64_t*>(pages_.Take(sizeof(uint64_t)))) {
    *ring_ = kEpoch - 1;
    layer_.args = message.args;
    layer_.args.final_dtype = final_dtype;
    for (TensorView DecodeArgs::*tensor : {&DecodeArgs::q, &DecodeArgs::k, &DecodeArgs::v}) {
      TensorView& view = layer_.args.*tensor;
      if (view.elements == 0) continue;
      std::byte* const at = pages_.Take(BytesOf(view));
      std::memcpy(at, view.data, BytesOf(view));
      view.data = at;
    }
    layer_.ring = ring_;
    layer_.epoch = kEpoch;
    if (final_dtype == DType::kFp32) return;
    const uint64_t lanes = LanesOf(message.args), out_bytes = OutBytes(message.args, final_dtype);
    layer_.out = {pages_.Take(out_bytes), out_bytes};
    layer_.lse = {reinterpret_cast<float*>(pages_.Take(lanes * sizeof(float))), lanes};
    layer_.answer = answer_;
  }

  // For Pass::PrepareNextLayer; null if nothing maps the memory.
  const ClientLayer* layer() const { return pages_.device_sees() ? &layer_ : nullptr; }

  // The client rings, and the step brings the message. If the client has been told, all that it
  // has is the answer. It is told of no last layer by itself.
  Answer Step(Pass* pass) {
    segments_ = Segments();
    std::atomic_ref(*ring_).store(kEpoch, std::memory_order_release);
    Answer answer;
    DecodeArgs args = message_.args;
    args.final_dtype = layer_.args.final_dtype;
    const auto memory = [&](const AnswerExtents& extents) -> absl::StatusOr<AnswerBuffers> {
      auto buffers = answer.memory(extents);
      if (layer_.out.empty() || !buffers.ok()) return buffers;
      buffers->final_out = layer_.out.first(extents.out_floats() * DTypeBytes(args.final_dtype));
      return buffers;
    };
    answer.status = pass->Step(args, memory, &answer.result);
    const uint64_t told = std::atomic_ref(*answer_).load(std::memory_order_acquire);
    EXPECT_EQ(told, answer.result.told_client ? kEpoch : 0);
    told_ = answer.result.told_client;
    EXPECT_FALSE(told_ && pass->layer() == message_.rows[0].sequence->shape().layers);
    if (told_) ExpectAnswers(answer);
    has_answer_ = layer_.out.data() != nullptr && answer.status.ok() &&
                  std::ranges::all_of(answer.result.rows, [](const DecodeRowResult& row) {
                    return row.status.ok() && row.out_is_final;
                  });
    return answer;
  }

  // Behind Step: whether the engine's backend has left the answer of all rows in the client's
  // memory.
  bool has_answer() const { return has_answer_; }
  // Then: the answer to rows of one token is what the engine answers when it is asked again, unless
  // a new segment has come meanwhile. The lse is there where the client was told.
  void ExpectAsAnsweredAgain(Engine* engine) const {
    std::vector<Row> rows = message_.rows;
    for (Row& row : rows) {
      row.query_only = true;
      row.position += row.query_tokens;
    }
    const Message again(message_.args.layer, rows);
    const Answer answer = Send(engine, again);
    if (Segments() != segments_) return;
    size_t lane = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      const size_t lanes = rows[r].query_tokens * message_.args.q_heads;
      if (rows[r].query_tokens == 1) {
        const RowAnswer row = AnswerOf(again, answer, r);
        const size_t bytes = row.out.size() * DTypeBytes(layer_.args.final_dtype);
        std::vector<std::byte> out(bytes);
        FromFloat(layer_.args.final_dtype, row.out.data(), row.out.size(), out.data());
        EXPECT_EQ(std::memcmp(&layer_.out[lane * (bytes / lanes)], out.data(), bytes), 0) << r;
        if (told_) {
          EXPECT_EQ(std::memcmp(&layer_.lse[lane], row.lse.data(), lanes * sizeof(float)), 0) << r;
        }
      }
      lane += lanes;
    }
  }

 private:
  static constexpr uint32_t kEpoch = 3;

  static uint64_t BytesOf(const TensorView& view) { return view.elements * DTypeBytes(view.dtype); }
  static uint64_t LanesOf(const DecodeArgs& args) { return args.q.elements / args.q_head_dim; }
  static uint64_t OutBytes(const DecodeArgs& args, DType dtype) {
    return LanesOf(args) * args.v_value_dim * DTypeBytes(dtype);
  }
  // Numbers of all rows' sequences, one of which at least changes with their segments.
  std::pair<uint64_t, uint64_t> Segments() const {
    uint64_t tokens = 0, segments = 0;
    for (const Row& row : message_.rows) {
      const auto info = row.sequence->engine->Info(kTenant, row.sequence->id);
      if (!info.ok()) continue;
      tokens += info->segmented_tokens;
      segments += info->segments;
    }
    return {tokens, segments};
  }
  void ExpectAnswers(const Answer& answer) const {
    for (const DecodeRowResult& row : answer.result.rows) {
      EXPECT_TRUE(row.status.ok());
      EXPECT_TRUE(row.out_is_final);
    }
    const std::vector<float>& lse = answer.memory.lse();
    EXPECT_EQ(std::memcmp(layer_.lse.data(), lse.data(), lse.size() * sizeof(float)), 0);
    std::vector<float> out(answer.memory.out().size());
    ToFloat(layer_.args.final_dtype, layer_.out.data(), out.size(), out.data());
    for (const float x : out) ASSERT_TRUE(std::isfinite(x));
  }

  const Message& message_;
  attnd::test::SharedPages pages_;
  uint32_t* const ring_;
  uint64_t* const answer_;
  ClientLayer layer_;
  std::pair<uint64_t, uint64_t> segments_;  // before the step
  bool told_ = false, has_answer_ = false;
};

}  // namespace attnd::engine::test

#endif  // ATTND_TESTS_ENGINE_LAYER_IN_MEMORY_H_
