// SPDX-License-Identifier: Apache-2.0
//
// Goal: a pass over memory keeps the promises of a pass (the proto, Decode and PassMemory) whatever
// its client writes or leaves out: errors name the field, nothing is half appended, and what was
// given up is so before the client can know. Method: a client that writes each word itself, to a
// server with the real engine. Where time matters: held_memory_pass_test.cc.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/memory_fixture.h"
#include "tests/server/server_fixture.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

class MemoryPassTest : public RealEngineFixture {
 protected:
  MemoryPassTest() {
    options_.allow_client_memory = true;
    options_.reply_timeout_s = 3;
    StartServer();
  }
  uint64_t Open(const std::string& tenant = "") {
    v1::OpenSequenceRequest request = SmallModel();
    request.mutable_model()->mutable_shape()->set_layers(MemoryPassClient::kLayers);
    v1::OpenSequenceResponse reply;
    grpc::ClientContext context;
    if (!tenant.empty()) context.AddMetadata("attnd-tenant", tenant);
    EXPECT_TRUE(stub_->OpenSequence(&context, request, &reply).ok());
    return reply.sequence_id();
  }
  // Tokens of each layer.
  std::vector<uint64_t> LayerTokens(uint64_t sequence) {
    for (const engine::SequenceInfo& info : engine_->List("", 0, 1000)) {
      if (info.id == sequence) return info.layer_tokens;
    }
    return {};
  }
};

TEST_F(MemoryPassTest, TokensAreCommittedAndRepeated) {
  MemoryPassClient client(*server_);
  const uint64_t sequence = Open();
  const v1::DecodeResponse first = client.Pass(sequence, 0, 2.0f);
  ASSERT_EQ(first.status().code(), 0) << first.status().message();
  ASSERT_EQ(first.rows_size(), 1);
  EXPECT_EQ(first.rows(0).stats().zone_tokens(), 2u);  // of two layers
  EXPECT_FALSE(first.has_out());
  EXPECT_EQ(first.step_id(), 1u);
  EXPECT_EQ(client.floats(client.kOut)[31], 2.0f);
  EXPECT_TRUE(std::isfinite(client.floats(client.kLse)[1]));
  EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{1, 1}));
  // The same again answers again, something else is refused, and the next token is appended.
  EXPECT_EQ(client.Pass(sequence, 0, 2.0f).rows(0).status().code(), 0);
  EXPECT_EQ(client.Pass(sequence, 0, 3.0f).rows(0).status().code(), StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(client.Pass(sequence, 1, 4.0f).rows(0).status().code(), 0);
  EXPECT_EQ(client.floats(client.kOut)[31], 4.0f);
  EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{2, 2}));
  EXPECT_EQ(server_->Metric("attnd_steps_total{code=OK}"), 8);
  EXPECT_TRUE(client.Finish().ok());
}

// With device_rings a ring that wakes nobody is answered at once. Without it such a ring is seen
// when the server looks at its stream, every 20 ms: so the test would see a field that is ignored.
TEST_F(MemoryPassTest, RingsOfADeviceAreLookedFor) {
  MemoryPassClient client(*server_);
  const uint64_t sequence = Open();
  std::vector<std::chrono::steady_clock::duration> times;
  for (uint64_t token = 0; token < 20; ++token) {
    v1::DecodeRequest request = client.Declaration(sequence, token);
    request.mutable_begin_pass()->mutable_memory()->set_device_rings(true);
    ASSERT_TRUE(client.Declare(request));
    for (uint32_t layer = 0; layer < MemoryPassClient::kLayers; ++layer) {
      std::this_thread::sleep_for(2ms);  // the server waits already
      const auto start = std::chrono::steady_clock::now();
      client.RingAsDevice(layer, 2.0f);
      while (plane::ReadWord(&client.words()->answer) != client.epoch() + layer) {
        ASSERT_LT(std::chrono::steady_clock::now() - start, 10s);
        std::this_thread::sleep_for(50us);
      }
      times.push_back(std::chrono::steady_clock::now() - start);
    }
    ASSERT_EQ(client.Reply().rows(0).status().code(), 0);
  }
  EXPECT_EQ(client.floats(client.kOut)[31], 2.0f);
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  EXPECT_LT(times[times.size() / 2], 5ms);
}

