// SPDX-License-Identifier: Apache-2.0
//
// Pass: a model's forward pass over some rows: a step of each layer, of which each row's tokens are
// appended to all layers or to none.
#ifndef ATTND_ENGINE_PASS_H_
#define ATTND_ENGINE_PASS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "engine/answer_memory.h"
#include "engine/types.h"

namespace attnd::engine {

// Where a client's memory will have the next layer's tensors, and is to have its answer, which
// overlaps none of these. The engine's backend has mapped it (Backend::MapMemory), and
// attention::ClientTurn says what it does there.
struct ClientLayer {
  DecodeArgs args;  // their data may change at any time
  const uint32_t* ring = nullptr;
  uint32_t epoch = 0;
  // AnswerBuffers::final_out of the step; empty: it has none. Of a greater answer the caller learns
  // by the step.
  std::span<std::byte> out = {};
  std::span<float> lse = {};  // beside AnswerBuffers::lse; empty: not wanted
  uint64_t* answer = nullptr;
  // ClientTurn's.
  const std::byte* memory = nullptr;
  std::byte* memory_twin = nullptr;
};

// Made by Engine::BeginPass, which has checked the rows, and reserved memory for their tokens and
// for the answers of each layer. For one thread at a time; ends before its engine and before
// Engine::ReleaseWriter of its writer.
//
//   layer 0 --Step--> layer 1 --Step--> ... last layer --Step--> complete
//   any layer --Step fails as a whole--> given up
//
// A row that fails leaves the pass: what the pass has appended for the row is taken back, and the
// row has the same status in each later step. A row is committed by the step of the last layer. The
// destructor gives up a pass that is not complete: nothing of it stays.
class Pass {
 public:
  virtual ~Pass() = default;
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  // The layer of the next step; the number of layers if the pass is complete.
  virtual uint32_t layer() const = 0;

  // Answers the next layer of a pass that is neither complete nor given up, as Engine::Decode does
  // with args of this layer and these rows. `args` has the tensors, deadline and cancelled; its
  // layer and rows are of no meaning.
  virtual absl::Status Step(const DecodeArgs& args, AnswerMemory memory, DecodeResult* result) = 0;

  // What can be done for the next layer in the time that the model takes for its queries. After
  // each step, and after ExpectFirstLayer, one of PrepareNextLayer and ForgetNextLayer is called,
  // soon: until then the pass keeps the sequences of its rows.

  // Before the first step: what its tensors will be like, whose data nobody reads yet. Without it
  // PrepareNextLayer has nothing to get ready there.
  virtual void ExpectFirstLayer(const DecodeArgs& like) = 0;

  // Asks the processor for the memory that the next layer's tokens go to, which nothing has touched
  // since the token before.
  virtual void WarmNextLayer() = 0;
  // Has the backend get ready for the next layer, which is expected at once (Backend::Prepare).
  // Whether there is anything that the next step or ForgetNextLayer takes. client: where a device
  // may take the layer's turn by itself, from here on until one of the two; may be null. Step then
  // looks whether it has begun with the tensors that Step brings, and answers these in any case.
  virtual bool PrepareNextLayer(const ClientLayer* client) = 0;
  // Gives up what has been got ready, as the next layer takes its time.
  virtual void ForgetNextLayer() = 0;

 protected:
  Pass() = default;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_PASS_H_
