// SPDX-License-Identifier: Apache-2.0
//
// What tests of passes share: random messages of a pass, and its steps.
#ifndef ATTND_TESTS_ENGINE_PASSES_SUPPORT_H_
#define ATTND_TESTS_ENGINE_PASSES_SUPPORT_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tests/engine/support.h"

namespace attnd::engine::test {

// The messages of a pass, one for each layer.
using Layers = std::vector<std::unique_ptr<Message>>;

// Random next tokens of a row, alike in number and position in all layers.
inline Layers NextPass(const std::vector<TestSequence*>& sequences, uint32_t tokens,
                       Random* random) {
  Layers layers;
  for (uint32_t layer = 0; layer < sequences[0]->shape().layers; ++layer) {
    std::vector<Row> rows;
    for (TestSequence* sequence : sequences) {
      rows.push_back(NextRow(sequence, layer, tokens, random));
      rows.back().position = sequence->history.committed();
    }
    layers.push_back(std::make_unique<Message>(layer, rows));
  }
  return layers;
}

inline std::unique_ptr<Pass> Begin(Engine* engine, const Layers& layers,
                                   WriterId writer = kWriter) {
  auto pass = engine->BeginPass(kTenant, writer, layers[0]->decode_rows,
                                static_cast<uint32_t>(layers.size()));
  EXPECT_TRUE(pass.ok()) << pass.status();
  return *std::move(pass);
}

inline Answer StepOf(Pass* pass, const Message& message) {
  Answer answer;
  EXPECT_EQ(pass->layer(), message.args.layer);
  answer.status = pass->Step(message.args, answer.memory, &answer.result);
  return answer;
}

// What a complete pass leaves in the models of the rows that are OK.
inline void Keep(const Layers& layers, size_t row) {
  for (const auto& message : layers) {
    const Row& sent = message->rows[row];
    History& history = sent.sequence->history;
    const uint64_t length = history.layers[message->args.layer].tokens;
    if (length == sent.position) history.Append(message->args.layer, sent.kv);
  }
}

}  // namespace attnd::engine::test

#endif  // ATTND_TESTS_ENGINE_PASSES_SUPPORT_H_
