// SPDX-License-Identifier: Apache-2.0
//
// Goal: leases as clients see them: what OpenSequence takes, what ListSequences tells, what becomes
// of the sequences of a client that is gone, and of those of clients that are slow. Method: the
// real server and engine over a Unix socket, by a clock that the test moves. That the engine has
// looked at its leases is known from a second sequence, the canary, whose lease is over at the same
// time. tests/python/test_leases.py kills a client.
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/manual_clock.h"
#include "tests/server/server_fixture.h"
#include "tests/server/test_server.h"
#include "tests/server/within.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;
using grpc::StatusCode;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr seconds kLease = 60s;

class ServedLeasesTest : public RealEngineFixture {
 protected:
  ServedLeasesTest() {
    lease_clock_ = clock_.function();
    StartServer();
  }

  static std::unique_ptr<grpc::ClientContext> Context(const std::string& tenant = "") {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + 60s);
    if (!tenant.empty()) context->AddMetadata("attnd-tenant", tenant);
    return context;
  }
  grpc::Status TryOpen(uint64_t lease_seconds, uint64_t* id) {
    v1::OpenSequenceRequest request = SmallModel();
    request.set_lease_seconds(static_cast<uint32_t>(lease_seconds));
    v1::OpenSequenceResponse reply;
    const grpc::Status status = stub_->OpenSequence(Context().get(), request, &reply);
    *id = reply.sequence_id();
    return status;
  }
  uint64_t Open(seconds lease = kLease) {
    uint64_t id = 0;
    const grpc::Status status = TryOpen(static_cast<uint64_t>(lease.count()), &id);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return id;
  }
  // What ListSequences says of a sequence; an id of 0 if it is not open.
  v1::SequenceInfo Listed(uint64_t id) {
    v1::ListSequencesRequest request;
    request.set_after_sequence_id(id - 1);
    request.set_page_size(1);
    v1::ListSequencesResponse reply;
    EXPECT_TRUE(stub_->ListSequences(Context().get(), request, &reply).ok());
    if (reply.sequences_size() == 0 || reply.sequences(0).sequence_id() != id) return {};
    return reply.sequences(0);
  }
  bool IsOpen(uint64_t id) { return Listed(id).sequence_id() == id; }
  // Time passes until a lease that began now would be over, and the engine has seen that.
  void PassLease(seconds lease = kLease) {
    const uint64_t canary = Open(lease);
    clock_.Advance(lease);
    EXPECT_TRUE(Within([&] { return !IsOpen(canary); }));
  }
  grpc::Status Renew(uint64_t id, v1::RenewLeaseResponse* reply, const std::string& tenant = "") {
    v1::RenewLeaseRequest request;
    request.set_sequence_id(id);
    return stub_->RenewLease(Context(tenant).get(), request, reply);
  }

  attnd::test::ManualClock clock_;
};

// A client with one Decode stream.
struct Decoder {
  explicit Decoder(const TestServer& server) : stub(server.NewStub()) {
    context.set_deadline(std::chrono::system_clock::now() + 60s);
    stream = stub->Decode(&context);
  }
  ~Decoder() { context.TryCancel(); }
  // Code and message of the next step's row.
  std::pair<int, std::string> Step(uint64_t sequence) {
    v1::DecodeResponse reply;
    EXPECT_TRUE(stream->Write(SmallStep(sequence, position++)) && stream->Read(&reply));
    return {reply.rows(0).status().code(), reply.rows(0).status().message()};
  }
  const std::unique_ptr<v1::Attnd::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>> stream;
  uint64_t position = 0;
};

// An upload of single tokens.
struct Uploader {
  explicit Uploader(const TestServer& server, uint64_t sequence)
      : id(sequence), stub(server.NewStub()) {
    context.set_deadline(std::chrono::system_clock::now() + 60s);
    stream = stub->AppendKv(&context, &reply);
  }
  void Send() {
    v1::AppendKvRequest request;
    request.set_sequence_id(id);
    request.set_first_position(position++);
    FillTensor(1, 1, 16, 1.0f, request.mutable_k());
    FillTensor(1, 1, 16, 1.0f, request.mutable_v());
    EXPECT_TRUE(stream->Write(request));
  }
  grpc::Status Finish() {
    stream->WritesDone();
    return stream->Finish();
  }
  const uint64_t id;
  const std::unique_ptr<v1::Attnd::Stub> stub;
  grpc::ClientContext context;
  v1::AppendKvResponse reply;
  std::unique_ptr<grpc::ClientWriter<v1::AppendKvRequest>> stream;
  uint64_t position = 0;
};

