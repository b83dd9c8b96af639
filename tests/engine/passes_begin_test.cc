// SPDX-License-Identifier: Apache-2.0
//
// Goal: the backend is told each row's own tokens before a layer of a pass is looked at, and only
// where it may have them. Method: a backend that prepares every step, computes nothing ahead, and
// remembers what it is told.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tests/engine/forwarding_backend.h"
#include "tests/engine/passes_support.h"

namespace attnd::engine::test {
namespace {

using absl::StatusCode;
using Bytes = std::vector<std::byte>;

// What was told of one row; nothing of keys and values that are not told.
struct Told {
  Bytes queries, keys, values;
  bool operator==(const Told&) const = default;
};

class TellingBackend : public ForwardingBackend {
 public:
  // Of the steps that have begun.
  std::vector<std::vector<Told>> begun;
  int given_up = 0;
  bool begins = true;

  std::unique_ptr<attention::PreparedStep> Prepare(const attention::StepRequest& request) override {
    return std::make_unique<Prepared>(this, request);
  }

 private:
  class Prepared : public attention::PreparedStep {
   public:
    Prepared(TellingBackend* backend, const attention::StepRequest& request)
        : backend_(backend), rows_(request.rows.begin(), request.rows.end()) {}
    void GiveUp() override { ++backend_->given_up; }
    bool Begin(std::span<const attention::RowTokens> tokens) override {
      begun_ = backend_->begins;
      if (begun_) backend_->begun.push_back(ToldOf(tokens));
      return begun_;
    }
    bool HasBegunWith(std::span<const attention::RowTokens> tokens) override {
      EXPECT_TRUE(begun_);
      return backend_->begun.back() == ToldOf(tokens);
    }

   private:
    std::vector<Told> ToldOf(std::span<const attention::RowTokens> tokens) const {
      EXPECT_EQ(tokens.size(), rows_.size());
      std::vector<Told> told;
      for (size_t i = 0; i < rows_.size(); ++i) {
        const ModelShape& shape = rows_[i].view->shape;
        const size_t n = rows_[i].query_tokens, bytes = DTypeBytes(shape.dtype);
        const auto copy = [](const std::byte* from, size_t size) {
          return from == nullptr ? Bytes() : Bytes(from, from + size);
        };
        told.push_back({copy(tokens[i].queries, n * shape.query_heads * shape.head_dim *
                                                    DTypeBytes(rows_[i].query_dtype)),
                        copy(tokens[i].keys, n * shape.kv_heads * shape.head_dim * bytes),
                        copy(tokens[i].values, n * shape.kv_heads * shape.value_dim * bytes)});
      }
      return told;
    }

    TellingBackend* const backend_;
    const std::vector<attention::StepRow> rows_;
    bool begun_ = false;
  };
};

Told Of(const Row& row) {
  const auto bytes = [](const Numbers& numbers) {
    const TensorView view = numbers.view();
    return Bytes(view.data, view.data + view.elements * DTypeBytes(view.dtype));
  };
  if (row.query_only) return {bytes(row.q), {}, {}};
  return {bytes(row.q), bytes(row.kv.k), bytes(row.kv.v)};
}

class PassesBegin : public testing::Test {
 protected:
  // A pass over these rows of each layer, each prepared; the first one only if it is expected.
  std::vector<Answer> Run(const Layers& layers, bool expected = false) {
    std::vector<Answer> answers;
    const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
    if (expected) pass->ExpectFirstLayer(layers[0]->args);
    EXPECT_EQ(pass->PrepareNextLayer(), expected);
    for (const auto& message : layers) {
      answers.push_back(StepOf(pass.get(), *message));
      if (pass->layer() < layers.size()) pass->PrepareNextLayer();
    }
    pass->ForgetNextLayer();
    return answers;
  }

  // Rows of several tokens, and one in their middle that appends none.
  Layers LayersWithAReader() {
    Generate(&reader_, 5, &random_);
    Layers layers;
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      layers.push_back(std::make_unique<Message>(
          layer, std::vector<Row>{NextRow(&first_, layer, 2, &random_),
                                  QueryOnlyRow(&reader_, layer, 3, &random_),
                                  NextRow(&last_, layer, 1, &random_)}));
    }
    telling_->begun.clear();
    return layers;
  }

  Random random_{TestSeed()};
  const testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(TestSeed())};
  TellingBackend* telling_ = new TellingBackend;
  std::unique_ptr<Engine> engine_ = *Engine::Create(
      SmallOptions(), std::unique_ptr<attention::Backend>(telling_), /*observer=*/nullptr);
  const ModelShape shape_ = MakeShape(3, 4, 2, 32, 16, DType::kBf16);
  TestSequence first_ = OpenSequence(engine_.get(), shape_);
  TestSequence reader_ = OpenSequence(engine_.get(), shape_);
  TestSequence last_ = OpenSequence(engine_.get(), shape_);
};

