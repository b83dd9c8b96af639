// SPDX-License-Identifier: Apache-2.0
//
// Goal: the backend finds each row's own tokens in the client's memory before a layer of a pass is
// looked at, and only where it may take them. Method: a backend that prepares every step, computes
// nothing ahead, and remembers what it takes; the client's memory is each layer's message.
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
  // Of the steps that have begun: their tokens, when they were asked about.
  std::vector<std::vector<Told>> begun;
  int given_up = 0;
  bool takes_turns = true;
  bool tells = false;  // clients, of each step that has begun
  absl::Status fails;  // what Step returns behind that; OK: it answers
  // What the client changes before the device takes it; may be null.
  std::function<void(std::vector<Told>*)> change;
  attention::ClientTurn turn;  // of the last Prepare that had one

  std::unique_ptr<attention::PreparedStep> Prepare(const attention::StepRequest& request,
                                                   const attention::ClientTurn* client) override {
    if (client != nullptr) turn = *client;
    return std::make_unique<Prepared>(this, request, client);
  }
  absl::Status Step(const attention::StepRequest& request) override {
    return fails.ok() ? ForwardingBackend::Step(request) : fails;
  }

 private:
  class Prepared : public attention::PreparedStep {
   public:
    Prepared(TellingBackend* backend, const attention::StepRequest& request,
             const attention::ClientTurn* turn)
        : backend_(backend),
          rows_(request.rows.begin(), request.rows.end()),
          takes_turn_(turn != nullptr && backend->takes_turns) {
      if (takes_turn_) tokens_.assign(turn->tokens.begin(), turn->tokens.end());
    }
    void GiveUp() override {
      ++backend_->given_up;
      given_up_ = true;
    }
    bool takes_turn() const override { return takes_turn_; }
    bool HasBegunWith(std::span<const attention::RowTokens> tokens) override {
      EXPECT_TRUE(takes_turn_);
      std::vector<Told> taken = ToldOf(tokens_);
      if (backend_->change != nullptr) backend_->change(&taken);
      backend_->begun.push_back(taken);
      return taken == ToldOf(tokens);
    }
    bool has_told() const override { return takes_turn_ && backend_->tells && !given_up_; }

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
    const bool takes_turn_;
    bool given_up_ = false;
    std::vector<attention::RowTokens> tokens_;  // the client's
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
  void SetUp() override {
    for (TestSequence* sequence : {&first_, &last_}) Generate(sequence, 1, &random_);
  }

  // A pass over these rows of each layer, each prepared; the first one only if it is expected.
  std::vector<Answer> Run(const Layers& layers, bool expected = false) {
    std::vector<Answer> answers;
    const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
    if (expected) pass->ExpectFirstLayer(layers[0]->args);
    EXPECT_EQ(PrepareWith(pass.get(), *layers[0]), expected);
    for (const auto& message : layers) {
      answers.push_back(StepOf(pass.get(), *message));
      if (pass->layer() < layers.size()) PrepareWith(pass.get(), *layers[pass->layer()]);
    }
    pass->ForgetNextLayer();
    return answers;
  }

  // Where the client has the message.
  bool PrepareWith(Pass* pass, const Message& message) {
    const ClientLayer client = {.args = message.args, .ring = &ring_, .epoch = 5};
    return pass->PrepareNextLayer(&client);
  }

  // A step whose answer is wanted in bf16.
  static Answer FinalStep(Pass* pass, const Message& message) {
    Answer answer;
    DecodeArgs args = message.args;
    args.final_dtype = DType::kBf16;
    std::vector<std::byte> places;
    const auto memory = [&](const AnswerExtents& extents) {
      auto buffers = answer.memory(extents);
      places.resize(extents.out_floats() * DTypeBytes(args.final_dtype));
      buffers->final_out = places;
      return buffers;
    };
    answer.status = pass->Step(args, memory, &answer.result);
    return answer;
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

  const uint32_t ring_ = 5;
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
    const bool prepared = PrepareWith(pass.get(), *layers[0]);
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
    EXPECT_FALSE(PrepareWith(pass.get(), *layers[0])) << what;
  }
  const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
  pass->ExpectFirstLayer(layers[0]->args);
  EXPECT_TRUE(PrepareWith(pass.get(), *layers[0]));
}

