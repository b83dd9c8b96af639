// SPDX-License-Identifier: Apache-2.0
//
// Goal: a pass over shared memory has the answers of a pass in messages, bit for bit, and its
// errors, deadlines and statistics; a client notices that its server is gone. Method: a session of
// each kind over one server in the test's process, each with a sequence that gets the same tokens.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "client/cpp/client.h"
#include "client/cpp/memory_client.h"
#include "gtest/gtest.h"
#include "tests/client/client_fixture.h"
#include "tests/server/process.h"
#include "tests/server/test_server.h"
#include "tests/server/within.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;

constexpr uint32_t kSeed = 20261125;
constexpr uint32_t kLayers = 3, kQueryHeads = 4, kKvHeads = 2, kHeadDim = 32;

v1::ModelShape Shape(v1::DType dtype = v1::DTYPE_FP32) {
  v1::ModelShape shape;
  shape.set_layers(kLayers);
  shape.set_query_heads(kQueryHeads);
  shape.set_kv_heads(kKvHeads);
  shape.set_head_dim(kHeadDim);
  shape.set_dtype(dtype);
  return shape;
}

v1::DecodeRow Row(uint64_t sequence, uint64_t position, uint32_t tokens = 1) {
  v1::DecodeRow row;
  row.set_sequence_id(sequence);
  row.set_position(position);
  row.set_query_tokens(tokens);
  return row;
}

v1::Pass WithLse() {
  v1::Pass pass;
  pass.set_want_lse(true);
  return pass;
}

class MemorySessionTest : public ClientFixture {
 protected:
  MemorySessionTest() { options_.allow_client_memory = true; }

  void Start() {
    StartServer(RealEngine());
    Connect();
  }
  uint64_t Open(const v1::ModelShape& shape = Shape()) {
    v1::OpenSequenceRequest request;
    *request.mutable_model()->mutable_shape() = shape;
    return client_->OpenSequence(request)->sequence_id();
  }
  std::unique_ptr<MemorySession> NewSession(MemorySessionOptions options = {.shape = Shape()}) {
    auto session = client_->StartMemoryDecode(options);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }
  void Fill(std::span<std::byte> bytes, DType dtype = DType::kFp32) {
    std::vector<float> numbers(bytes.size() / DTypeBytes(dtype));
    for (float& number : numbers) number = normal_(random_);
    FromFloat(dtype, numbers.data(), numbers.size(), bytes.data());
  }
  void FillAll(const MemorySession& session, DType dtype = DType::kFp32) {
    Fill(session.arrays().q, dtype);
    Fill(session.arrays().k, dtype);
    Fill(session.arrays().v, dtype);
  }
  // What a session's arrays hold as a message of a pass.
  static v1::DecodeRequest Message(const MemorySession& session, uint32_t layer,
                                   const v1::DecodeRow& row, const v1::ModelShape& shape) {
    v1::DecodeRequest request;
    request.set_layer(layer);
    const auto set = [&](std::span<const std::byte> bytes, uint32_t heads, v1::Tensor* tensor) {
      tensor->set_dtype(shape.dtype());
      for (const uint32_t extent : {row.query_tokens(), heads, kHeadDim}) tensor->add_shape(extent);
      tensor->set_data(bytes.data(), bytes.size());
    };
    set(session.arrays().q, kQueryHeads, request.mutable_q());
    if (!row.query_only()) {
      set(session.arrays().k, kKvHeads, request.mutable_k());
      set(session.arrays().v, kKvHeads, request.mutable_v());
    }
    if (layer > 0) return request;
    *request.add_rows() = row;
    *request.mutable_begin_pass() = WithLse();
    request.mutable_begin_pass()->set_layers(kLayers);
    return request;
  }
  uint64_t Committed(uint64_t sequence) {
    const auto sequences = client_->ListSequences();
    for (const v1::SequenceInfo& info : *sequences) {
      if (info.sequence_id() == sequence) return info.committed_tokens();
    }
    return 0;
  }
  // Tokens of the longest layer: 0 where nothing is half appended.
  uint64_t LongestLayer(uint64_t sequence) {
    const auto sequences = client_->ListSequences();
    for (const v1::SequenceInfo& info : *sequences) {
      if (info.sequence_id() != sequence) continue;
      return *std::max_element(info.layer_tokens().begin(), info.layer_tokens().end());
    }
    return 0;
  }

  std::mt19937 random_{kSeed};
  std::normal_distribution<float> normal_;
};

class MemorySessionOfTypeTest : public MemorySessionTest,
                                public ::testing::WithParamInterface<v1::DType> {};
INSTANTIATE_TEST_SUITE_P(Types, MemorySessionOfTypeTest,
                         ::testing::Values(v1::DTYPE_FP32, v1::DTYPE_BF16));

