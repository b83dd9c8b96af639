// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a limit refuses has the code that the contract says and is counted under the limit's
// name; listings come in pages of bounded size. Method: the real server and engine over a Unix
// socket, with small limits; counters are read from the server's metrics.
#include <chrono>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/server_fixture.h"
#include "tests/server/test_server.h"
#include "tests/server/within.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;
using grpc::StatusCode;
using ::testing::HasSubstr;

class AccountingTest : public RealEngineFixture {
 protected:
  uint64_t Open(const v1::OpenSequenceRequest& request = SmallModel()) {
    v1::OpenSequenceResponse reply;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->OpenSequence(&context, request, &reply).ok());
    return reply.sequence_id();
  }
  v1::DecodeResponse Send(const v1::DecodeRequest& request) {
    grpc::ClientContext context;
    const auto stream = stub_->Decode(&context);
    v1::DecodeResponse reply;
    EXPECT_TRUE(stream->Write(request) && stream->Read(&reply));
    stream->WritesDone();
    const grpc::Status end = stream->Finish();
    EXPECT_TRUE(end.ok()) << end.error_message();
    return reply;
  }
  static v1::AppendKvRequest Chunk(uint64_t sequence, uint32_t tokens) {
    v1::AppendKvRequest request;
    request.set_sequence_id(sequence);
    FillTensor(tokens, 1, 16, 1.0f, request.mutable_k());
    FillTensor(tokens, 1, 16, 1.0f, request.mutable_v());
    return request;
  }
  grpc::Status Append(const v1::AppendKvRequest& request) {
    grpc::ClientContext context;
    v1::AppendKvResponse reply;
    const auto stream = stub_->AppendKv(&context, &reply);
    stream->Write(request);
    stream->WritesDone();
    return stream->Finish();
  }
  double Rejections(const std::string& reason) const {
    return server_->Metric("attnd_rejections_total{reason=" + reason + "}");
  }
  // Streams are counted when they are over, shortly after the client has heard of it.
  bool Counted(const std::string& code, const std::string& method, int count) const {
    const std::string key = "attnd_rpcs_total{code=" + code + "}{method=" + method + "}";
    return Within([&] { return server_->Metric(key) == count; });
  }
};

TEST_F(AccountingTest, TheLimitOfTokensIsNotMemory) {
  options_.max_sequence_tokens = 10;
  StartServer();
  const uint64_t sequence = Open();
  EXPECT_EQ(Append(Chunk(sequence, 11)).error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Rejections("tokens"), 1);
  ASSERT_TRUE(Append(Chunk(sequence, 10)).ok());
  const v1::DecodeResponse reply = Send(SmallStep(sequence, 10));
  EXPECT_EQ(reply.rows(0).status().code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Rejections("tokens"), 2);
  EXPECT_EQ(Rejections("memory"), 0);
}