// A truncation behind the declaration takes the block that the tokens would go to.
TEST_F(PassesBegin, NoFirstLayerWithoutRoomForItsTokens) {
  Generate(&first_, attention::kTailBlockTokens - 1, &random_);
  const Layers layers = NextPass({&first_}, 1, &random_);
  const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
  ASSERT_TRUE(engine_->Truncate(kTenant, first_.id, attention::kTailBlockTokens).ok());
  pass->ExpectFirstLayer(layers[0]->args);
  EXPECT_FALSE(PrepareWith(pass.get(), *layers[0]));
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

// Nor in a stream's first layer: until it has appended, another stream may come first, whose tokens
// would be at the same places.
TEST_F(PassesBegin, NotBeforeItIsKnownWhoAppends) {
  constexpr WriterId kOther = kWriter + 1;
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  const Layers layers = NextPass({&sequence}, 1, &random_);
  const std::unique_ptr<Pass> late = test::Begin(engine_.get(), layers, kOther);
  late->ExpectFirstLayer(layers[0]->args);
  ASSERT_TRUE(PrepareWith(late.get(), *layers[0]));
  Run(layers, /*expected=*/true);
  EXPECT_EQ(StepOf(late.get(), *layers[0]).row_status(0).code(), StatusCode::kAborted);
  EXPECT_EQ(telling_->begun.size(), 2u) << "but for both first layers";
}

// The client's memory may have been another when the device took it: what the step brings is
// answered, and what has begun is given up. It is not tried again in this pass.
TEST_F(PassesBegin, WhatHasBegunWithOtherTokensIsGivenUp) {
  const Layers layers = NextPass({&first_, &last_}, 1, &random_);
  telling_->change = [](std::vector<Told>* begun) { (*begun)[1].queries[3] ^= std::byte{1}; };
  telling_->tells = true;
  const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
  StepOf(pass.get(), *layers[0]);
  ASSERT_TRUE(PrepareWith(pass.get(), *layers[1]));
  const Answer answer = StepOf(pass.get(), *layers[1]);
  ASSERT_TRUE(answer.status.ok());
  EXPECT_TRUE(answer.row_status(1).ok());
  EXPECT_FALSE(answer.result.told_client);
  EXPECT_EQ(telling_->begun.size(), 1u) << "once alone";
  EXPECT_EQ(telling_->given_up, 1);
  ASSERT_TRUE(PrepareWith(pass.get(), *layers[2]));
  EXPECT_TRUE(StepOf(pass.get(), *layers[2]).row_status(1).ok());
  EXPECT_EQ(telling_->begun.size(), 1u);
}

// What takes no turn is not asked about: a backend may begin later, and a caller have no client.
TEST_F(PassesBegin, ABackendMayBeginLater) {
  telling_->takes_turns = false;
  for (const Answer& answer : Run(NextPass({&first_}, 1, &random_))) {
    EXPECT_TRUE(answer.row_status(0).ok());
  }
  telling_->takes_turns = true;
  const Layers layers = NextPass({&last_}, 1, &random_);
  const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
  for (const auto& message : layers) {
    EXPECT_TRUE(StepOf(pass.get(), *message).row_status(0).ok());
    EXPECT_EQ(pass->PrepareNextLayer(nullptr), pass->layer() < layers.size());
  }
  EXPECT_TRUE(telling_->begun.empty());
  EXPECT_EQ(telling_->given_up, 0);
}

// A device may answer in the client's memory where all rows do, and not in floats; who was told is
// in the result of that layer alone.
TEST_F(PassesBegin, TheAnswersPlaceIsTheClients) {
  const uint64_t lanes = uint64_t{2} * shape_.query_heads;
  std::vector<std::byte> out(lanes * shape_.value_dim * DTypeBytes(DType::kBf16));
  std::vector<float> lse(lanes);
  uint64_t answer = 0;
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    const Layers layers = NextPass({&first_, &last_}, 1, &random_);
    const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
    telling_->tells = false;
    const auto step = [&](const Message& message) {
      return dtype == DType::kFp32 ? StepOf(pass.get(), message) : FinalStep(pass.get(), message);
    };
    EXPECT_FALSE(step(*layers[0]).result.told_client);
    ClientLayer client = {.args = layers[1]->args, .ring = &ring_, .epoch = 9};
    client.args.final_dtype = dtype;
    client.out = out;
    client.lse = lse;
    client.answer = &answer;
    ASSERT_TRUE(pass->PrepareNextLayer(&client));
    const attention::ClientTurn& turn = telling_->turn;
    EXPECT_EQ(turn.ring, &ring_);
    EXPECT_EQ(turn.epoch, 9u);
    const bool there = dtype == DType::kBf16;
    EXPECT_EQ(turn.out, there ? out.data() : nullptr);
    EXPECT_EQ(turn.lse, there ? lse.data() : nullptr);
    EXPECT_EQ(turn.answer, there ? &answer : nullptr);
    telling_->tells = there;
    EXPECT_EQ(step(*layers[1]).result.told_client, there);
    telling_->tells = false;
    client.args = layers[2]->args;
    client.args.final_dtype = dtype;
    ASSERT_TRUE(pass->PrepareNextLayer(&client));
    EXPECT_EQ(telling_->turn.out, there ? out.data() : nullptr);
    EXPECT_EQ(telling_->turn.answer, nullptr) << "the last layer's answer commits the tokens";
    EXPECT_FALSE(step(*layers[2]).result.told_client);
    for (const size_t row : {0, 1}) Keep(layers, row);
  }
}