TEST_P(MemorySessionOfTypeTest, AnswersAreThoseOfMessages) {
  Start();
  const DType dtype = GetParam() == v1::DTYPE_FP32 ? DType::kFp32 : DType::kBf16;
  const v1::ModelShape shape = Shape(GetParam());
  const uint64_t sequence = Open(shape), twin = Open(shape);
  const auto session = NewSession({.shape = shape, .query_tokens_max = 5});
  const auto messages = client_->StartDecode();
  uint64_t position = 0;
  for (const uint32_t tokens : {5u, 1u, 2u}) {
    const v1::DecodeRow row = Row(sequence, position, tokens);
    ASSERT_TRUE(session->Begin({&row, 1}, WithLse()).ok());
    v1::DecodeResponse expected;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      FillAll(*session, dtype);
      const absl::Status status = session->Step(10s);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(session->failed_rows(), 0u);
      ASSERT_TRUE(
          messages
              ->Step(Message(*session, layer, Row(twin, position, tokens), shape), &expected, 10s)
              .ok());
      ASSERT_EQ(expected.status().code(), 0) << expected.status().message();
      const auto& arrays = session->arrays();
      ASSERT_EQ(arrays.out.size(), expected.out().data().size());
      EXPECT_EQ(std::memcmp(arrays.out.data(), expected.out().data().data(), arrays.out.size()), 0)
          << "seed " << kSeed << ", layer " << layer;
      ASSERT_EQ(arrays.lse.size_bytes(), expected.lse().data().size());
      EXPECT_EQ(
          std::memcmp(arrays.lse.data(), expected.lse().data().data(), arrays.lse.size_bytes()), 0);
    }
    ASSERT_EQ(session->reply().rows_size(), 1);
    EXPECT_EQ(session->reply().rows(0).status().code(), 0);
    EXPECT_EQ(session->reply().rows(0).stats().zone_tokens(),
              expected.rows(0).stats().zone_tokens());
    EXPECT_GT(expected.rows(0).stats().zone_tokens(), 0u);
    position += tokens;
  }
  EXPECT_EQ(Committed(sequence), position);
}

TEST_F(MemorySessionTest, QueriesAloneAppendNothing) {
  Start();
  const uint64_t sequence = Open();
  const auto session = NewSession({.shape = Shape(), .query_tokens_max = 3});
  v1::DecodeRow row = Row(sequence, 0, 3);
  ASSERT_TRUE(session->Begin({&row, 1}, WithLse()).ok());
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    FillAll(*session);
    ASSERT_TRUE(session->Step(10s).ok());
  }
  row = Row(sequence, 3, 2);
  row.set_query_only(true);
  ASSERT_TRUE(session->Begin({&row, 1}, v1::Pass()).ok());
  EXPECT_TRUE(session->arrays().k.empty() && session->arrays().v.empty());
  EXPECT_TRUE(session->arrays().lse.empty());
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    Fill(session->arrays().q);
    ASSERT_TRUE(session->Step(10s).ok());
  }
  EXPECT_EQ(session->reply().rows(0).status().code(), 0);
  EXPECT_EQ(Committed(sequence), 3u);
}

TEST_F(MemorySessionTest, RowsThatFailAreTold) {
  Start();
  const uint64_t sequence = Open();
  const auto session = NewSession({.shape = Shape(), .query_tokens_max = 2});
  const std::vector<v1::DecodeRow> rows = {Row(sequence, 0), Row(sequence + 1000, 0)};
  ASSERT_TRUE(session->Begin(rows, v1::Pass()).ok());
  const size_t half = kQueryHeads * kHeadDim;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    FillAll(*session);
    ASSERT_TRUE(session->Step(10s).ok());
    EXPECT_EQ(session->failed_rows(), 1u);
    const auto* const out = reinterpret_cast<const float*>(session->arrays().out.data());
    EXPECT_TRUE(std::isfinite(out[half - 1]));
    EXPECT_TRUE(std::isnan(out[half]));
  }
  ASSERT_EQ(session->reply().rows_size(), 2);
  EXPECT_EQ(session->reply().rows(0).status().code(), 0);
  EXPECT_EQ(session->reply().rows(1).status().code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Committed(sequence), 1u);
}

// An error that the server tells ends the pass, and the session goes on.
TEST_F(MemorySessionTest, APassThatIsRefusedLeavesItsSession) {
  Start();
  const uint64_t sequence = Open();
  const auto session = NewSession();
  const v1::DecodeRow row = Row(sequence, 0);
  v1::Pass pass;
  pass.set_deadline_us(1);
  ASSERT_TRUE(session->Begin({&row, 1}, pass).ok());
  FillAll(*session);
  EXPECT_TRUE(absl::IsDeadlineExceeded(session->Step(10s)));
  pass.Clear();
  pass.set_stats(v1::Pass::STATS_EACH_LAYER);
  ASSERT_TRUE(session->Begin({&row, 1}, pass).ok());
  const absl::Status refused = session->Step(10s);  // before the server has seen any words
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_EQ(LongestLayer(sequence), 0u);
  ASSERT_TRUE(session->Begin({&row, 1}, v1::Pass()).ok());
  for (uint32_t layer = 0; layer < kLayers; ++layer) ASSERT_TRUE(session->Step(10s).ok());
  EXPECT_EQ(Committed(sequence), 1u);
}