// What ends a wait for a ring ends one that looks, too.
TEST_F(MemoryPassTest, APassWithRingsOfADeviceEnds) {
  const auto declare = [](MemoryPassClient* client, uint64_t sequence, uint64_t deadline_us) {
    v1::DecodeRequest request = client->Declaration(sequence);
    request.mutable_begin_pass()->mutable_memory()->set_device_rings(true);
    request.mutable_begin_pass()->set_deadline_us(deadline_us);
    ASSERT_TRUE(client->Declare(request));
    client->RingAsDevice(0);
    ASSERT_TRUE(client->WaitFor(0));
  };
  const uint64_t sequence = Open(), other = Open();
  MemoryPassClient late(*server_), cancelled(*server_);
  declare(&late, sequence, 300'000);
  ASSERT_TRUE(late.WaitFor(2));
  EXPECT_EQ(late.Reply().status().code(), StatusCode::DEADLINE_EXCEEDED);
  declare(&cancelled, other, 0);
  cancelled.LeaveStream();
  ASSERT_TRUE(cancelled.WaitFor(2));
  EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{0, 0}));
  EXPECT_EQ(LayerTokens(other), (std::vector<uint64_t>{0, 0}));
}

TEST_F(MemoryPassTest, LayersMayLieApart) {
  MemoryPassClient client(*server_);
  v1::DecodeRequest request = client.Declaration(Open());
  v1::PassMemory* const memory = request.mutable_begin_pass()->mutable_memory();
  memory->mutable_q()->set_layer_stride(128);
  memory->mutable_v()->set_layer_stride(64);
  memory->mutable_out()->set_layer_stride(256);
  memory->mutable_lse()->set_layer_stride(64);
  memory->set_words_offset(8192 - 128);
  const auto words = reinterpret_cast<plane::Words*>(client.floats(8192 - 128));
  ASSERT_TRUE(client.Declare(request));
  for (uint32_t layer = 0; layer < 2; ++layer) {
    std::fill_n(client.floats(client.kQ + 128 * layer), 32, 1.0f);
    std::fill_n(client.floats(client.kK), 16, 1.0f);
    std::fill_n(client.floats(client.kV + 64 * layer), 16, 5.0f + static_cast<float>(layer));
    plane::WriteWord(&words->ring, 1 + layer);
    ASSERT_TRUE(Within([&] { return plane::ReadWord(&words->answer) == 1 + layer; }));
  }
  EXPECT_EQ(client.Reply().rows(0).status().code(), 0);
  EXPECT_EQ(client.floats(client.kOut)[0], 5.0f);
  EXPECT_EQ(client.floats(client.kOut + 256)[0], 6.0f);
  EXPECT_NE(client.floats(client.kLse + 64)[0], 0.0f);
}

