// SPDX-License-Identifier: Apache-2.0
//
// Goal: the contract as a client sees it over a real Unix socket, with the real engine behind:
// answers, repeats, writers, tenants, uploads, listings, limits. What is refused in a message is in
// refusals_test.cc. Method: raw messages; answers are compared with the oracle (double precision,
// no shared code), states with ListSequences.
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/net/probe.h"
#include "tests/server/end_to_end_fixture.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;
using grpc::StatusCode;
using ::testing::HasSubstr;

TEST_F(EndToEndTest, DenseAnswersAreTheOracles) {
  const uint64_t sequence = Open();
  std::vector<Layer> layers;
  ASSERT_TRUE(Upload(sequence, 1300, &layers).ok());
  const auto context = Context();
  const auto stream = stub_->Decode(context.get());
  uint64_t position = 1300;
  for (const uint32_t tokens : {1u, 3u, 1u}) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const v1::DecodeRequest request = Step(sequence, position, tokens, layer);
      Keep(request, &layers[layer]);
      v1::DecodeResponse reply;
      ASSERT_TRUE(stream->Write(request));
      ASSERT_TRUE(stream->Read(&reply));
      ASSERT_EQ(Outcome(reply).first, 0) << Outcome(reply).second;
      ExpectOracle(request, layers[layer], position, reply);
    }
    position += tokens;
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(EndToEndTest, OutputTypesAndQueryOnly) {
  const uint64_t sequence = Open();
  std::vector<Layer> layers;
  ASSERT_TRUE(Upload(sequence, 40, &layers).ok());
  v1::DecodeRequest request = Step(sequence, 40, 2);
  request.mutable_rows(0)->set_query_only(true);
  request.clear_k();
  request.clear_v();
  const v1::DecodeResponse exact = Send(request);
  ASSERT_EQ(Outcome(exact).first, 0) << Outcome(exact).second;
  request.set_output_dtype(v1::DTYPE_BF16);
  const v1::DecodeResponse rounded = Send(request);
  EXPECT_EQ(rounded.out().dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(rounded.out().data().size() * 2, exact.out().data().size());
  for (size_t i = 0; i < rounded.out().data().size() / 2; ++i) {
    float value = 0;
    uint16_t bits = 0;
    std::memcpy(&value, exact.out().data().data() + 4 * i, 4);
    std::memcpy(&bits, rounded.out().data().data() + 2 * i, 2);
    ASSERT_EQ(bits, FloatToBf16(value));
  }
}

TEST_F(EndToEndTest, RepeatsAndGaps) {
  const uint64_t sequence = Open();
  std::vector<Layer> layers;
  ASSERT_TRUE(Upload(sequence, 10, &layers).ok());
  const v1::DecodeRequest request = Step(sequence, 10);
  const v1::DecodeResponse first = Send(request);
  const std::string after = State();
  const v1::DecodeResponse second = Send(request);
  EXPECT_EQ(second.out().data(), first.out().data());
  EXPECT_EQ(second.lse().data(), first.lse().data());
  EXPECT_EQ(State(), after);
  EXPECT_EQ(Outcome(Send(Step(sequence, 10))).first, StatusCode::ALREADY_EXISTS);
  const auto [code, message] = Outcome(Send(Step(sequence, 12)));
  EXPECT_EQ(code, StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(message, HasSubstr("11"));
  EXPECT_EQ(State(), after);
}

TEST_F(EndToEndTest, AStreamsWriterHoldsItsSequenceUntilItEnds) {
  const uint64_t sequence = Open();
  const auto context = Context();
  const auto holder = stub_->Decode(context.get());
  v1::DecodeResponse reply;
  ASSERT_TRUE(holder->Write(Step(sequence, 0)));
  ASSERT_TRUE(holder->Read(&reply));
  ASSERT_EQ(Outcome(reply).first, 0) << Outcome(reply).second;
  const v1::DecodeRequest second = Step(sequence, 1);
  EXPECT_EQ(Outcome(Send(second)).first, StatusCode::ABORTED);
  std::vector<Layer> layers(kLayers);
  EXPECT_EQ(Upload(sequence, 1, &layers, false).error_code(), StatusCode::ABORTED);
  holder->WritesDone();
  EXPECT_TRUE(holder->Finish().ok());
  EXPECT_EQ(Outcome(Send(second)).first, 0);  // at once: it is let go before the stream ends
}

TEST_F(EndToEndTest, TenantsDoNotSeeEachOther) {
  const uint64_t mine = Open("red");
  EXPECT_EQ(Outcome(Send(Step(mine, 0), "red")).first, 0);
  const auto foreign = Outcome(Send(Step(mine, 1), "blue"));
  const auto unknown = Outcome(Send(Step(mine + 1000, 1), "blue"));
  EXPECT_EQ(foreign.first, StatusCode::NOT_FOUND);
  EXPECT_EQ(unknown.first, StatusCode::NOT_FOUND);
  v1::CloseSequenceRequest close;
  v1::CloseSequenceResponse closed;
  close.set_sequence_id(mine);
  EXPECT_EQ(stub_->CloseSequence(Context("blue").get(), close, &closed).error_code(),
            StatusCode::NOT_FOUND);
  EXPECT_EQ(State("blue"), "");
  EXPECT_NE(State("red"), "");
  EXPECT_TRUE(stub_->CloseSequence(Context("red").get(), close, &closed).ok());
  EXPECT_EQ(stub_->CloseSequence(Context("red").get(), close, &closed).error_code(),
            StatusCode::NOT_FOUND);
}

TEST_F(EndToEndTest, ADeadlineThatPassedIsSaid) {
  const uint64_t sequence = Open();
  std::vector<Layer> layers;
  ASSERT_TRUE(Upload(sequence, 20000, &layers).ok());
  v1::DecodeRequest request = Step(sequence, 20000, 16);
  request.set_deadline_us(1);
  const v1::DecodeResponse late = Send(request);
  EXPECT_EQ(late.status().code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(late.rows_size(), 0);
  request.set_deadline_us(0);
  EXPECT_EQ(Outcome(Send(request)).first, 0);  // repeating is safe
}

TEST_F(EndToEndTest, RulesOfAnUpload) {
  const uint64_t sequence = Open(), other = Open();
  const auto send = [&](const std::vector<v1::AppendKvRequest>& messages) {
    const auto context = Context();
    v1::AppendKvResponse reply;
    const auto stream = stub_->AppendKv(context.get(), &reply);
    for (const auto& message : messages) stream->Write(message);
    stream->WritesDone();
    return stream->Finish();
  };
  v1::AppendKvRequest chunk;
  chunk.set_sequence_id(sequence);
  FillTensor(3, kKvHeads, kHeadDim, 1, chunk.mutable_k());
  FillTensor(3, kKvHeads, kValueDim, 1, chunk.mutable_v());
  v1::AppendKvRequest end;
  end.set_prefill_complete(true);
  EXPECT_EQ(send({}).error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(send({end, end}).error_code(), StatusCode::INVALID_ARGUMENT);
  v1::AppendKvRequest elsewhere = chunk;
  elsewhere.set_sequence_id(other);
  EXPECT_EQ(send({chunk, elsewhere}).error_code(), StatusCode::INVALID_ARGUMENT);
  // One layer has tokens, the other none.
  EXPECT_EQ(send({chunk, end}).error_code(), StatusCode::FAILED_PRECONDITION);
  v1::AppendKvRequest second = chunk;
  second.set_layer(1);
  second.set_sequence_id(0);                     // the first message's
  EXPECT_TRUE(send({chunk, second, end}).ok());  // the first chunk repeats
}

TEST_F(EndToEndTest, TruncateForkListAndInfo) {
  const uint64_t sequence = Open();
  std::vector<Layer> layers;
  ASSERT_TRUE(Upload(sequence, 2000, &layers).ok());
  v1::ForkSequenceRequest fork;
  fork.set_sequence_id(sequence);
  fork.set_length(1999);
  v1::ForkSequenceResponse forked;
  ASSERT_TRUE(stub_->ForkSequence(Context().get(), fork, &forked).ok());
  EXPECT_EQ(forked.committed_tokens(), 1999u);
  fork.set_length(2001);
  EXPECT_EQ(stub_->ForkSequence(Context().get(), fork, &forked).error_code(),
            StatusCode::FAILED_PRECONDITION);
  v1::TruncateSequenceRequest truncate;
  truncate.set_sequence_id(sequence);
  truncate.set_length(2001);
  v1::TruncateSequenceResponse truncated;
  EXPECT_EQ(stub_->TruncateSequence(Context().get(), truncate, &truncated).error_code(),
            StatusCode::FAILED_PRECONDITION);
  truncate.set_length(100);
  ASSERT_TRUE(stub_->TruncateSequence(Context().get(), truncate, &truncated).ok());

  v1::ListSequencesRequest list;
  list.set_page_size(1);
  v1::ListSequencesResponse page;
  ASSERT_TRUE(stub_->ListSequences(Context().get(), list, &page).ok());
  ASSERT_EQ(page.sequences_size(), 1);
  EXPECT_EQ(page.sequences(0).sequence_id(), sequence);
  EXPECT_EQ(page.sequences(0).committed_tokens(), 100u);
  EXPECT_EQ(page.sequences(0).layer_tokens_size(), static_cast<int>(kLayers));
  EXPECT_EQ(page.sequences(0).model().shape().value_dim(), kValueDim);
  EXPECT_EQ(page.sequences(0).policy().preset(), "dense");
  list.set_after_sequence_id(page.next_after_sequence_id());
  ASSERT_TRUE(stub_->ListSequences(Context().get(), list, &page).ok());
  ASSERT_EQ(page.sequences_size(), 1);
  EXPECT_EQ(page.sequences(0).committed_tokens(), 1999u);
  EXPECT_EQ(page.next_after_sequence_id(), 0u);
  list.set_page_size(1001);
  EXPECT_EQ(stub_->ListSequences(Context().get(), list, &page).error_code(),
            StatusCode::INVALID_ARGUMENT);

  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(Context().get(), {}, &info).ok());
  EXPECT_EQ(info.backends(0), "cpu");
  EXPECT_EQ(info.gpu_sharing(), v1::GPU_SHARING_NONE);
  EXPECT_EQ(server_->Metric("attnd_gpu_time_slices"), 0);
  EXPECT_EQ(info.default_policy().preset(), "dense");
  EXPECT_EQ(info.limits().max_streams(), options_.max_streams);
  EXPECT_EQ(info.limits().max_message_bytes(), options_.max_message_bytes);
  EXPECT_FALSE(info.simd_target().empty());
  EXPECT_GE(info.policies_size(), 5);
}

TEST_F(EndToEndTest, MemoryEndsWithAnErrorAndComesBack) {
  constexpr uint32_t kTokens = 5000;
  const uint64_t sequence = Open();
  const auto context = Context();
  v1::AppendKvResponse reply;
  const auto stream = stub_->AppendKv(context.get(), &reply);
  v1::AppendKvRequest request;
  request.set_sequence_id(sequence);
  FillTensor(kTokens, kKvHeads, kHeadDim, 1, request.mutable_k());
  FillTensor(kTokens, kKvHeads, kValueDim, 1, request.mutable_v());
  for (uint64_t first = 0; first < 100 * kTokens && stream->Write(request); first += kTokens) {
    request.set_first_position(first + kTokens);
  }
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_GE(server_->Metric("attnd_rejections_total{reason=memory}"), 1);
  v1::CloseSequenceRequest close;
  close.set_sequence_id(sequence);
  v1::CloseSequenceResponse closed;
  ASSERT_TRUE(stub_->CloseSequence(Context().get(), close, &closed).ok());
  const uint64_t again = Open();
  std::vector<Layer> small;
  EXPECT_TRUE(Upload(again, 1000, &small).ok());
}

TEST_F(EndToEndTest, Health) { EXPECT_TRUE(server::Probe(server_->address(), 5s).ok()); }

}  // namespace
}  // namespace attnd::testing
