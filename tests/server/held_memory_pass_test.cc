// SPDX-License-Identifier: Apache-2.0
//
// Goal: a pass over memory keeps its promises whenever its client rings, changes what it has
// written, or goes: memory_pass_test.cc, where time matters. Method: a client that writes each word
// itself, to a server with an engine that waits.
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/memory_fixture.h"
#include "tests/server/server_fixture.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

class HeldMemoryPassTest : public FakeEngineFixture {
 protected:
  HeldMemoryPassTest() { options_.allow_client_memory = true; }
};

// What the client writes after its ring is of no effect: the server has copied what was there.
TEST_F(HeldMemoryPassTest, DataThatChangesUnderWayIsNotSeen) {
  StartServer();
  MemoryPassClient client(*server_);
  engine_.Hold();
  ASSERT_TRUE(client.Declare(client.Declaration()));
  client.Ring(0, 3.0f);
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  client.floats(client.kQ)[0] = 4.0f;
  // Nor are the server's own words believed: it goes on to layer 1 alone.
  client.words()->answer = 77;
  engine_.Release();
  ASSERT_TRUE(client.WaitFor(0));
  EXPECT_EQ(engine_.first_of_q(), 3.0f);
  client.Ring(1, 5.0f);
  ASSERT_TRUE(client.WaitFor(1));
  EXPECT_EQ(engine_.first_of_q(), 5.0f);
  EXPECT_EQ(client.Reply().status().code(), 0);
}

// What the engine's backend writes in the client's dtype is the answer as it is.
TEST_F(HeldMemoryPassTest, AnswersInTheClientsDtypeAreNotTouched) {
  StartServer();
  MemoryPassClient client(*server_);
  const auto out_of_pass = [&](v1::DType dtype) {
    v1::DecodeRequest request = client.Declaration();
    request.set_output_dtype(dtype);
    EXPECT_TRUE(client.Declare(request));
    for (uint32_t layer = 0; layer < MemoryPassClient::kLayers; ++layer) {
      client.Ring(layer);
      EXPECT_TRUE(client.WaitFor(layer));
    }
    EXPECT_EQ(client.Reply().status().code(), 0);
    return client.floats(client.kOut);
  };
  const auto first_half = [](const float* out) {
    uint16_t bits = 0;
    std::memcpy(&bits, out, sizeof(bits));
    return Bf16ToFloat(bits);
  };
  EXPECT_EQ(first_half(out_of_pass(v1::DTYPE_BF16)), 1.0f) << "rounded by the server";
  engine_.WriteFinalAnswers();
  EXPECT_EQ(first_half(out_of_pass(v1::DTYPE_BF16)), 2.0f);
  EXPECT_EQ(out_of_pass(v1::DTYPE_FP32)[0], 1.0f) << "floats have no other place";
}

// The engine gets ready for a layer that is rung for at once, gives that up when the ring takes its
// time, and does so no more until a ring comes at once again.
TEST_F(HeldMemoryPassTest, LayersArePreparedWhereRingsArePrompt) {
  engine_.MapClientMemory();
  StartServer();
  MemoryPassClient client(*server_);
  v1::DecodeRequest request = client.Declaration();
  constexpr uint32_t kLayers = 1000;
  request.mutable_begin_pass()->set_layers(kLayers);
  ASSERT_TRUE(client.Declare(request));
  EXPECT_TRUE(Within([&] { return engine_.forgotten() == 1; })) << "the first layer is not";
  client.Ring(0);
  ASSERT_TRUE(client.WaitFor(0));
  EXPECT_TRUE(Within([&] { return engine_.prepared() == 1; }));
  EXPECT_TRUE(Within([&] { return engine_.forgotten() == 2; })) << "a millisecond is over";
  client.Ring(1);
  ASSERT_TRUE(client.WaitFor(1));
  EXPECT_TRUE(Within([&] { return engine_.forgotten() == 3; })) << "layer 2 is not prepared";
  EXPECT_EQ(engine_.prepared(), 1);
  // Without a sleep between an answer and the next ring, which a busy machine may yet put there.
  uint32_t layer = 2;
  for (; layer < kLayers && engine_.prepared() == 1; ++layer) {
    client.Ring(layer);
    ASSERT_TRUE(client.LookFor(layer));
  }
  EXPECT_GE(engine_.prepared(), 2) << "a layer behind a prompt ring";
  bool begun = false;  // what is prepared, in the client's memory
  for (; layer < kLayers; ++layer) {
    client.Ring(layer, static_cast<float>(layer));
    ASSERT_TRUE(client.LookFor(layer));
    begun |= engine_.begun_with() == static_cast<float>(layer);
    EXPECT_EQ(engine_.first_of_q(), static_cast<float>(layer));
  }
  EXPECT_TRUE(begun);
  EXPECT_EQ(client.Reply().status().code(), 0);
  EXPECT_TRUE(Within([&] { return engine_.prepared() + engine_.forgotten() >= int{kLayers}; }));
}