TEST_F(MemorySessionTest, CallsOutOfTurnAreRefused) {
  Start();
  const auto session = NewSession();
  const v1::DecodeRow row = Row(Open(), 0), large = Row(1, 0, 2);
  EXPECT_TRUE(absl::IsFailedPrecondition(session->Ring()));
  EXPECT_TRUE(absl::IsFailedPrecondition(session->Wait(1s)));
  EXPECT_TRUE(absl::IsInvalidArgument(session->Begin({&large, 1}, v1::Pass())));
  EXPECT_TRUE(absl::IsInvalidArgument(session->Begin({}, v1::Pass())));
  ASSERT_TRUE(session->Begin({&row, 1}, v1::Pass()).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(session->Begin({&row, 1}, v1::Pass())));
  EXPECT_TRUE(absl::IsFailedPrecondition(session->Wait(1s)));
  ASSERT_TRUE(session->Ring().ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(session->Ring()));
  EXPECT_TRUE(session->Wait(10s).ok());
}

TEST_F(MemorySessionTest, OptionsThatCannotWorkAreRefused) {
  options_.max_memory_regions = 1;
  Start();
  const auto fails = [&](const MemorySessionOptions& options, const std::string& words) {
    const auto session = client_->StartMemoryDecode(options);
    EXPECT_FALSE(session.ok());
    EXPECT_TRUE(absl::StrContains(session.status().message(), words)) << session.status();
  };
  fails({.shape = Shape(), .query_tokens_max = 0}, "query_tokens_max is 0");
  fails({.shape = Shape(), .spin = 11ms}, "spin is 11000 us; allowed are 0..10000");
  fails({.shape = Shape(), .query_tokens_max = ~0u}, "client_memory_bytes");
  fails({.shape = Shape(), .socket = directory_.path() + "/none"}, "connect");
  fails({.shape = Shape(), .socket = std::string(200, 'x')}, "200 bytes; allowed are 1..107");
  auto session = NewSession();
  fails({.shape = Shape()}, "max_memory_regions: 1");
  session.reset();
  EXPECT_TRUE(Within([&] { return client_->StartMemoryDecode({.shape = Shape()}).ok(); }));
  EXPECT_FALSE(MemoryClient::SocketOf("localhost:1").ok());
  EXPECT_EQ(*MemoryClient::SocketOf("unix:///run/a.sock"), "/run/a.sock.memory");
}

TEST_F(MemorySessionTest, AServerThatDoesNotAnswerIsNotWaitedForLonger) {
  StartServer(&fake_);
  Connect();
  const auto session = NewSession();
  const v1::DecodeRow row = Row(1, 0);
  fake_.Hold();
  ASSERT_TRUE(session->Begin({&row, 1}, v1::Pass()).ok());
  const auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(absl::IsDeadlineExceeded(session->Step(300ms)));
  const auto time = std::chrono::steady_clock::now() - start;
  EXPECT_GE(time, 300ms);
  EXPECT_LT(time, 2s);
  EXPECT_TRUE(Within([&] { return fake_.passes_over() == 1; }));
  EXPECT_TRUE(absl::IsDeadlineExceeded(session->Begin({&row, 1}, v1::Pass())));  // for good
}

TEST_F(MemorySessionTest, AServerThatEndsSaysSo) {
  StartServer(&fake_);
  Connect();
  const auto session = NewSession();
  const v1::DecodeRow row = Row(1, 0);
  ASSERT_TRUE(session->Begin({&row, 1}, v1::Pass()).ok());
  ASSERT_TRUE(session->Step(10s).ok());
  server_.reset();
  EXPECT_TRUE(absl::IsUnavailable(session->Step(10s)));
  EXPECT_EQ(fake_.passes_over(), 1);
}

// The server is stopped first, so that it can neither answer nor say that it ends.
TEST_F(MemorySessionTest, AServerThatIsKilledIsNoticed) {
  const std::vector<std::string> flags = {
      "--listen=" + options_.listen[0], "--data_dir=" + options_.data_dir,
      "--memory_budget_bytes=67108864", "--allow_client_memory", "--backend=cpu"};
  for (int round = 0; round < 2; ++round) {  // the second finds the first one's sockets
    Process server(flags, directory_.path() + "/log");
    Connect();
    ASSERT_TRUE(client_->WaitHealthy(20s).ok()) << server.Log();
    const auto session = NewSession();
    const v1::DecodeRow row = Row(Open(), 0);
    ASSERT_TRUE(session->Begin({&row, 1}, v1::Pass()).ok());
    FillAll(*session);
    ASSERT_TRUE(session->Step(10s).ok());
    server.Stop();
    std::thread killer([&] {
      std::this_thread::sleep_for(100ms);
      server.Signal(SIGKILL);
    });
    const auto start = std::chrono::steady_clock::now();
    const absl::Status status = session->Step(30s);
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
    killer.join();
    EXPECT_TRUE(absl::IsUnavailable(session->Step(1s)));
  }
}

}  // namespace
}  // namespace attnd::testing
