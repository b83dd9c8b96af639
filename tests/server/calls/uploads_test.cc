// SPDX-License-Identifier: Apache-2.0
//
// Goal: a message of an upload that finds no room in memory is tried again whole, and what was
// taken of it already is not taken twice: its observed queries, its keys and values, or both.
// Method: the real server over a Unix socket, with an engine that refuses as often as the test
// says, and with the real engine and a small budget that others' segments fill.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/server_fixture.h"
#include "tests/server/test_server.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;

// The status of an upload of one message.
grpc::Status Upload(v1::Attnd::Stub* stub, const v1::AppendKvRequest& request,
                    v1::AppendKvResponse* reply) {
  grpc::ClientContext context;
  const auto stream = stub->AppendKv(&context, reply);
  stream->Write(request);
  stream->WritesDone();
  return stream->Finish();
}

// One token with observed queries; either may be left out.
v1::AppendKvRequest Message(bool observed, bool tokens) {
  v1::AppendKvRequest request;
  request.set_sequence_id(1);
  if (observed) FillTensor(1, 2, 16, 1.0f, request.mutable_observed_queries());
  if (tokens) {
    FillTensor(1, 1, 16, 1.0f, request.mutable_k());
    FillTensor(1, 1, 16, 1.0f, request.mutable_v());
  }
  return request;
}

class UploadsTest : public FakeEngineFixture {
 protected:
  UploadsTest() { StartServer(); }
  grpc::Status Send(const v1::AppendKvRequest& request) {
    v1::AppendKvResponse reply;
    return Upload(server_->NewStub().get(), request, &reply);
  }
};

TEST_F(UploadsTest, ObservedQueriesAloneAreTriedAgain) {
  engine_.RefuseNext(1, 0);
  const grpc::Status status = Send(Message(true, false));
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(engine_.observed(), 1);
  EXPECT_EQ(engine_.chunks(), 0);
}

TEST_F(UploadsTest, ObservedQueriesOfAChunkAreTriedAgainWithIt) {
  engine_.RefuseNext(1, 0);
  const grpc::Status status = Send(Message(true, true));
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(engine_.observed(), 1);
  EXPECT_EQ(engine_.chunks(), 1);
}

TEST_F(UploadsTest, ObservedQueriesThatWereTakenAreNotTakenTwice) {
  engine_.RefuseNext(0, 1);
  v1::AppendKvRequest request = Message(true, true);
  request.set_prefill_complete(true);
  const grpc::Status status = Send(request);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(engine_.observed(), 1);
  EXPECT_EQ(engine_.chunks(), 1);
}

TEST_F(UploadsTest, ARetryIsTheLast) {
  engine_.RefuseNext(2, 0);
  const grpc::Status status = Send(Message(true, false));
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("memory_budget_bytes"));
  EXPECT_EQ(engine_.observed(), 0);
  EXPECT_EQ(server_->Metric("attnd_rejections_total{reason=memory}"), 1);
}

// A message that waited leaves nothing behind for the next one of its stream.
TEST_F(UploadsTest, TheNextMessageIsObservedToo) {
  engine_.RefuseNext(0, 1);
  const auto stub = server_->NewStub();
  grpc::ClientContext context;
  v1::AppendKvResponse reply;
  const auto stream = stub->AppendKv(&context, &reply);
  stream->Write(Message(true, true));
  stream->Write(Message(true, true));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(engine_.observed(), 2);
  EXPECT_EQ(engine_.chunks(), 2);
}

class FullMemoryTest : public RealEngineFixture {
 protected:
  static constexpr uint32_t kQueryHeads = 64, kHeadDim = 64, kObserved = 128;
  static constexpr uint64_t kObservedBytes = uint64_t{kObserved} * kQueryHeads * kHeadDim * 4;

  FullMemoryTest() {
    options_.memory_budget_bytes = uint64_t{16} << 20;
    on_disk_ = true;
    StartServer();
  }
  uint64_t Open() { return Open(SmallModel()); }
  uint64_t Open(v1::OpenSequenceRequest request) {
    v1::ModelShape* const shape = request.mutable_model()->mutable_shape();
    shape->set_query_heads(kQueryHeads);
    shape->set_head_dim(kHeadDim);
    v1::OpenSequenceResponse reply;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->OpenSequence(&context, request, &reply).ok());
    return reply.sequence_id();
  }
  grpc::Status Send(const v1::AppendKvRequest& request) {
    v1::AppendKvResponse reply;
    return Upload(stub_.get(), request, &reply);
  }
  void FillWithSegments() {
    v1::AppendKvRequest prompt;
    prompt.set_sequence_id(Open());
    constexpr uint32_t kTokens = 16'384;
    FillTensor(kTokens, 1, kHeadDim, 1.0f, prompt.mutable_k());
    FillTensor(kTokens, 1, kHeadDim, 1.0f, prompt.mutable_v());
    prompt.set_prefill_complete(true);
    const grpc::Status uploaded = Send(prompt);
    ASSERT_TRUE(uploaded.ok()) << uploaded.error_message();
  }
};

// 8 MiB of segments lie in a budget of 16 MiB. Observed queries of 2 MiB each take their room when
// there is no other: the segments go to disk.
TEST_F(FullMemoryTest, ObservedQueriesFindRoomThatSegmentsLeave) {
  FillWithSegments();
  const uint64_t before = engine_->archive_stats().paged_out_segments;
  for (uint64_t bytes = 0; bytes < (uint64_t{10} << 20); bytes += kObservedBytes) {
    v1::AppendKvRequest observed;
    observed.set_sequence_id(Open());
    FillTensor(kObserved, kQueryHeads, kHeadDim, 1.0f, observed.mutable_observed_queries());
    const grpc::Status status = Send(observed);
    EXPECT_TRUE(status.ok()) << bytes << ": " << status.error_message();
  }
  EXPECT_GT(engine_->archive_stats().paged_out_segments, before);
}

// The same for labels, whose channels the queries weigh: what is kept of one token's takes 16 KiB
// as queries and 512 KiB as channels of all layers.
TEST_F(FullMemoryTest, TheirWeightsOfLabelsDoSo) {
  v1::OpenSequenceRequest model = SmallModel();
  constexpr uint32_t kLayers = 16;
  model.mutable_model()->mutable_shape()->set_layers(kLayers);
  model.mutable_model()->mutable_shape()->set_kv_heads(kQueryHeads);
  model.mutable_policy()->set_preset("double-sparsity");
  std::vector<uint64_t> sequences(20);
  for (uint64_t& sequence : sequences) sequence = Open(model);  // which waits for no room
  FillWithSegments();
  const uint64_t before = engine_->archive_stats().paged_out_segments;
  for (const uint64_t sequence : sequences) {
    v1::AppendKvRequest observed;
    observed.set_sequence_id(sequence);
    FillTensor(1, kQueryHeads, kHeadDim, 1.0f, observed.mutable_observed_queries());
    const grpc::Status status = Send(observed);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_GT(engine_->archive_stats().paged_out_segments, before);
}

}  // namespace
}  // namespace attnd::testing