TEST_F(PassesBegin, WithEachRowsTokens) {
  const Layers layers = LayersWithAReader();
  for (const Answer& answer : Run(layers)) ASSERT_TRUE(answer.status.ok()) << answer.status;
  ASSERT_EQ(telling_->begun.size(), 2u) << "but for the first layer";
  for (uint32_t layer = 1; layer < shape_.layers; ++layer) {
    const std::vector<Told>& told = telling_->begun[layer - 1];
    ASSERT_EQ(told.size(), 3u);
    for (size_t row = 0; row < 3; ++row) {
      EXPECT_EQ(told[row], Of(layers[layer]->rows[row])) << "layer " << layer << ", row " << row;
    }
  }
}

// A first layer, too, if it is expected: its rows are those that were declared.
TEST_F(PassesBegin, TheFirstLayerThatIsExpected) {
  const Layers layers = LayersWithAReader();
  for (const Answer& answer : Run(layers, /*expected=*/true)) {
    ASSERT_TRUE(answer.status.ok()) << answer.status;
  }
  ASSERT_EQ(telling_->begun.size(), shape_.layers);
  ASSERT_EQ(telling_->begun[0].size(), 3u);
  for (size_t row = 0; row < 3; ++row) {
    EXPECT_EQ(telling_->begun[0][row], Of(layers[0]->rows[row])) << "row " << row;
  }
}