TEST_F(ServedLeasesTest, ALeaseBeyondAWeekIsRefusedByName) {
  uint64_t id = 0;
  for (const uint64_t lease : {uint64_t{604801}, uint64_t{0xffffffff}}) {
    const grpc::Status status = TryOpen(lease, &id);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("lease_seconds is " + std::to_string(lease)));
    EXPECT_THAT(status.error_message(), HasSubstr("allowed are 0..604800"));
  }
  EXPECT_EQ(server_->Metric("attnd_sequences"), 0);
  EXPECT_TRUE(TryOpen(604800, &id).ok());
}

TEST_F(ServedLeasesTest, ListingsTellWhatIsLeftAndRenewNothing) {
  const uint64_t id = Open(), forever = Open(0s);
  clock_.Advance(20500ms);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(Listed(id).lease_seconds(), 60u);
    EXPECT_EQ(Listed(id).lease_left_seconds(), 40u);
    EXPECT_EQ(Listed(forever).lease_seconds(), 0u);
    EXPECT_EQ(Listed(forever).lease_left_seconds(), 0u);
  }
  EXPECT_EQ(server_->Metric("attnd_sequences"), 2);
  EXPECT_EQ(server_->Metric("attnd_leased_sequences"), 1);
}

TEST_F(ServedLeasesTest, RenewLeaseRenews) {
  const uint64_t id = Open(), forever = Open(0s);
  v1::RenewLeaseResponse reply;
  for (int i = 0; i < 3; ++i) {
    PassLease(kLease - 1s);
    ASSERT_TRUE(Renew(id, &reply).ok());
    EXPECT_EQ(reply.lease_seconds(), 60u);
    EXPECT_EQ(Listed(id).lease_left_seconds(), 60u);
  }
  ASSERT_TRUE(Renew(forever, &reply).ok());
  EXPECT_EQ(reply.lease_seconds(), 0u);
  EXPECT_EQ(Renew(id, &reply, "other").error_code(), StatusCode::NOT_FOUND);
  PassLease();
  const grpc::Status ended = Renew(id, &reply);
  EXPECT_EQ(ended.error_code(), StatusCode::NOT_FOUND);
  EXPECT_THAT(ended.error_message(),
              HasSubstr("no call named it for 60 s, so its lease has ended"));
}

// Of two clients one decodes on; the other one is gone, or its stream is open and silent.
TEST_F(ServedLeasesTest, ASilentClientLosesItsSequenceAndABusyOneKeepsIts) {
  const uint64_t busy_id = Open(), silent_id = Open(), gone_id = Open();
  Decoder busy(*server_), silent(*server_);
  EXPECT_EQ(silent.Step(silent_id).first, 0);
  {
    Decoder gone(*server_);
    EXPECT_EQ(gone.Step(gone_id).first, 0);
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(busy.Step(busy_id).first, 0);
    PassLease(kLease / 2);
  }
  EXPECT_TRUE(IsOpen(busy_id));
  EXPECT_FALSE(IsOpen(gone_id));
  EXPECT_FALSE(IsOpen(silent_id));
  const auto [code, message] = silent.Step(silent_id);
  EXPECT_EQ(code, StatusCode::NOT_FOUND);
  EXPECT_THAT(message, HasSubstr("its lease has ended"));
  EXPECT_EQ(busy.Step(busy_id).first, 0) << "on its old stream";
}

TEST_F(ServedLeasesTest, AnUploadHoldsItsSequenceBetweenChunks) {
  const uint64_t id = Open();
  Uploader upload(*server_, id);
  upload.Send();
  ASSERT_TRUE(Within([&] { return Listed(id).committed_tokens() == 1; }));
  PassLease(10 * kLease);
  EXPECT_EQ(Listed(id).lease_left_seconds(), 60u);
  upload.Send();
  const grpc::Status status = upload.Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(upload.reply.committed_tokens(), 2u);
  PassLease(kLease - 1s);
  EXPECT_TRUE(IsOpen(id)) << "the lease counts from the upload's end";
  PassLease(1s);
  EXPECT_FALSE(IsOpen(id));
}

TEST_F(ServedLeasesTest, AnUploadWhoseClientIsGoneHoldsNothing) {
  const uint64_t id = Open();
  {
    Uploader upload(*server_, id);
    upload.Send();
    ASSERT_TRUE(Within([&] { return Listed(id).committed_tokens() == 1; }));
    upload.context.TryCancel();
    EXPECT_EQ(upload.Finish().error_code(), StatusCode::CANCELLED);
  }
  EXPECT_TRUE(Within([&] { return server_->Metric("attnd_streams") == 0; }));
  PassLease();
  EXPECT_FALSE(IsOpen(id));
}

}  // namespace
}  // namespace attnd::testing