// A device that takes a client's turn answers in the client's memory and tells the client, who may
// ring for the next layer while the server still counts this one. It tells none that must be woken,
// none that wants floats, and none whose answer comes where the server still reads.
TEST_F(HeldMemoryPassTest, ADeviceTellsItsClient) {
  engine_.MapClientMemory();
  engine_.TellClients(true);
  StartServer();
  MemoryPassClient client(*server_);
  constexpr uint32_t kLayers = 200;
  const auto layers_told = [&](bool device_rings, v1::DType dtype,
                               const std::function<void(v1::PassMemory*)>& change = nullptr) {
    v1::DecodeRequest request = client.Declaration();
    request.set_output_dtype(dtype);
    request.mutable_begin_pass()->set_layers(kLayers);
    request.mutable_begin_pass()->mutable_memory()->set_device_rings(device_rings);
    request.mutable_begin_pass()->mutable_memory()->set_spin_us(1000);
    if (change != nullptr) change(request.mutable_begin_pass()->mutable_memory());
    EXPECT_TRUE(client.Declare(request));
    int told = 0;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      client.words()->failed_rows = 9;  // what an earlier pass left
      client.RingAsDevice(layer);
      EXPECT_TRUE(client.LookFor(layer));
      EXPECT_EQ(client.words()->failed_rows, 0u);
      uint16_t first = 0;
      std::memcpy(&first, client.floats(client.kOut), sizeof(first));
      const bool three = dtype == v1::DTYPE_BF16 && Bf16ToFloat(first) == 3.0f;
      EXPECT_EQ(client.floats(client.kLse)[0], three ? 4.0f : 0.0f);
      told += three ? 1 : 0;
      std::memset(client.floats(client.kOut), 0, 64);
    }
    const v1::DecodeResponse reply = client.Reply();
    EXPECT_EQ(reply.status().code(), 0) << reply.status().message();
    client.Skip(kLayers - MemoryPassClient::kLayers);
    return told;
  };
  // None of a pass whose rings a busy machine has all held up.
  int told = 0;
  for (int pass = 0; pass < 100 && told == 0; ++pass) told = layers_told(true, v1::DTYPE_BF16);
  EXPECT_GT(told, 0);
  EXPECT_GT(engine_.turns(), 0);
  EXPECT_EQ(layers_told(true, v1::DTYPE_FP32), 0);
  EXPECT_EQ(layers_told(false, v1::DTYPE_BF16), 0);
  const int places = engine_.places();
  EXPECT_GT(places, 0);
  const std::function<void(v1::PassMemory*)> overlaps[] = {
      [](v1::PassMemory* memory) { memory->mutable_out()->set_offset(memory->k().offset()); },
      [](v1::PassMemory* memory) { memory->mutable_lse()->set_offset(memory->q().offset() + 64); },
  };
  for (const auto& overlap : overlaps) {
    const int turns = engine_.turns();
    for (int pass = 0; pass < 100 && engine_.turns() == turns; ++pass) {
      layers_told(true, v1::DTYPE_BF16, overlap);
    }
    EXPECT_GT(engine_.turns(), turns);
    EXPECT_EQ(engine_.places(), places);
  }
}