TEST_F(AccountingTest, MemoryIsMemory) {
  options_.memory_budget_bytes = 16 << 20;
  StartServer();
  const uint64_t sequence = Open();
  EXPECT_EQ(Append(Chunk(sequence, 200'000)).error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Rejections("memory"), 1);
  EXPECT_EQ(Rejections("tokens"), 0);
}

// gRPC refuses it before the server sees it, so the server knows only that the call was cancelled.
TEST_F(AccountingTest, AnOversizeMessageIsNotCountedAsSuccess) {
  options_.max_message_bytes = 64 << 10;
  StartServer();
  const uint64_t sequence = Open();
  EXPECT_EQ(Append(Chunk(sequence, 1000)).error_code(), StatusCode::RESOURCE_EXHAUSTED);
  v1::DecodeRequest large = SmallStep(sequence);
  FillTensor(1000, 2, 16, 1.0f, large.mutable_q());
  grpc::ClientContext context;
  const auto stream = stub_->Decode(&context);
  v1::DecodeResponse reply;
  stream->Write(large);
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(Counted("CANCELLED", "Decode", 1));
  ASSERT_TRUE(Within([&] { return server_->Metric("attnd_streams") == 0; }));
  EXPECT_EQ(server_->Metric("attnd_rpcs_total{code=OK}{method=AppendKv}"), -1);
}

// A reply that would be too large is refused by the server itself.
TEST_F(AccountingTest, AReplyThatWouldBeTooLargeIsCounted) {
  options_.max_message_bytes = 64 << 10;
  StartServer();
  v1::OpenSequenceRequest wide = SmallModel();
  wide.mutable_model()->mutable_shape()->set_query_heads(64);
  wide.mutable_model()->mutable_shape()->set_value_dim(512);
  v1::DecodeRequest request;
  v1::DecodeRow* const row = request.add_rows();
  row->set_sequence_id(Open(wide));
  row->set_query_tokens(1);
  row->set_query_only(true);
  FillTensor(1, 64, 16, 1.0f, request.mutable_q());
  EXPECT_EQ(Send(request).status().code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Rejections("message"), 1);
}

// So are the statistics of many rows, which take more than the rows' outputs.
TEST_F(AccountingTest, ManySmallRowsMayBeTooLargeTogether) {
  constexpr uint32_t kRows = 1000;
  options_.max_message_bytes = 64 << 10;
  StartServer();
  v1::DecodeRequest request;
  for (uint32_t i = 0; i < kRows; ++i) {
    v1::DecodeRow* const row = request.add_rows();
    row->set_sequence_id(Open());
    row->set_query_tokens(1);
    row->set_query_only(true);
  }
  FillTensor(kRows, 1, 16, 1.0f, request.mutable_q(), v1::DTYPE_BF16);
  const v1::DecodeResponse reply = Send(request);
  EXPECT_EQ(reply.status().code(), StatusCode::RESOURCE_EXHAUSTED) << reply.ByteSizeLong();
  EXPECT_EQ(Rejections("message"), 1);
}

TEST_F(AccountingTest, AClientThatLeavesIsCountedAsCancelled) {
  StartServer();
  grpc::ClientContext cancelled, late, upload;
  late.set_deadline(std::chrono::system_clock::now() + 100ms);
  v1::AppendKvResponse reply;
  const auto first = stub_->Decode(&cancelled);
  const auto second = stub_->Decode(&late);
  const auto third = stub_->AppendKv(&upload, &reply);
  EXPECT_EQ(second->Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
  ASSERT_TRUE(Within([&] { return server_->Metric("attnd_streams") == 2; }));
  cancelled.TryCancel();
  upload.TryCancel();
  EXPECT_EQ(first->Finish().error_code(), StatusCode::CANCELLED);
  EXPECT_EQ(third->Finish().error_code(), StatusCode::CANCELLED);
  EXPECT_TRUE(Counted("CANCELLED", "Decode", 2));
  EXPECT_TRUE(Counted("CANCELLED", "AppendKv", 1));
}

TEST_F(AccountingTest, PagesAreBoundedInBytes) {
  constexpr int kSequences = 100;
  options_.max_message_bytes = 64 << 10;
  StartServer();
  v1::OpenSequenceRequest deep = SmallModel();
  deep.mutable_model()->mutable_shape()->set_layers(1024);
  deep.mutable_model()->set_fingerprint(std::string(256, 'x'));
  std::vector<uint64_t> opened, listed;
  for (int i = 0; i < kSequences; ++i) opened.push_back(Open(deep));
  v1::ListSequencesRequest request;
  int pages = 0;
  do {
    grpc::ClientContext context;
    v1::ListSequencesResponse page;
    ASSERT_TRUE(stub_->ListSequences(&context, request, &page).ok());
    ASSERT_GT(page.sequences_size(), 0);
    EXPECT_LE(page.ByteSizeLong(), options_.max_message_bytes / 2 + 1024);
    for (const v1::SequenceInfo& info : page.sequences()) listed.push_back(info.sequence_id());
    request.set_after_sequence_id(page.next_after_sequence_id());
    ++pages;
  } while (request.after_sequence_id() != 0);
  EXPECT_EQ(listed, opened);
  EXPECT_GT(pages, 2);
}

}  // namespace
}  // namespace attnd::testing