// What the client has room for was checked before the sequences could be asked what they answer.
TEST_F(PassesBegin, NotInTooSmallAPlace) {
  const uint64_t lanes = shape_.query_heads;
  std::vector<std::byte> out(lanes * shape_.value_dim * DTypeBytes(DType::kBf16));
  std::vector<float> lse(lanes);
  const Layers layers = NextPass({&first_}, 1, &random_);
  for (const auto& message : layers) message->args.final_dtype = DType::kBf16;
  const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
  pass->ExpectFirstLayer(layers[0]->args);
  const auto has_place = [&](size_t out_bytes, size_t lse_floats) {
    ClientLayer client = {.args = layers[0]->args, .ring = &ring_, .epoch = 9};
    client.out = std::span(out).first(out_bytes);
    client.lse = std::span(lse).first(lse_floats);
    EXPECT_TRUE(pass->PrepareNextLayer(&client));
    return telling_->turn.out != nullptr;
  };
  EXPECT_TRUE(has_place(out.size(), lanes));
  EXPECT_TRUE(has_place(out.size(), 0)) << "lse is not wanted";
  EXPECT_FALSE(has_place(out.size() - 1, lanes));
  EXPECT_FALSE(has_place(out.size(), lanes - 1));
}

// A row that has left the pass has a place in the client's out, and none in the step's.
TEST_F(PassesBegin, NotWhereARowHasLeft) {
  for (const bool leaves : {false, true}) {
    Layers layers = NextPass({&first_, &last_}, 1, &random_);
    if (leaves) {
      std::vector<Row> rows = layers[0]->rows;
      rows[0].q.Set(0, std::nanf(""));
      layers[0] = std::make_unique<Message>(0, rows);
    }
    const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
    FinalStep(pass.get(), *layers[0]);
    std::byte out[1024];
    ClientLayer client = {.args = layers[1]->args, .ring = &ring_, .epoch = 9};
    client.args.final_dtype = DType::kBf16;
    client.out = out;
    telling_->turn = {};
    ASSERT_TRUE(pass->PrepareNextLayer(&client));
    EXPECT_EQ(telling_->turn.epoch, 9u);
    EXPECT_EQ(telling_->turn.out, leaves ? nullptr : out);
  }
}

// A device that fails when the client may have its answer: the pass is over, and what it had
// appended is taken back.
TEST_F(PassesBegin, AFailureBehindAnAnswerEndsThePass) {
  const Layers layers = NextPass({&first_}, 1, &random_);
  const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
  StepOf(pass.get(), *layers[0]);
  ASSERT_TRUE(PrepareWith(pass.get(), *layers[1]));
  telling_->fails = absl::UnavailableError("planted");
  EXPECT_EQ(StepOf(pass.get(), *layers[1]).status, telling_->fails);
  telling_->fails = absl::OkStatus();
  const auto info = engine_->Info(kTenant, first_.id);
  ASSERT_TRUE(info.ok());
  for (const uint64_t tokens : info->layer_tokens) EXPECT_EQ(tokens, first_.history.committed());
  for (const Answer& answer : Run(layers)) EXPECT_TRUE(answer.row_status(0).ok());
}

// A step of which no row is left is given up before its answer: others may append in their places.
TEST_F(PassesBegin, WhatNoRowIsLeftOfIsGivenUp) {
  Layers layers = NextPass({&first_}, 1, &random_);
  std::vector<Row> rows = layers[1]->rows;
  rows[0].q.Set(0, std::nanf(""));
  layers[1] = std::make_unique<Message>(1, rows);
  const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
  StepOf(pass.get(), *layers[0]);
  ASSERT_TRUE(PrepareWith(pass.get(), *layers[1]));
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
