// SPDX-License-Identifier: Apache-2.0
//
// Goal: a message that the system has no memory to parse, or none to answer, is refused as such,
// counted, and never taken for another. Method: the real server over a Unix socket with an engine
// that computes nothing; this program's operator new refuses one large allocation, which is the
// message's text or numbers, or the reply's.
#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/server_fixture.h"
#include "tests/server/test_server.h"
#include "tests/server/within.h"
#include "tests/system_faults.h"

namespace attnd::testing {
namespace {

using attnd::test::AllocationRefused;
using grpc::StatusCode;
using ::testing::HasSubstr;

constexpr uint32_t kTokens = 8192;
constexpr uint64_t kBytes = uint64_t{kTokens} * 16 * sizeof(float);
// Large allocations of the client, which writes the message; the next one is the server's.
constexpr uint64_t kClients = 1;

v1::AppendKvRequest Message(uint32_t tokens) {
  v1::AppendKvRequest request;
  request.set_sequence_id(1);
  FillTensor(tokens, 1, 16, 1.0f, request.mutable_k());
  FillTensor(tokens, 1, 16, 1.0f, request.mutable_v());
  return request;
}

class RefusedMemoryTest : public FakeEngineFixture {
 protected:
  RefusedMemoryTest() {
    StartServer();
    stub_ = server_->NewStub();
    engine_.RefuseNext(0, 0);  // whoever waits for room finds some
  }
  void ExpectCounted(const grpc::Status& status) const {
    EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("memory for the message"));
    EXPECT_EQ(server_->Metric("attnd_rejections_total{reason=memory}"), 1);
  }
  std::unique_ptr<v1::Attnd::Stub> stub_;
};

TEST_F(RefusedMemoryTest, OfAnUpload) {
  const v1::AppendKvRequest request = Message(kTokens);
  grpc::ClientContext context;
  v1::AppendKvResponse reply;
  const auto stream = stub_->AppendKv(&context, &reply);
  const AllocationRefused refused(kClients, 1, kBytes);
  stream->Write(request);
  stream->WritesDone();
  ExpectCounted(stream->Finish());
  EXPECT_TRUE(refused.refused());
  EXPECT_EQ(engine_.chunks(), 0);
}

// Behind the prompt's last message: what was not read is not taken for an empty one.
TEST_F(RefusedMemoryTest, OfAnUploadsMessageBehindTheLast) {
  const v1::AppendKvRequest request = Message(kTokens);
  v1::AppendKvRequest last = Message(1);
  last.set_prefill_complete(true);
  grpc::ClientContext context;
  v1::AppendKvResponse reply;
  const auto stream = stub_->AppendKv(&context, &reply);
  stream->Write(last);
  ASSERT_TRUE(Within([&] { return engine_.chunks() == 1; }));
  const AllocationRefused refused(kClients, 1, kBytes);
  stream->Write(request);
  stream->WritesDone();
  ExpectCounted(stream->Finish());
  EXPECT_TRUE(refused.refused());
}

// The stream goes on: the step can be sent again.
TEST_F(RefusedMemoryTest, OfAStep) {
  v1::DecodeRequest request = SmallStep();
  FillTensor(kTokens, 1, 16, 1.0f, request.mutable_q());
  grpc::ClientContext context;
  const auto stream = stub_->Decode(&context);
  v1::DecodeResponse reply;
  {
    const AllocationRefused refused(kClients, 1, kBytes);
    stream->Write(request);
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_TRUE(refused.refused());
  }
  ExpectCounted({static_cast<StatusCode>(reply.status().code()), reply.status().message()});
  stream->Write(SmallStep());
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), 0) << reply.status().message();
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

// A reply takes its tensors' memory itself, and for elements of 16 bits a second time.
TEST_F(RefusedMemoryTest, OfAReply) {
  engine_.set_value_dim(kBytes / sizeof(float) / 2);  // of two query heads
  grpc::ClientContext context;
  const auto stream = stub_->Decode(&context);
  v1::DecodeResponse reply;
  int counted = 0;
  for (const v1::DType dtype : {v1::DTYPE_FP32, v1::DTYPE_BF16}) {
    v1::DecodeRequest request = SmallStep();
    request.set_output_dtype(dtype);
    {
      const AllocationRefused refused(dtype == v1::DTYPE_FP32 ? 0 : 1, 1, kBytes / 2);
      stream->Write(request);
      ASSERT_TRUE(stream->Read(&reply));
      EXPECT_TRUE(refused.refused());
    }
    EXPECT_EQ(reply.status().code(), StatusCode::RESOURCE_EXHAUSTED) << reply.status().message();
    EXPECT_THAT(reply.status().message(), HasSubstr("memory for the reply"));
    EXPECT_EQ(server_->Metric("attnd_rejections_total{reason=memory}"), ++counted);
    stream->Write(request);  // the stream goes on
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_EQ(reply.status().code(), 0) << reply.status().message();
    EXPECT_EQ(reply.out().data().size(), dtype == v1::DTYPE_FP32 ? kBytes : kBytes / 2);
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(RefusedMemoryTest, OfAUnaryCall) {
  v1::OpenSequenceRequest request = SmallModel();
  request.mutable_policy()->set_preset(std::string(kBytes, 'x'));
  grpc::ClientContext context;
  v1::OpenSequenceResponse reply;
  const AllocationRefused refused(kClients, 1, kBytes);
  ExpectCounted(stub_->OpenSequence(&context, request, &reply));
  EXPECT_TRUE(refused.refused());
}

}  // namespace
}  // namespace attnd::testing
