// SPDX-License-Identifier: Apache-2.0
//
// Goal: every refusal of a step, of the end of a prompt and of a caller that the contract names has
// its code, names the field, and changes nothing. Method: each fault is sent to a sequence with a
// segment and a tail, which is compared before and after. Uploads: engine_append_faults_test.cc.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/engine_faults_fixture.h"

namespace attnd::engine::test {
namespace {

using absl::StatusCode;
using testing::HasSubstr;

// ---- who may ----

TEST_F(EngineFaultsTest, UnknownAndForeignSequencesAreTheSame) {
  const Kv kv = RandomKv(shape(), 1, &random_);
  const uint64_t unknown = sequence_.id + 1000;
  for (const auto& [tenant, id] :
       std::vector<std::pair<std::string, uint64_t>>{{kTenant, unknown}, {"other", sequence_.id}}) {
    const std::string name = "sequence_id " + std::to_string(id);
    const auto expect = [&](const absl::Status& status) {
      ExpectRefused(status, StatusCode::kNotFound, name);
    };
    expect(engine_->Append(tenant, kWriter, id, ChunkOf(0, 700, kv)));
    expect(engine_->FinishPrefill(tenant, kWriter, id, nullptr).status());
    expect(engine_->Info(tenant, id).status());
    expect(engine_->Truncate(tenant, id, 0).status());
    expect(engine_->Fork(tenant, id, std::nullopt).status());
    expect(engine_->Close(tenant, id));
    Row row = Next();
    row.sequence_id = id;
    const Message message(1, {row});
    AnswerVectors memory;
    DecodeResult result;
    ASSERT_TRUE(engine_->Decode(tenant, kWriter, message.args, memory, &result).ok());
    expect(result.rows.at(0).status);
  }
  EXPECT_TRUE(engine_->List("other", 0, 10).empty());
  EXPECT_EQ(engine_->List(kTenant, 0, 10).size(), 1u);
  ASSERT_TRUE(engine_->Close(kTenant, sequence_.id).ok());
  EXPECT_EQ(engine_->Close(kTenant, sequence_.id).code(), StatusCode::kNotFound);
  EXPECT_EQ(engine_->usage().resident_bytes, 0u);
}

TEST_F(EngineFaultsTest, TheSecondWriterIsAborted) {
  const Kv kv = RandomKv(shape(), 1, &random_);
  ExpectRefused(Append(ChunkOf(0, 700, kv), 2), StatusCode::kAborted, "writing");
  ExpectRefused(engine_->FinishPrefill(kTenant, 2, sequence_.id, nullptr).status(),
                StatusCode::kAborted, "writing");
  const Message message(1, {Next()});
  ExpectRefused(Send(engine_.get(), message, 2).row_status(0), StatusCode::kAborted, "writing");
  // Asking is not writing.
  const Message question(1, {QueryOnlyRow(&sequence_, 1, 1, &random_)});
  EXPECT_TRUE(IsDense(question, Send(engine_.get(), question, 2), 0));

  engine_->ReleaseWriter(3);  // not the one that holds it
  ExpectRefused(Append(ChunkOf(0, 700, kv), 2), StatusCode::kAborted, "writing");
  engine_->ReleaseWriter(kWriter);
  EXPECT_TRUE(Send(engine_.get(), message, 2).row_status(0).ok());
  EXPECT_EQ(Append(ChunkOf(0, 700, kv)).code(), StatusCode::kAborted);
}

// ---- rows ----

TEST_F(EngineFaultsTest, RowsOfTheWrongPosition) {
  Row row = Next();
  row.position = 701;
  ExpectRefused(RowStatus(row), StatusCode::kFailedPrecondition, "expected is 700");
  row.position = std::numeric_limits<uint64_t>::max();
  ExpectRefused(RowStatus(row), StatusCode::kFailedPrecondition, "expected is 700");
  row.position = 698;
  ExpectRefused(RowStatus(row), StatusCode::kAlreadyExists, "expected is 700");
  row.position = 511;
  ExpectRefused(RowStatus(row), StatusCode::kFailedPrecondition, "expected is 700");
  row = QueryOnlyRow(&sequence_, 1, 1, &random_);
  for (const uint64_t position : {uint64_t{0}, uint64_t{699}, uint64_t{701}}) {
    row.position = position;
    ExpectRefused(RowStatus(row), StatusCode::kFailedPrecondition, "700");
  }
  // Equal content answers again, inside what is there too.
  row = Next();
  row.position = 640;
  row.kv = sequence_.history.Slice(1, 640, 2);
  const Message message(1, {row});
  EXPECT_TRUE(IsDense(message, Send(engine_.get(), message), 0));
  EXPECT_TRUE(Unchanged(&sequence_, state_));
}

// One bad row of three: it alone is refused.
TEST_F(EngineFaultsTest, NumbersThatAreNotFiniteInOneRowOfMany) {
  TestSequence first = OpenSequence(engine_.get(), shape());
  TestSequence last = OpenSequence(engine_.get(), shape());
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    for (const std::string field : {"q", "k", "v"}) {
      Row row = Next();
      Numbers& numbers = field == "q" ? row.q : field == "k" ? row.kv.k : row.kv.v;
      numbers.Set(random_.Below(numbers.values.size()), bad);
      const Message message(1,
                            {NextRow(&first, 1, 3, &random_), row, NextRow(&last, 1, 1, &random_)});
      used_ = engine_->usage().resident_bytes;
      const Answer answer = Send(engine_.get(), message);
      EXPECT_TRUE(IsDense(message, answer, 0));
      EXPECT_TRUE(IsDense(message, answer, 2));
      EXPECT_EQ(answer.row_status(1).code(), StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(answer.row_status(1).message()), HasSubstr(field + " has a NaN"));
      EXPECT_TRUE(Unchanged(&sequence_, state_));
      for (const float lse : AnswerOf(message, answer, 1).lse) EXPECT_TRUE(std::isnan(lse));
      for (const float out : AnswerOf(message, answer, 1).out) EXPECT_TRUE(std::isnan(out));
    }
  }
}

TEST_F(EngineFaultsTest, DuplicatesAndRefusedRows) {
  Row duplicate = Next();
  Row refused = Next();
  refused.precheck = absl::InvalidArgumentError("policy.preset");
  const Message message(1, {refused, Next(), duplicate});
  const Answer answer = Send(engine_.get(), message);
  EXPECT_EQ(answer.row_status(0), refused.precheck);
  EXPECT_TRUE(IsDense(message, answer, 1));
  EXPECT_EQ(answer.row_status(2).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(answer.row_status(2).message()), HasSubstr("sequence_id"));
  EXPECT_EQ(sequence_.Info().layer_tokens[1], 702u);
}

TEST_F(EngineFaultsTest, PoliciesWiderThanTheSequence) {
  Row row = Next();
  row.policy = PolicyOf("streaming", {{"window", "65"}});
  ExpectRefused(RowStatus(row), StatusCode::kInvalidArgument, "window");
  row.policy = PolicyOf("streaming", {{"sink", "5"}});
  ExpectRefused(RowStatus(row), StatusCode::kInvalidArgument, "sink");
  row.policy = PolicyOf("streaming", {{"window", "3"}, {"sink", "2"}});
  EXPECT_TRUE(RowStatus(row).ok());
}

TEST_F(EngineFaultsTest, RowsOfTheWrongShape) {
  const auto refused = [&](const char* part, auto change, uint32_t layer = 1) {
    Message message(layer, {Next()});
    change(&message.args);
    AnswerVectors memory;
    DecodeResult result;
    const absl::Status status = engine_->Decode(kTenant, kWriter, message.args, memory, &result);
    ExpectRefused(status.ok() ? result.rows.at(0).status : status, StatusCode::kInvalidArgument,
                  part);
  };
  refused(
      "layer", [](DecodeArgs*) {}, 2);
  refused("layer", [](DecodeArgs* args) { args->layer = 0xFFFFFFFFu; });
  refused("q ", [](DecodeArgs* args) { args->q.elements -= 1; });
  refused("k ", [](DecodeArgs* args) { args->k.elements -= 1; });
  refused("v ", [](DecodeArgs* args) { args->v.elements = 0; });
  refused("q ", [](DecodeArgs* args) { args->q_heads = 0; });
  refused("k ", [](DecodeArgs* args) { args->k_heads = uint64_t{1} << 63; });
  // Products that are equal, shapes that are not.
  refused("q ", [](DecodeArgs* args) { args->q_heads = 2, args->q_head_dim = 32; });
  refused("k ", [](DecodeArgs* args) { args->k_heads = 1, args->k_head_dim = 32; });
  refused("v ", [](DecodeArgs* args) { args->v_heads = 4, args->v_value_dim = 16; });
  refused("bf16", [](DecodeArgs* args) { args->k.dtype = DType::kBf16; });
  refused("fp16", [](DecodeArgs* args) { args->v.dtype = DType::kFp16; });
}

// A message has values for all rows that append, or for none.
TEST_F(EngineFaultsTest, ValuesAreSentUnlessTheModelIsLatent) {
  const Kv whole = RandomKv(shape(), 3, &random_);
  AppendChunk chunk = ChunkOf(0, 700, whole);
  chunk.v = {};
  ExpectRefused(Append(chunk), StatusCode::kInvalidArgument, "v is missing");
  const Message message(1, {Next()});
  DecodeArgs args = message.args;
  args.v = {};
  args.v_heads = args.v_value_dim = 0;
  AnswerVectors memory;
  DecodeResult result;
  ASSERT_TRUE(engine_->Decode(kTenant, kWriter, args, memory, &result).ok());
  ExpectRefused(result.rows.at(0).status, StatusCode::kInvalidArgument, "v is missing");

  ModelShape other = MakeLatentShape(2, 4, 32, 16, DType::kFp32);
  TestSequence latent = OpenSequence(engine_.get(), other);
  other.latent = false;
  TestSequence plain = OpenSequence(engine_.get(), other);
  const Kv kv = RandomKv(other, 3, &random_);
  const absl::Status sent = engine_->Append(kTenant, kWriter, latent.id, ChunkOf(0, 0, kv));
  EXPECT_EQ(sent.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(sent.message()), HasSubstr("v is present"));
  for (const bool with_values : {false, true}) {
    TestSequence& good = with_values ? plain : latent;
    TestSequence& bad = with_values ? latent : plain;
    const Message mixed(0, {NextRow(&good, 0, 2, &random_), NextRow(&bad, 0, 1, &random_)});
    const Answer answer = Send(engine_.get(), mixed);
    EXPECT_TRUE(IsDense(mixed, answer, 0));
    EXPECT_EQ(answer.row_status(1).code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(answer.row_status(1).message()),
                HasSubstr(with_values ? "v is present" : "v is missing"));
    EXPECT_EQ(bad.Info().layer_tokens[0], bad.history.layers[0].tokens);
  }
}

// A refused row's extents are the message's own: its answer must not be given memory by them.
TEST_F(EngineFaultsTest, AbsurdExtentsTakeNoMemory) {
  Message message(1, {Next(1)});
  const std::vector<std::byte> zeros(size_t{4} << 20);
  message.args.q = {DType::kFp32, zeros.data(), size_t{1} << 20};
  message.args.q_heads = 1 << 20;
  message.args.q_head_dim = 1;
  message.args.v = {DType::kFp32, zeros.data(), size_t{1} << 20};
  message.args.v_heads = 1;
  message.args.v_value_dim = 1 << 20;
  AnswerVectors memory;
  DecodeResult result;
  ASSERT_TRUE(engine_->Decode(kTenant, kWriter, message.args, memory, &result).ok());
  ExpectRefused(result.rows.at(0).status, StatusCode::kInvalidArgument, "q ");
  EXPECT_EQ(result.value_dim, 0u);
  EXPECT_TRUE(memory.out().empty());
}

// The first row does not decide for the others if it is refused.
TEST_F(EngineFaultsTest, ARefusedRowDoesNotChooseTheValueDim) {
  TestSequence narrow = OpenSequence(engine_.get(), MakeShape(2, 4, 2, 16, 16, DType::kFp32));
  Row bad = QueryOnlyRow(&narrow, 1, 1, &random_);
  bad.q.Set(0, kNan);
  const Message message(1, {bad, QueryOnlyRow(&sequence_, 1, 1, &random_)});
  const Answer answer = Send(engine_.get(), message);
  EXPECT_EQ(answer.row_status(0).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(answer.row_status(1).ok()) << answer.row_status(1);
  EXPECT_EQ(answer.result.value_dim, 32u);

  const Message mixed(
      1, {QueryOnlyRow(&sequence_, 1, 1, &random_), QueryOnlyRow(&narrow, 1, 1, &random_)});
  const Answer second = Send(engine_.get(), mixed);
  EXPECT_TRUE(second.row_status(0).ok());
  EXPECT_EQ(second.row_status(1).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(second.row_status(1).message()), HasSubstr("value_dim"));
}

// The caller's memory is asked for once, with the size that the rows make it.
TEST_F(EngineFaultsTest, TheAnswerLiesInTheCallersMemory) {
  const Message message(1, {QueryOnlyRow(&sequence_, 1, 3, &random_)});
  const Answer expected = Send(engine_.get(), message);
  ASSERT_TRUE(expected.row_status(0).ok());
  std::vector<float> out(3 * 4 * 32 + 1, 7), lse(3 * 4 + 1, 7);
  DecodeResult result;
  const AnswerSpans spans({out, lse});
  ASSERT_TRUE(engine_->Decode(kTenant, kWriter, message.args, spans, &result).ok());
  EXPECT_EQ(result.value_dim, 32u);
  EXPECT_EQ(out.back(), 7);  // what the answer does not take stays
  EXPECT_EQ(lse.back(), 7);
  out.pop_back();
  lse.pop_back();
  EXPECT_EQ(out, expected.memory.out());
  EXPECT_EQ(lse, expected.memory.lse());

  const AnswerSpans small({std::span(out).first(out.size() - 1), lse});
  ExpectRefused(engine_->Decode(kTenant, kWriter, message.args, small, &result),
                StatusCode::kInvalidArgument, "the caller's memory has 383 floats for out");
  const auto none = [](const AnswerExtents&) -> absl::StatusOr<AnswerBuffers> {
    return absl::ResourceExhaustedError("none left");
  };
  ExpectRefused(engine_->Decode(kTenant, kWriter, message.args, none, &result),
                StatusCode::kResourceExhausted, "none left");
}

TEST_F(EngineFaultsTest, MemoryOfAnotherSizeThanAskedForIsTheCallersFault) {
  const Message message(1, {QueryOnlyRow(&sequence_, 1, 1, &random_)});
  std::vector<float> floats(4096);
  const auto large = [&](const AnswerExtents&) -> absl::StatusOr<AnswerBuffers> {
    return AnswerBuffers{floats, floats};
  };
  DecodeResult result;
  EXPECT_DEATH(static_cast<void>(engine_->Decode(kTenant, kWriter, message.args, large, &result)),
               "out_floats");
}

TEST_F(EngineFaultsTest, LimitsOfAMessage) {
  EngineOptions options = SmallOptions();
  options.max_rows = 2;
  options.max_query_tokens = 5;
  const auto engine = MakeEngine(options);
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 3; ++i) sequences.push_back(OpenSequence(engine.get(), shape()));
  const auto status = [&](std::vector<uint32_t> tokens) {
    std::vector<Row> rows;
    for (size_t i = 0; i < tokens.size(); ++i) {
      rows.push_back(NextRow(&sequences[i], 0, tokens[i], &random_));
    }
    const Message message(0, rows);
    const Answer answer = Send(engine.get(), message);
    return answer.status;
  };
  EXPECT_THAT(std::string(status({1, 1, 1}).message()), HasSubstr("rows"));
  EXPECT_THAT(std::string(status({6}).message()), HasSubstr("rows[0].query_tokens"));
  EXPECT_THAT(std::string(status({3, 3}).message()), HasSubstr("rows[1].query_tokens"));
  EXPECT_EQ(status({3, 0}).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(status({3, 2}).ok());
  AnswerVectors memory;
  DecodeResult result;
  EXPECT_EQ(engine->Decode(kTenant, kWriter, DecodeArgs(), memory, &result).code(),
            StatusCode::kInvalidArgument);
}

// ---- time ----

TEST_F(EngineFaultsTest, DeadlineInThePast) {
  Message message(1, {Next()});
  message.args.deadline = std::chrono::steady_clock::now() - std::chrono::microseconds(1);
  ExpectRefused(Send(engine_.get(), message).status, StatusCode::kDeadlineExceeded, "deadline");
}

// The tokens stay, and repeating is safe.
TEST_F(EngineFaultsTest, CancelledSteps) {
  Message message(1, {Next()});
  const std::atomic<bool> cancelled{true};
  message.args.cancelled = &cancelled;
  EXPECT_EQ(Send(engine_.get(), message).status.code(), StatusCode::kCancelled);
  message.args.cancelled = nullptr;
  EXPECT_TRUE(IsDense(
      message,
      [&] {
        sequence_.history.Append(1, message.rows[0].kv);
        return Send(engine_.get(), message);
      }(),
      0));
  EXPECT_EQ(sequence_.Info().layer_tokens[1], 702u);
}

TEST_F(EngineFaultsTest, CancelledPrefill) {
  TestSequence other = OpenSequence(engine_.get(), shape());
  Prefill(&other, 3000, &random_);
  const uint64_t used = engine_->usage().resident_bytes;
  const std::atomic<bool> cancelled{true};
  EXPECT_EQ(engine_->FinishPrefill(kTenant, kWriter, other.id, &cancelled).status().code(),
            StatusCode::kCancelled);
  EXPECT_EQ(engine_->usage().resident_bytes, used);
  EXPECT_TRUE(MatchesModel(&other, &random_));
  EXPECT_EQ(FinishPrefill(&other).segmented_tokens, 2560u);
  EXPECT_TRUE(MatchesModel(&other, &random_));
}

TEST_F(EngineFaultsTest, PrefillOfUnequalLayers) {
  ASSERT_TRUE(AppendNext(&sequence_, 0, RandomKv(shape(), 5, &random_)).ok());
  state_ = StateOf(&sequence_);
  used_ = engine_->usage().resident_bytes;
  ExpectRefused(engine_->FinishPrefill(kTenant, kWriter, sequence_.id, nullptr).status(),
                StatusCode::kFailedPrecondition, "layer 1 has 700");
  ExpectRefused(engine_->Truncate(kTenant, sequence_.id, 701).status(),
                StatusCode::kFailedPrecondition, "700 committed");
  ExpectRefused(engine_->Fork(kTenant, sequence_.id, 701).status(), StatusCode::kFailedPrecondition,
                "700 committed");
  EXPECT_EQ(engine_->usage().sequences, 1u);
}

}  // namespace
}  // namespace attnd::engine::test
