// SPDX-License-Identifier: Apache-2.0
//
// Goal: a server tells a client's stream whether the two get time slices of one GPU, by the time
// that an empty kernel takes while the stream waits, in the reply, in GetServerInfo and in metrics;
// and no client, whatever it writes or leaves out, holds the server up. Method: a client that
// writes each word itself, to a whole server over a fake device that says how long its kernels
// took.
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/backend.h"
#include "tests/gpu/fake_device.h"
#include "tests/server/memory_fixture.h"
#include "tests/server/server_fixture.h"

namespace attnd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

constexpr uint32_t kTurns = 4;
constexpr uint32_t kEpoch = 1000;

class RoundTripTest : public ::testing::Test {
 protected:
  RoundTripTest() { options_.allow_client_memory = true; }
  void Start(const std::string& backend, const std::string& mps_control = "") {
    options_.backend = backend;
    options_.device_memory_bytes = uint64_t{64} << 20;
    options_.step_workers = 2;
    const auto open = [this]() -> absl::StatusOr<std::unique_ptr<gpu::Device>> {
      gpu::test::FakePair fake = gpu::test::MakeFakeDevice(uint64_t{1} << 30);
      device_ = std::move(fake.control);
      return std::move(fake.device);
    };
    auto made = server::MakeBackend(options_, open, /*on_gpu_fault=*/nullptr);
    ASSERT_TRUE(made.ok()) << made.status();
    auto engine = engine::Engine::Create(server::ToEngineOptions(options_, server::Machine()),
                                         *std::move(made), nullptr);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    server_ = std::make_unique<TestServer>(options_, engine_.get(), mps_control);
    if (options_.allow_client_memory) client_ = std::make_unique<MemoryPassClient>(*server_);
  }