// A device that fails when the client may have its answer: the pass is over, and the stream is not.
TEST_F(HeldMemoryPassTest, ADeviceMayFailBehindItsAnswer) {
  engine_.MapClientMemory();
  engine_.TellClients(true);
  StartServer();
  MemoryPassClient client(*server_);
  constexpr uint32_t kLayers = 200;
  const auto reply_of_pass = [&] {
    v1::DecodeRequest request = client.Declaration();
    request.set_output_dtype(v1::DTYPE_BF16);
    request.mutable_begin_pass()->set_layers(kLayers);
    request.mutable_begin_pass()->mutable_memory()->set_device_rings(true);
    request.mutable_begin_pass()->mutable_memory()->set_spin_us(1000);
    EXPECT_TRUE(client.Declare(request));
    const uint32_t over = client.epoch() + kLayers;
    const auto answer = [&] { return plane::ReadWord(&client.words()->answer); };
    for (uint32_t layer = 0; layer < kLayers && answer() != over; ++layer) {
      client.RingAsDevice(layer);
      EXPECT_TRUE(Within([&] { return answer() == client.epoch() + layer || answer() == over; }));
    }
    v1::DecodeResponse reply = client.Reply();
    EXPECT_EQ(answer() == over, reply.status().code() != 0);
    client.Skip(kLayers - MemoryPassClient::kLayers);
    return reply;
  };
  engine_.FailBehindAnswers(true);
  v1::DecodeResponse reply = reply_of_pass();
  for (int pass = 0; pass < 100 && reply.status().code() == 0; ++pass) reply = reply_of_pass();
  EXPECT_EQ(reply.status().code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(reply.status().message(), "planted");
  engine_.FailBehindAnswers(false);
  EXPECT_EQ(reply_of_pass().status().code(), StatusCode::OK);
}

// Regions are mapped for the device as long as they are there.
TEST_F(HeldMemoryPassTest, RegionsAreMappedForADevice) {
  engine_.MapClientMemory();
  StartServer();
  {
    MemoryPassClient client(*server_), other(*server_);
    EXPECT_EQ(engine_.mapped_bytes(), 2 * MemoryPassClient::kRegionBytes);
    ASSERT_TRUE(client.Declare(client.Declaration()));
    client.Ring(0);
    ASSERT_TRUE(client.WaitFor(0));
    other.LeaveMemory();
    EXPECT_TRUE(Within([&] { return engine_.mapped_bytes() == MemoryPassClient::kRegionBytes; }));
    client.LeaveMemory();  // in the middle of a pass, which goes on
    client.Ring(1);
    ASSERT_TRUE(client.WaitFor(1));
    EXPECT_EQ(client.Reply().status().code(), 0);
    EXPECT_TRUE(Within([&] { return engine_.mapped_bytes() == 0; }));
  }
}

// A first layer is prepared once the pass before had its first ring at once, until one takes its
// time.
TEST_F(HeldMemoryPassTest, AFirstLayerIsPreparedWhereFirstRingsArePrompt) {
  StartServer();
  MemoryPassClient client(*server_);
  const auto prepared_first = [&](bool rings_at_once) {
    const int prepared = engine_.prepared(), ready = prepared + engine_.forgotten();
    EXPECT_TRUE(client.Declare(client.Declaration()));
    if (!rings_at_once) {
      EXPECT_TRUE(Within([&] { return engine_.prepared() + engine_.forgotten() > ready; }));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    const bool first = engine_.prepared() > prepared;
    for (uint32_t layer = 0; layer < MemoryPassClient::kLayers; ++layer) {
      client.Ring(layer);
      EXPECT_TRUE(client.LookFor(layer));
    }
    EXPECT_EQ(client.Reply().status().code(), 0);
    return first;
  };
  EXPECT_FALSE(prepared_first(false)) << "nothing has told yet";
  EXPECT_FALSE(prepared_first(false)) << "the first ring took its time";
  // Rings that are there before the pass is.
  bool prepared = false;
  for (int pass = 0; pass < 100 && !prepared; ++pass) {
    prepared_first(true);
    prepared = prepared_first(false);
  }
  EXPECT_TRUE(prepared);
  EXPECT_FALSE(prepared_first(false));
}

TEST_F(HeldMemoryPassTest, ACancelledLayerEndsWithItsPass) {
  StartServer();
  MemoryPassClient client(*server_);
  engine_.Hold();
  ASSERT_TRUE(client.Declare(client.Declaration()));
  client.Ring(0);
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  client.LeaveStream();
  EXPECT_TRUE(Within([&] { return engine_.passes_over() == 1; }));
  EXPECT_EQ(engine_.cancelled(), 1);
  EXPECT_TRUE(client.WaitFor(2));
  EXPECT_TRUE(Within([&] { return engine_.released_writers() == 1; }));
}

// Noticed while the server waits, long before reply_timeout_s.
TEST_F(HeldMemoryPassTest, ADeadlineEndsAPassThatNobodyRingsFor) {
  options_.reply_timeout_s = 60;
  StartServer();
  MemoryPassClient client(*server_);
  v1::DecodeRequest request = client.Declaration();
  request.mutable_begin_pass()->set_deadline_us(100'000);
  ASSERT_TRUE(client.Declare(request));
  ASSERT_TRUE(client.WaitFor(2));
  EXPECT_EQ(engine_.passes_over(), 1);
  EXPECT_EQ(client.Reply().status().code(), StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(HeldMemoryPassTest, AClientIsToldWhenThePassHasBeenTakenBack) {
  StartServer();
  MemoryPassClient client(*server_);
  ASSERT_TRUE(client.Declare(client.Declaration()));
  client.Ring(0);
  ASSERT_TRUE(client.WaitFor(0));
  engine_.HoldPassEnds();
  plane::WriteWord(&client.words()->ring, client.epoch() + 7);
  std::this_thread::sleep_for(100ms);
  EXPECT_EQ(plane::ReadWord(&client.words()->answer), client.epoch());
  engine_.ReleasePassEnds();
  EXPECT_TRUE(client.WaitFor(2));
  EXPECT_EQ(client.Reply().status().code(), StatusCode::INVALID_ARGUMENT);
}

TEST_F(HeldMemoryPassTest, PassesBeyondTheirLimitAreRefused) {
  options_.max_memory_passes = 2;
  StartServer();
  MemoryPassClient first(*server_), second(*server_), third(*server_);
  for (MemoryPassClient* client : {&first, &second}) {
    ASSERT_TRUE(client->Declare(client->Declaration()));
    client->Ring(0);
    ASSERT_TRUE(client->WaitFor(0));
  }
  ASSERT_TRUE(third.Declare(third.Declaration()));
  const v1::DecodeResponse refused = third.Reply();
  EXPECT_EQ(refused.status().code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.status().message(), HasSubstr("max_memory_passes: 2"));
  EXPECT_EQ(server_->Metric("attnd_rejections_total{reason=client_memory}"), 1);
  EXPECT_EQ(server_->Metric("attnd_memory_passes"), 2);
  EXPECT_EQ(server_->Metric("attnd_memory_regions"), 3);
  EXPECT_EQ(server_->Metric("attnd_memory_region_bytes"), 3 * MemoryPassClient::kRegionBytes);
  first.Ring(1);
  EXPECT_EQ(first.Reply().status().code(), 0);
  EXPECT_EQ(third.Pass(1, 0).status().code(), 0);
}

// A parked pass neither keeps others from their steps nor the server from its end.
TEST_F(HeldMemoryPassTest, AParkedPassStandsInNobodysWay) {
  options_.reply_timeout_s = 60;
  options_.step_workers = 1;
  StartServer();
  MemoryPassClient parked(*server_), other(*server_);
  ASSERT_TRUE(parked.Declare(parked.Declaration()));
  parked.Ring(0);
  ASSERT_TRUE(parked.WaitFor(0));
  ExpectAnswers();
  EXPECT_EQ(other.Pass(1, 0).status().code(), 0);
  const auto before = std::chrono::steady_clock::now();
  server_->server().Shutdown({});
  EXPECT_LT(std::chrono::steady_clock::now() - before, 4s);
  EXPECT_EQ(engine_.passes_over(), 2);
  EXPECT_EQ(plane::ReadWord(&parked.words()->answer), parked.epoch() + 2);
  v1::DecodeResponse reply = parked.Reply();
  EXPECT_EQ(reply.status().code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(parked.Finish().error_code(), StatusCode::UNAVAILABLE);
}

TEST_F(HeldMemoryPassTest, LayersThatMayReadDiskGoOn) {
  StartServer();
  engine_.ReadDisk();
  MemoryPassClient client(*server_);
  EXPECT_EQ(client.Pass(1, 0).status().code(), 0);
}

TEST_F(HeldMemoryPassTest, ItIsOffUnlessAllowed) {
  StartServer();
  MemoryPassClient client(*server_);
  const v1::DecodeRequest request = client.Declaration();
  v1::GetServerInfoResponse info;
  grpc::ClientContext with;
  ASSERT_TRUE(server_->NewStub()->GetServerInfo(&with, {}, &info).ok());
  EXPECT_EQ(info.client_memory().socket(), server_->address().substr(5) + ".memory");
  EXPECT_EQ(info.client_memory().passes(), options_.max_memory_passes);
  client.LeaveStream();
  server_.reset();
  options_.allow_client_memory = false;
  StartServer();
  grpc::ClientContext without, context;
  ASSERT_TRUE(server_->NewStub()->GetServerInfo(&without, {}, &info).ok());
  EXPECT_FALSE(info.has_client_memory());
  EXPECT_FALSE(MemoryClient::Connect(server_->address().substr(5) + ".memory", 1s).ok());
  const auto stub = server_->NewStub();
  const auto stream = stub->Decode(&context);
  v1::DecodeResponse reply;
  ASSERT_TRUE(stream->Write(request) && stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(reply.status().message(), HasSubstr("--allow-client-memory"));
  context.TryCancel();
  static_cast<void>(stream->Finish());
}

}  // namespace
}  // namespace attnd::testing