TEST_F(MemoryPassTest, DeclarationsThatAreWrongNameTheField) {
  MemoryPassClient client(*server_);
  const uint64_t sequence = Open();
  using Spoil = std::function<void(v1::DecodeRequest*)>;
  const auto memory = [](v1::DecodeRequest* r) {
    return r->mutable_begin_pass()->mutable_memory();
  };
  const struct {
    Spoil spoil;
    StatusCode code;
    std::string words;
  } cases[] = {
      {[&](auto* r) { memory(r)->set_region_id(memory(r)->region_id() + 1); },
       StatusCode::NOT_FOUND, "begin_pass.memory.region_id"},
      {[&](auto* r) { memory(r)->set_words_offset(4); }, StatusCode::INVALID_ARGUMENT,
       "begin_pass.memory.words.offset is 4"},
      {[&](auto* r) { memory(r)->set_words_offset(8192 - 64); }, StatusCode::INVALID_ARGUMENT,
       "begin_pass.memory.words"},
      {[&](auto* r) { memory(r)->set_words_offset(~uint64_t{63}); }, StatusCode::INVALID_ARGUMENT,
       "begin_pass.memory.words"},
      {[&](auto* r) { memory(r)->mutable_q()->set_offset(8192 - 64); },
       StatusCode::INVALID_ARGUMENT, "begin_pass.memory.q has 2 layers of 128 bytes"},
      {[&](auto* r) { memory(r)->mutable_k()->set_layer_stride(uint64_t{1} << 63); },
       StatusCode::INVALID_ARGUMENT, "begin_pass.memory.k"},
      {[&](auto* r) { memory(r)->mutable_v()->set_offset(1); }, StatusCode::INVALID_ARGUMENT,
       "begin_pass.memory.v.offset is 1"},
      {[&](auto* r) { memory(r)->mutable_out()->set_layer_stride(8192); },
       StatusCode::INVALID_ARGUMENT, "begin_pass.memory.out"},
      {[&](auto* r) { memory(r)->mutable_lse()->set_offset(8192); }, StatusCode::INVALID_ARGUMENT,
       "begin_pass.memory.lse"},
      {[&](auto* r) { memory(r)->set_spin_us(10'001); }, StatusCode::INVALID_ARGUMENT,
       "begin_pass.memory.spin_us is 10001; allowed are 0..10000"},
      {[&](auto* r) { r->mutable_begin_pass()->set_stats(v1::Pass::STATS_EACH_LAYER); },
       StatusCode::INVALID_ARGUMENT, "begin_pass.stats"},
      {[&](auto* r) { r->mutable_q()->set_data("12345678"); }, StatusCode::INVALID_ARGUMENT,
       "q.data has 8 bytes"},
      // 2^62 bytes, and a product beyond 64 bits.
      {[&](auto* r) {
         r->mutable_q()->set_shape(0, 1u << 31), r->mutable_q()->set_shape(1, 1u << 25);
       },
       StatusCode::INVALID_ARGUMENT, "begin_pass.memory.q"},
      {[&](auto* r) {
         for (int i = 0; i < 3; ++i) r->mutable_q()->set_shape(i, 1u << 31);
       },
       StatusCode::INVALID_ARGUMENT, "q.shape"},
      {[&](auto* r) { r->mutable_v()->set_shape(2, 1 << 20); }, StatusCode::INVALID_ARGUMENT,
       "begin_pass.memory.v"},
      {[&](auto* r) { r->clear_rows(); }, StatusCode::INVALID_ARGUMENT, "rows"},
      {[&](auto* r) { r->set_layer(1); }, StatusCode::INVALID_ARGUMENT, "layer is 1"},
  };
  for (const auto& [spoil, code, words] : cases) {
    v1::DecodeRequest request = client.Declaration(sequence);
    spoil(&request);
    ASSERT_TRUE(client.Declare(request));
    client.Ring(0);
    const v1::DecodeResponse reply = client.Reply();
    EXPECT_EQ(reply.status().code(), code) << words;
    EXPECT_THAT(reply.status().message(), HasSubstr(words));
  }
  EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{0, 0}));
  EXPECT_EQ(client.Pass(sequence, 0).rows(0).status().code(), 0);  // the stream goes on
}

TEST_F(MemoryPassTest, ALayerBeyondAMessageIsRefused) {
  MemoryPassClient client(*server_);
  const ClientRegion large = *client.memory()->Register(uint64_t{130} << 20, "");
  v1::DecodeRequest request = client.Declaration(Open());
  request.mutable_begin_pass()->mutable_memory()->set_region_id(large.id);
  request.mutable_q()->set_shape(0, (64u << 20) / 128 + 1);
  ASSERT_TRUE(client.Declare(request));
  const v1::DecodeResponse reply = client.Reply();
  EXPECT_EQ(reply.status().code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(reply.status().message(), HasSubstr("max_message_bytes: q, k and v of a layer"));
}

TEST_F(MemoryPassTest, ARowThatFailsLeavesThePass) {
  MemoryPassClient client(*server_);
  const uint64_t sequence = Open();
  ASSERT_TRUE(client.Declare(client.Declaration(sequence)));
  client.Ring(0);
  ASSERT_TRUE(client.WaitFor(0));
  EXPECT_EQ(client.words()->failed_rows, 0u);
  client.Ring(1, std::numeric_limits<float>::quiet_NaN());
  ASSERT_TRUE(client.WaitFor(1));
  EXPECT_EQ(client.words()->failed_rows, 1u);
  EXPECT_TRUE(std::isnan(client.floats(client.kOut)[0]));
  EXPECT_TRUE(std::isnan(client.floats(client.kLse)[0])) << client.floats(client.kLse)[0];
  const v1::DecodeResponse reply = client.Reply();
  EXPECT_EQ(reply.status().code(), 0);
  ASSERT_EQ(reply.rows_size(), 1);
  EXPECT_EQ(reply.rows(0).status().code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{0, 0}));
}

