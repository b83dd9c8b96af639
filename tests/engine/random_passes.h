// SPDX-License-Identifier: Apache-2.0
//
// RandomPasses: histories of passes that are completed, given up, replayed, spoiled and cut, each
// compared with a plain model.
#ifndef ATTND_TESTS_ENGINE_RANDOM_PASSES_H_
#define ATTND_TESTS_ENGINE_RANDOM_PASSES_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/engine/layer_in_memory.h"
#include "tests/engine/passes_support.h"

namespace attnd::engine::test {

class RandomPasses {
 public:
  RandomPasses(Engine* engine, const ModelShape& shape, Random* random)
      : engine_(engine), random_(random) {
    for (int i = 0; i < 3; ++i) sequences_.push_back(OpenSequence(engine, shape));
  }

  // Called ahead of each layer of a pass, if not empty. client: where the layer will be, for
  // PrepareNextLayer; null if the backend maps no memory.
  std::function<void(Pass*, const ClientLayer* client)> before_layer;
  // How many passes were given up, were replays of such, had a spoiled row; truncations; layers of
  // which the client was told.
  int given_up = 0, replays = 0, failed = 0, cut = 0, told = 0;

  // Ends at the first event behind which a sequence is not its model.
  void Run(int events) {
    for (int event = 0; event < events && !testing::Test::HasFatalFailure(); ++event) {
      SCOPED_TRACE(testing::Message() << "event " << event);
      RunPass();
    }
  }

 private:
  void RunPass() {
    std::vector<TestSequence*> chosen;
    for (TestSequence& sequence : sequences_) {
      if (chosen.empty() || random_->Below(2) == 0) chosen.push_back(&sequence);
    }
    const uint32_t tokens =
        1 + static_cast<uint32_t>(random_->Below(random_->Below(8) == 0 ? 90 : 3));
    const bool replay = !last_.empty() && random_->Below(2) == 0;
    const Layers layers = replay ? std::move(last_) : NextPass(chosen, tokens, random_);
    last_.clear();
    replays += replay;
    const size_t rows = layers[0]->rows.size();
    const uint32_t end = random_->Below(3) == 0
                             ? static_cast<uint32_t>(random_->Below(layers.size()))
                             : static_cast<uint32_t>(layers.size());
    const bool spoil = end == layers.size() && !replay && random_->Below(4) == 0;
    const size_t bad_row = random_->Below(rows), bad_layer = random_->Below(layers.size());
    std::unique_ptr<Pass> pass = Begin(engine_, layers);
    const DType final_dtype = random_->Below(2) == 0 ? DType::kFp32 : DType::kBf16;
    DecodeArgs like = layers[0]->args;
    like.final_dtype = final_dtype;
    if (before_layer != nullptr) pass->ExpectFirstLayer(like);
    for (uint32_t layer = 0; layer < end; ++layer) {
      Message& message = *layers[layer];
      std::vector<Row> sent = message.rows;
      if (spoil && layer == bad_layer) sent[bad_row].q.Set(0, std::nanf(""));
      const Message spoiled(layer, sent);
      LayerInMemory memory(engine_->backend(), spoiled, final_dtype);
      if (before_layer != nullptr) before_layer(pass.get(), memory.layer());
      const Answer answer = memory.Step(pass.get());
      told += answer.result.told_client ? 1 : 0;
      if (memory.has_answer()) memory.ExpectAsAnsweredAgain(engine_);
      ASSERT_TRUE(answer.status.ok()) << answer.status;
      for (size_t i = 0; i < rows; ++i) {
        const bool out = spoil && i == bad_row && layer >= bad_layer;
        EXPECT_EQ(answer.row_status(i).code(),
                  out ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kOk)
            << answer.row_status(i);
      }
    }
    if (end == layers.size()) {
      EXPECT_EQ(pass->layer(), end);
      for (size_t i = 0; i < rows; ++i) {
        if (!spoil || i != bad_row) Keep(layers, i);
      }
      failed += spoil;
    } else {
      ++given_up;
    }
    pass.reset();
    for (TestSequence& sequence : sequences_) {
      ASSERT_TRUE(MatchesModel(&sequence, random_)) << "sequence " << sequence.id;
    }
    if (end < layers.size()) {
      // Kept for a replay, unless something comes in between.
      for (const auto& message : layers) {
        last_.push_back(std::make_unique<Message>(message->args.layer, message->rows));
      }
    }
    if (Changes(&sequences_[random_->Below(sequences_.size())])) last_.clear();
  }

  // What comes between two passes, if anything. Whether it changes the sequence, so that a pass
  // that was given up cannot be replayed.
  bool Changes(TestSequence* any) {
    switch (random_->Below(12)) {
      case 0: {
        const uint64_t length = random_->Below(any->history.committed() + 1);
        EXPECT_TRUE(engine_->Truncate(kTenant, any->id, length).ok());
        any->history.Truncate(length);
        ++cut;
        return true;
      }
      case 1: {
        const auto fork = engine_->Fork(kTenant, any->id, std::nullopt);
        EXPECT_TRUE(fork.ok());
        TestSequence child(engine_, fork->id, any->shape());
        child.history = any->history;
        EXPECT_TRUE(MatchesModel(&child, random_));
        EXPECT_TRUE(engine_->Close(kTenant, child.id).ok());
        return false;
      }
      case 2:  // single layers, and an upload, where a pass was given up
        Generate(any, 1, random_);
        return true;
      case 3:
        Prefill(any, 1 + random_->Below(70), random_);
        return true;
      default:
        return false;
    }
  }

  Engine* const engine_;
  Random* const random_;
  std::vector<TestSequence> sequences_;
  Layers last_;  // of a pass that was given up
};

}  // namespace attnd::engine::test

#endif  // ATTND_TESTS_ENGINE_RANDOM_PASSES_H_