  v1::DecodeRequest Request(uint32_t turns = kTurns) { return RequestOf(client_.get(), turns); }
  static v1::DecodeRequest RequestOf(MemoryPassClient* client, uint32_t turns) {
    v1::DecodeRequest request;
    request.set_step_id(77);
    request.mutable_round_trip()->set_turns(turns);
    v1::PassMemory* const memory = request.mutable_round_trip()->mutable_memory();
    memory->set_region_id(client->region_id());
    memory->set_first_epoch(kEpoch);
    memory->set_device_rings(true);
    plane::WriteWord(&client->words()->ring, kEpoch - 1);
    return request;
  }
  // The server's kernel takes so long in this turn.
  void Turn(uint32_t number, std::chrono::nanoseconds time) {
    device_->Set({.empty_run = time});
    plane::WriteWord(&client_->words()->ring, kEpoch + number);
    EXPECT_TRUE(Answers(number));
  }
  // While the client's measurement is under way.
  void RefuseASecond(MemoryPassClient* second, v1::DecodeResponse* refused) {
    ASSERT_TRUE(client_->Declare(Request()));
    Turn(0, 20us);
    ASSERT_TRUE(second->Declare(RequestOf(second, kTurns)));
    *refused = second->Reply();
    EXPECT_EQ(refused->status().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  }
  bool Answers(uint32_t number) {
    return Within([&] { return plane::ReadWord(&client_->words()->answer) == kEpoch + number; });
  }
  v1::DecodeResponse Measure(const std::vector<std::chrono::nanoseconds>& times) {
    EXPECT_TRUE(client_->Declare(Request(static_cast<uint32_t>(times.size()))));
    for (uint32_t i = 0; i < times.size(); ++i) Turn(i, times[i]);
    return client_->Reply();
  }
  // Of a request that is not answered in all its turns.
  std::string Refusal(const v1::DecodeRequest& request, grpc::StatusCode code) {
    EXPECT_TRUE(client_->Declare(request));
    const v1::DecodeResponse reply = client_->Reply();
    EXPECT_EQ(reply.status().code(), code) << reply.status().message();
    EXPECT_FALSE(reply.has_round_trip());
    return reply.status().message();
  }
  v1::GetServerInfoResponse Info() {
    grpc::ClientContext context;
    v1::GetServerInfoResponse reply;
    EXPECT_TRUE(server_->NewStub()->GetServerInfo(&context, {}, &reply).ok());
    return reply;
  }
  double Trips(const std::string& outcome) {
    return server_->Metric("attnd_round_trips_total{outcome=" + outcome + "}");
  }

  TempDir directory_;
  server::ServerOptions options_ = TestOptions(directory_.path());
  std::shared_ptr<gpu::test::FakeControl> device_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<MemoryPassClient> client_;
};

TEST_F(RoundTripTest, SideBySideNobodyIsWarned) {
  Start("cuda");
  EXPECT_FALSE(Info().has_round_trip());
  const v1::DecodeResponse reply = Measure({20us, 21us, 22us, 23us});
  EXPECT_EQ(reply.status().code(), 0);
  EXPECT_EQ(reply.step_id(), 77u);
  EXPECT_FLOAT_EQ(reply.round_trip().device_us(), 21);
  EXPECT_FALSE(reply.round_trip().time_slices());
  EXPECT_EQ(reply.round_trip().advice(), "");
  EXPECT_EQ(device_->empty_runs(), 5u);  // one before the first turn
  // The pipe alone would have said otherwise.
  EXPECT_EQ(Info().gpu_sharing(), v1::GPU_SHARING_TIME_SLICES);
  EXPECT_EQ(Info().round_trip().SerializeAsString(), reply.round_trip().SerializeAsString());
  EXPECT_EQ(Trips("side_by_side"), 1);
  EXPECT_EQ(Trips("time_slices"), 0);
}

TEST_F(RoundTripTest, TimeSlicesAreTold) {
  Start("cuda");
  const v1::DecodeResponse reply = Measure({20us, 1900us, 2000us, 2100us});
  EXPECT_FLOAT_EQ(reply.round_trip().device_us(), 1900);
  EXPECT_TRUE(reply.round_trip().time_slices());
  for (const char* const part : {"1900 us", "does not run under MPS", "docs/OPERATIONS.md"}) {
    EXPECT_THAT(reply.round_trip().advice(), HasSubstr(part));
  }
  EXPECT_EQ(Info().round_trip().SerializeAsString(), reply.round_trip().SerializeAsString());
  EXPECT_EQ(Trips("time_slices"), 1);
  EXPECT_EQ(server_->Metric("attnd_round_trip_seconds"), 1);
}

// Of a daemon that is dead, or of another one than the client's.
TEST_F(RoundTripTest, TimeSlicesAreToldBesideADaemonsPipe) {
  Start("cuda", "/pipes/control");
  const v1::DecodeResponse reply = Measure({2ms, 2ms});
  EXPECT_EQ(Info().gpu_sharing(), v1::GPU_SHARING_MPS);
  EXPECT_TRUE(reply.round_trip().time_slices());
  EXPECT_THAT(reply.round_trip().advice(), HasSubstr("see that the daemon lives"));
  EXPECT_THAT(reply.round_trip().advice(), Not(HasSubstr("does not run under MPS")));
}

// A stall of the server or of its GPU passes; time slices do not.
TEST_F(RoundTripTest, TheLeastDecidesAndTheFirstTurnIsNotMeasured) {
  Start("cuda");
  EXPECT_FLOAT_EQ(Measure({2ms, 20us}).round_trip().device_us(), 20);
  EXPECT_FALSE(Measure({20us, 2ms, 2ms, 2ms, 30us}).round_trip().time_slices());
  EXPECT_TRUE(Measure({20us, 2ms, 2ms, 2ms}).round_trip().time_slices());
  EXPECT_FLOAT_EQ(Measure({20us, 4ms, 40us, 3ms, 30us}).round_trip().device_us(), 30);
  EXPECT_FALSE(Measure({1ms, 299us}).round_trip().time_slices());
  EXPECT_TRUE(Measure({20us, 300us}).round_trip().time_slices());
}

// Rings may be looked for, or wake the server. No kernel waits for a host's, so that it tells
// nobody else how the GPU is shared.
TEST_F(RoundTripTest, AHostMayMeasureForItself) {
  Start("cuda");
  const v1::DecodeResponse streams = Measure({2ms, 2ms});
  v1::DecodeRequest request = Request(2);
  request.mutable_round_trip()->mutable_memory()->set_device_rings(false);
  ASSERT_TRUE(client_->Declare(request));
  Turn(0, 20us);
  Turn(1, 20us);
  EXPECT_FALSE(client_->Reply().round_trip().time_slices());
  EXPECT_EQ(Info().round_trip().SerializeAsString(), streams.round_trip().SerializeAsString());
  EXPECT_EQ(Trips("side_by_side"), 0);
  EXPECT_EQ(Trips("time_slices"), 1);
}

TEST_F(RoundTripTest, AStreamGoesOn) {
  Start("auto");
  Measure({20us, 20us});
  v1::OpenSequenceResponse opened;
  grpc::ClientContext context;
  ASSERT_TRUE(server_->NewStub()->OpenSequence(&context, SmallModel(), &opened).ok());
  ASSERT_TRUE(client_->Declare(SmallStep(opened.sequence_id())));
  const v1::DecodeResponse step = client_->Reply();
  EXPECT_EQ(step.status().code(), 0) << step.status().message();
  EXPECT_FALSE(step.has_round_trip());
  EXPECT_TRUE(Measure({20us, 20us}).has_round_trip());
}

TEST_F(RoundTripTest, WhatIsRefusedIsNamed) {
  Start("cuda");
  const auto refusal = [&](const auto& change) {
    v1::DecodeRequest request = Request();
    change(&request);
    return Refusal(request, grpc::StatusCode::INVALID_ARGUMENT);
  };
  const auto memory = [](v1::DecodeRequest* r) {
    return r->mutable_round_trip()->mutable_memory();
  };
  for (const uint32_t turns : {0u, 1u, 65u}) {
    EXPECT_THAT(refusal([&](auto* r) { r->mutable_round_trip()->set_turns(turns); }),
                HasSubstr("round_trip.turns is " + std::to_string(turns) + "; allowed are 2..64"));
  }
  EXPECT_THAT(refusal([&](auto* r) { memory(r)->mutable_out()->set_offset(64); }),
              HasSubstr("round_trip.memory has spans"));
  EXPECT_THAT(refusal([&](auto* r) { memory(r)->set_spin_us(10'001); }),
              HasSubstr("round_trip.memory.spin_us is 10001; allowed are 0..10000"));
  EXPECT_THAT(refusal([&](auto* r) { memory(r)->set_words_offset(8192); }),
              HasSubstr("round_trip.memory.words"));
  EXPECT_THAT(refusal([&](auto* r) { *r->add_rows() = SmallStep().rows(0); }),
              HasSubstr("round_trip is there beside other fields"));
  EXPECT_THAT(refusal([&](auto* r) { r->mutable_begin_pass()->set_layers(1); }),
              HasSubstr("round_trip is there beside other fields"));
  EXPECT_THAT(refusal([&](auto* r) { r->add_complete_prefills(1); }),
              HasSubstr("complete_prefills is there beside other fields"));
  v1::DecodeRequest unknown = Request();
  memory(&unknown)->set_region_id(1);
  Refusal(unknown, grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(device_->empty_runs(), 0u);
  EXPECT_EQ(Trips("failed"), 0);
  EXPECT_TRUE(Measure({20us, 20us}).has_round_trip());
}

// A kernel that waits goes on at once.
TEST_F(RoundTripTest, ARefusalIsInTheWordsToo) {
  Start("cuda");
  for (const uint32_t turns : {0u, 1u, 65u}) {
    Refusal(Request(turns), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_TRUE(Answers(turns)) << turns;
  }
  v1::DecodeRequest spinning = Request();
  spinning.mutable_round_trip()->mutable_memory()->set_spin_us(10'001);
  Refusal(spinning, grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(Answers(kTurns));
  v1::DecodeRequest mixed = Request(kTurns + 1);
  mixed.set_deadline_us(1);
  Refusal(mixed, grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(Answers(kTurns + 1));
}

// Before the client has rung.
TEST_F(RoundTripTest, AServerWithoutAGpuSaysSo) {
  options_.reply_timeout_s = 60;
  Start("cpu");
  ASSERT_TRUE(client_->Declare(Request()));
  EXPECT_TRUE(Answers(kTurns));
  EXPECT_EQ(client_->Reply().status().code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_FALSE(Info().has_round_trip());
  EXPECT_EQ(Trips("failed"), 1);
}

TEST_F(RoundTripTest, AGpuThatHasFailedIsToldBeforeTheFirstRing) {
  options_.reply_timeout_s = 60;
  Start("auto");
  device_->Set({.call = 0});
  ASSERT_TRUE(client_->Declare(Request()));
  EXPECT_TRUE(Answers(kTurns));
  const v1::DecodeResponse reply = client_->Reply();
  EXPECT_EQ(reply.status().code(), grpc::StatusCode::UNAVAILABLE) << reply.status().message();
  EXPECT_THAT(reply.status().message(), HasSubstr("the GPU has failed"));
}

TEST_F(RoundTripTest, AGpuThatFailsEndsIt) {
  Start("auto");
  ASSERT_TRUE(client_->Declare(Request()));
  Turn(0, 20us);
  device_->Set({.call = 0});
  plane::WriteWord(&client_->words()->ring, kEpoch + 1);
  EXPECT_TRUE(Answers(kTurns));
  const v1::DecodeResponse reply = client_->Reply();
  EXPECT_EQ(reply.status().code(), grpc::StatusCode::UNAVAILABLE) << reply.status().message();
  EXPECT_THAT(reply.status().message(), HasSubstr("the GPU has failed"));
  EXPECT_EQ(Trips("failed"), 1);
}

TEST_F(RoundTripTest, AClientThatDoesNotRingIsGivenUp) {
  options_.reply_timeout_s = 1;
  Start("cuda");
  ASSERT_TRUE(client_->Declare(Request()));
  EXPECT_TRUE(Answers(kTurns));
  const v1::DecodeResponse reply = client_->Reply();
  EXPECT_EQ(reply.status().code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(reply.status().message(), "turn 0 of the round trip was not rung for in time");
  EXPECT_TRUE(Measure({20us, 20us}).has_round_trip());
}

TEST_F(RoundTripTest, AnotherValueInTheRingWordGivesItUp) {
  Start("cuda");
  ASSERT_TRUE(client_->Declare(Request()));
  Turn(0, 20us);
  plane::WriteWord(&client_->words()->ring, kEpoch + 2);
  EXPECT_TRUE(Answers(kTurns));
  const v1::DecodeResponse reply = client_->Reply();
  EXPECT_EQ(reply.status().code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(reply.status().message(),
            "the ring word is 1002; turn 1 has epoch 1001, and the word before it is 1000");
}

TEST_F(RoundTripTest, OneIsMeasuredAtATime) {
  Start("cuda");
  MemoryPassClient second(*server_);
  v1::DecodeResponse refused;
  ASSERT_NO_FATAL_FAILURE(RefuseASecond(&second, &refused));
  EXPECT_EQ(refused.status().message(),
            "round_trip: another client measures one; allowed is one at a time");
  EXPECT_EQ(plane::ReadWord(&second.words()->answer), kEpoch + kTurns);
  EXPECT_EQ(server_->Metric("attnd_rejections_total{reason=client_memory}"), 1);
  for (uint32_t turn = 1; turn < kTurns; ++turn) Turn(turn, 20us);
  EXPECT_TRUE(client_->Reply().has_round_trip());
  EXPECT_EQ(Trips("failed"), 0);
  EXPECT_TRUE(Measure({20us, 20us}).has_round_trip());
}

TEST_F(RoundTripTest, ItTakesThePlaceOfAPassOverMemory) {
  options_.max_memory_passes = 1;
  Start("cuda");
  MemoryPassClient second(*server_);
  v1::DecodeResponse refused;
  ASSERT_NO_FATAL_FAILURE(RefuseASecond(&second, &refused));
  EXPECT_THAT(refused.status().message(), HasSubstr("max_memory_passes: 1 are under way"));
}

TEST_F(RoundTripTest, AServerThatSharesNoMemorySaysSo) {
  options_.allow_client_memory = false;
  Start("cuda");
  v1::DecodeRequest request;
  request.mutable_round_trip()->set_turns(kTurns);
  grpc::ClientContext context;
  const auto stub = server_->NewStub();
  const auto stream = stub->Decode(&context);
  v1::DecodeResponse reply;
  ASSERT_TRUE(stream->Write(request) && stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(reply.status().message(),
            "round_trip.memory: the server was started without --allow-client-memory");
  context.TryCancel();
}

// The layer that was answered is taken back, so that a step may append it again, with other bytes.
TEST_F(RoundTripTest, APassUnderWayIsGivenUp) {
  Start("auto");
  v1::OpenSequenceResponse opened;
  grpc::ClientContext context;
  v1::OpenSequenceRequest model = SmallModel();
  model.mutable_model()->mutable_shape()->set_layers(2);
  ASSERT_TRUE(server_->NewStub()->OpenSequence(&context, model, &opened).ok());
  v1::DecodeRequest pass = SmallStep(opened.sequence_id());
  pass.mutable_begin_pass()->set_layers(2);
  ASSERT_TRUE(client_->Declare(pass));
  const v1::DecodeResponse first = client_->Reply();
  ASSERT_EQ(first.status().code(), 0) << first.status().message();
  ASSERT_EQ(first.rows_size(), 0);  // no fault to tell of
  EXPECT_TRUE(Measure({20us, 20us}).has_round_trip());
  v1::DecodeRequest next = SmallStep();
  next.clear_rows();
  next.set_layer(1);
  ASSERT_TRUE(client_->Declare(next));
  EXPECT_EQ(client_->Reply().status().code(), grpc::StatusCode::INVALID_ARGUMENT);
  *pass.mutable_k()->mutable_data() = std::string(pass.k().data().size(), '\0');
  ASSERT_TRUE(client_->Declare(pass));
  const v1::DecodeResponse again = client_->Reply();
  ASSERT_EQ(again.status().code(), 0) << again.status().message();
  EXPECT_EQ(again.rows_size(), 0) << again.rows(0).status().message();
}

TEST_F(RoundTripTest, AServerThatEndsGivesItUp) {
  options_.reply_timeout_s = 60;
  Start("cuda");
  ASSERT_TRUE(client_->Declare(Request()));
  Turn(0, 20us);
  server_->server().Shutdown({});
  EXPECT_EQ(plane::ReadWord(&client_->words()->answer), kEpoch + kTurns);
  EXPECT_EQ(client_->Reply().status().code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(client_->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(RoundTripTest, AClientThatLeavesIsGivenUp) {
  options_.reply_timeout_s = 60;
  Start("cuda");
  ASSERT_TRUE(client_->Declare(Request()));
  Turn(0, 20us);
  client_->LeaveStream();
  EXPECT_TRUE(Answers(kTurns));
  EXPECT_TRUE(Within([&] { return server_->Metric("attnd_memory_passes") == 0; }));
}

}  // namespace
}  // namespace attnd::testing