// A row that leaves a gap is out of the pass, and of what is expected.
TEST_F(PassesBegin, ThoseOfAFirstLayersRowsThatAreInThePass) {
  Layers layers = NextPass({&first_, &last_}, 1, &random_);
  for (auto& message : layers) {
    std::vector<Row> rows = message->rows;
    rows[0].position += 7;
    message = std::make_unique<Message>(message->args.layer, rows);
  }
  const std::vector<Answer> answers = Run(layers, /*expected=*/true);
  EXPECT_EQ(answers[0].row_status(0).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(answers[0].row_status(1).ok());
  ASSERT_EQ(telling_->begun.size(), shape_.layers);
  ASSERT_EQ(telling_->begun[0].size(), 1u);
  EXPECT_EQ(telling_->begun[0][0], Of(layers[0]->rows[1]));
}

// Nothing is expected of a row that is repeated, or comes where tokens were given up.
TEST_F(PassesBegin, NoFirstLayerWithTokensThatAreThere) {
  const auto expected = [&](const Layers& layers) {
    const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
    pass->ExpectFirstLayer(layers[0]->args);
    const bool prepared = pass->PrepareNextLayer();
    if (prepared) StepOf(pass.get(), *layers[0]);
    return prepared;
  };
  const Layers layers = NextPass({&first_, &last_}, 1, &random_);
  EXPECT_TRUE(expected(layers)) << "then given up";
  EXPECT_FALSE(expected(layers)) << "given up";
  Run(layers);
  EXPECT_FALSE(expected(layers)) << "repeated";
}

// The device plans by a sequence's shape what it reads of the tensors, before anything has been
// looked at: a declaration whose tensors are others is not prepared.
TEST_F(PassesBegin, NoFirstLayerOfOtherTensors) {
  const Layers layers = NextPass({&first_, &last_}, 2, &random_);
  const std::pair<const char*, std::function<void(DecodeArgs*)>> changes[] = {
      {"no v", [](DecodeArgs* args) { args->v = {}, args->v_heads = args->v_value_dim = 0; }},
      {"q of one number",
       [](DecodeArgs* args) { args->q.elements = args->q_heads = args->q_head_dim = 1; }},
      {"q of fewer tokens", [](DecodeArgs* args) { args->q.elements /= 2; }},
      {"q of other heads", [](DecodeArgs* args) { args->q_heads /= 2, args->q_head_dim *= 2; }},
      {"k of fewer tokens", [](DecodeArgs* args) { args->k.elements /= 2; }},
      {"k of another dtype", [](DecodeArgs* args) { args->k.dtype = DType::kFp16; }},
      {"v of another width",
       [](DecodeArgs* args) { args->v_value_dim /= 2, args->v.elements /= 2; }},
  };
  for (const auto& [what, change] : changes) {
    DecodeArgs args = layers[0]->args;
    change(&args);
    const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
    pass->ExpectFirstLayer(args);
    EXPECT_FALSE(pass->PrepareNextLayer()) << what;
  }
  const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
  pass->ExpectFirstLayer(layers[0]->args);
  EXPECT_TRUE(pass->PrepareNextLayer());
}

// A truncation behind the declaration takes the block that the tokens would go to.
TEST_F(PassesBegin, NoFirstLayerWithoutRoomForItsTokens) {
  Generate(&first_, attention::kTailBlockTokens, &random_);
  const Layers layers = NextPass({&first_}, 1, &random_);
  const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
  ASSERT_TRUE(engine_->Truncate(kTenant, first_.id, attention::kTailBlockTokens).ok());
  pass->ExpectFirstLayer(layers[0]->args);
  EXPECT_FALSE(pass->PrepareNextLayer());
  EXPECT_TRUE(StepOf(pass.get(), *layers[0]).row_status(0).ok());
}

// What others may read, and bring to a device, is not replaced by what may be other tokens.
TEST_F(PassesBegin, NotWithTokensThatAreThere) {
  const Layers layers = NextPass({&first_, &last_}, 1, &random_);
  Run(layers);
  EXPECT_EQ(telling_->begun.size(), 2u);
  telling_->begun.clear();
  for (const Answer& answer : Run(layers)) EXPECT_TRUE(answer.row_status(1).ok());
  EXPECT_TRUE(telling_->begun.empty());
}

// Nor where a pass that was given up has left some: a view of them may still be read.
TEST_F(PassesBegin, NotWhereTokensWereGivenUp) {
  Layers layers = NextPass({&first_}, 1, &random_);
  {
    const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
    for (int layer = 0; layer < 2; ++layer) StepOf(pass.get(), *layers[layer]);
    pass->ForgetNextLayer();
  }
  layers[1] = std::make_unique<Message>(1, std::vector<Row>{NextRow(&first_, 1, 1, &random_)});
  telling_->begun.clear();
  for (const Answer& answer : Run(layers)) EXPECT_TRUE(answer.row_status(0).ok());
  ASSERT_EQ(telling_->begun.size(), 1u);
  EXPECT_EQ(telling_->begun[0][0], Of(layers[2]->rows[0]));
}

// Memory that the client writes may have changed since: what the step brings is answered, and what
// has begun is given up.
TEST_F(PassesBegin, WhatHasBegunWithOtherTokensIsGivenUp) {
  const Layers layers = NextPass({&first_, &last_}, 1, &random_);
  std::vector<Row> rows = layers[1]->rows;
  rows[1].q.Set(3, 77.0f);
  const Message other(1, rows);
  const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
  StepOf(pass.get(), *layers[0]);
  ASSERT_TRUE(pass->PrepareNextLayer());
  pass->BeginNextLayer(other.args);
  const Answer answer = StepOf(pass.get(), *layers[1]);
  ASSERT_TRUE(answer.status.ok());
  EXPECT_TRUE(answer.row_status(1).ok());
  EXPECT_EQ(telling_->begun.size(), 1u) << "once alone";
  EXPECT_EQ(telling_->given_up, 1);
}

// What the backend did not begin with is not asked about.
TEST_F(PassesBegin, ABackendMayBeginLater) {
  telling_->begins = false;
  for (const Answer& answer : Run(NextPass({&first_}, 1, &random_))) {
    EXPECT_TRUE(answer.row_status(0).ok());
  }
  EXPECT_EQ(telling_->given_up, 0);
}

// A step of which no row is left is given up before its answer: others may append in their places.
TEST_F(PassesBegin, WhatNoRowIsLeftOfIsGivenUp) {
  Layers layers = NextPass({&first_}, 1, &random_);
  std::vector<Row> rows = layers[1]->rows;
  rows[0].q.Set(0, std::nanf(""));
  layers[1] = std::make_unique<Message>(1, rows);
  const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
  StepOf(pass.get(), *layers[0]);
  ASSERT_TRUE(pass->PrepareNextLayer());
  EXPECT_EQ(StepOf(pass.get(), *layers[1]).row_status(0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(telling_->begun.size(), 1u);
  EXPECT_EQ(telling_->given_up, 1);
}

// A row that is refused has begun, and is out of the layers behind.
TEST_F(PassesBegin, WithoutRowsThatAreRefused) {
  Layers layers = NextPass({&first_, &last_}, 1, &random_);
  std::vector<Row> rows = layers[1]->rows;
  rows[0].q.Set(0, std::nanf(""));
  layers[1] = std::make_unique<Message>(1, rows);
  const std::vector<Answer> answers = Run(layers);
  EXPECT_EQ(answers[1].row_status(0).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(answers[2].row_status(1).ok());
  ASSERT_EQ(telling_->begun.size(), 2u);
  EXPECT_EQ(telling_->begun[0].size(), 2u);
  ASSERT_EQ(telling_->begun[1].size(), 1u);
  EXPECT_EQ(telling_->begun[1][0], Of(layers[2]->rows[1]));
}

// Tensors of another type or extent than the layer before had are looked at first.
TEST_F(PassesBegin, NotWithOtherTensors) {
  Layers layers = NextPass({&first_}, 1, &random_);
  layers[1]->args.q.dtype = DType::kBf16;
  layers[2]->args.q_heads *= 2;
  Run(layers);
  EXPECT_TRUE(telling_->begun.empty());
}

}  // namespace
}  // namespace attnd::engine::test