// Each way in which a client may end a pass in its middle. When the word says that it is over,
// nothing of it is left.
TEST_F(MemoryPassTest, WhatEndsAPassLeavesNothing) {
  uint64_t sequence = 0;
  // A sequence of its own each time: the stream before may still be the writer of its sequence.
  const auto start = [&](MemoryPassClient* client) {
    sequence = Open();
    ASSERT_TRUE(client->Declare(client->Declaration(sequence)));
    client->Ring(0);
    ASSERT_TRUE(client->WaitFor(0));
    EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{1, 0}));
  };
  {
    SCOPED_TRACE("the client does not ring for reply_timeout_s, 3 here");
    MemoryPassClient client(*server_);
    const auto before = std::chrono::steady_clock::now();
    start(&client);
    ASSERT_TRUE(client.WaitFor(2));
    EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{0, 0}));
    EXPECT_GE(std::chrono::steady_clock::now() - before, 3s);
    EXPECT_EQ(client.Reply().status().code(), StatusCode::DEADLINE_EXCEEDED);
  }
  {
    SCOPED_TRACE("another value in the ring word");
    MemoryPassClient client(*server_);
    start(&client);
    plane::WriteWord(&client.words()->ring, client.epoch() + 7);
    ASSERT_TRUE(client.WaitFor(2));
    EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{0, 0}));
    const v1::DecodeResponse reply = client.Reply();
    EXPECT_EQ(reply.status().code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(reply.status().message(), HasSubstr("the ring word is 8; layer 1 has epoch 2"));
  }
  {
    SCOPED_TRACE("the client cancels its stream");
    MemoryPassClient client(*server_);
    start(&client);
    client.LeaveStream();
    ASSERT_TRUE(client.WaitFor(2));
    EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{0, 0}));
  }
  // Another stream becomes the writer of what the cancelled one has left.
  MemoryPassClient client(*server_);
  EXPECT_TRUE(Within([&] { return client.Pass(sequence, 0).rows(0).status().code() == 0; }));
}

TEST_F(MemoryPassTest, ARegionIsForItsTenantAndForOnePassAtATime) {
  MemoryPassClient mine(*server_, "a"), other(*server_, "b"), second(*server_, "a");
  const uint64_t sequence = Open("a"), others = Open("b"), third = Open("a");
  v1::DecodeRequest request = other.Declaration(others);
  request.mutable_begin_pass()->mutable_memory()->set_region_id(mine.region_id());
  ASSERT_TRUE(other.Declare(request));
  EXPECT_EQ(other.Reply().status().code(), StatusCode::NOT_FOUND);
  ASSERT_TRUE(mine.Declare(mine.Declaration(sequence)));
  mine.Ring(0);
  ASSERT_TRUE(mine.WaitFor(0));
  request = second.Declaration(third);
  request.mutable_begin_pass()->mutable_memory()->set_region_id(mine.region_id());
  ASSERT_TRUE(second.Declare(request));
  EXPECT_EQ(second.Reply().status().code(), StatusCode::ABORTED);
  mine.Ring(1);
  ASSERT_TRUE(mine.WaitFor(1));
  EXPECT_EQ(mine.Reply().rows(0).status().code(), 0);
}

TEST_F(MemoryPassTest, ARegionThatIsFreedUnderWayStaysForItsPass) {
  MemoryPassClient client(*server_);
  const uint64_t sequence = Open();
  ASSERT_TRUE(client.Declare(client.Declaration(sequence)));
  client.Ring(0);
  ASSERT_TRUE(client.WaitFor(0));
  client.LeaveMemory();
  client.Ring(1);
  ASSERT_TRUE(client.WaitFor(1));
  EXPECT_EQ(client.Reply().rows(0).status().code(), 0);
  EXPECT_TRUE(Within([&] { return server_->Metric("attnd_memory_regions") == 0; }));
  ASSERT_TRUE(client.Declare(client.Declaration(sequence, 1)));
  EXPECT_EQ(client.Reply().status().code(), StatusCode::NOT_FOUND);
}

}  // namespace
}  // namespace attnd::testing
