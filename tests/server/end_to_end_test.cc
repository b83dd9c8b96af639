// SPDX-License-Identifier: Apache-2.0
//
// Goal: the faults of the contract and their codes, seen by a client over a real Unix socket, with
// the real engine behind; and that state is unchanged after each. Method: raw messages, so that
// anything can be wrong in them; answers are compared with the oracle (double precision, no shared
// code), states with ListSequences. Random numbers have a fixed seed, printed on failure.
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention/cpu_backend.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/probe.h"
#include "tests/oracle/attention.h"
#include "tests/server/test_server.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;
using grpc::StatusCode;
using ::testing::HasSubstr;
using ::testing::Not;
using Stream = grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>;

constexpr uint32_t kSeed = 20261121;
constexpr uint32_t kLayers = 2;
constexpr size_t kQueryHeads = 4, kKvHeads = 2, kHeadDim = 32, kValueDim = 16;

std::vector<float> Random(size_t count, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(*random);
  return numbers;
}

void Fill(size_t tokens, size_t heads, size_t dim, const float* data, v1::Tensor* tensor) {
  tensor->Clear();
  tensor->set_dtype(v1::DTYPE_FP32);
  for (const size_t extent : {tokens, heads, dim}) {
    tensor->add_shape(static_cast<uint32_t>(extent));
  }
  tensor->set_data(data, tokens * heads * dim * sizeof(float));
}

// Keys and values of one layer, for the oracle: [tokens, kv_heads, dim].
struct Layer {
  std::vector<float> k, v;
};

class EndToEndTest : public ::testing::Test {
 protected:
  EndToEndTest() {
    engine_ = *engine::Engine::Create(server::ToEngineOptions(options_, server::Machine()),
                                      attention::MakeCpuBackend({.threads = 2}), nullptr);
    server_ = std::make_unique<TestServer>(options_, engine_.get());
    stub_ = server_->NewStub();
  }

  std::unique_ptr<grpc::ClientContext> Context(const std::string& tenant = "") {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + 60s);
    if (!tenant.empty()) context->AddMetadata("attnd-tenant", tenant);
    return context;
  }

  static v1::OpenSequenceRequest Model() {
    v1::OpenSequenceRequest request;
    v1::ModelShape* shape = request.mutable_model()->mutable_shape();
    shape->set_layers(kLayers);
    shape->set_query_heads(kQueryHeads);
    shape->set_kv_heads(kKvHeads);
    shape->set_head_dim(kHeadDim);
    shape->set_value_dim(kValueDim);
    shape->set_dtype(v1::DTYPE_FP32);
    return request;
  }

  uint64_t Open(const std::string& tenant = "") {
    v1::OpenSequenceResponse reply;
    const grpc::Status status = stub_->OpenSequence(Context(tenant).get(), Model(), &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply.sequence_id();
  }

  // Uploads random tokens [first, first + tokens) of every layer and keeps them.
  grpc::Status Upload(uint64_t sequence, uint32_t tokens, std::vector<Layer>* layers,
                      bool complete = true) {
    const auto context = Context();
    v1::AppendKvResponse reply;
    const auto stream = stub_->AppendKv(context.get(), &reply);
    layers->resize(kLayers);
    for (uint32_t i = 0; i < kLayers; ++i) {
      Layer& layer = (*layers)[i];
      const uint64_t first = layer.k.size() / (kKvHeads * kHeadDim);
      const auto k = Random(tokens * kKvHeads * kHeadDim, &random_);
      const auto v = Random(tokens * kKvHeads * kValueDim, &random_);
      v1::AppendKvRequest request;
      request.set_sequence_id(sequence);
      request.set_layer(i);
      request.set_first_position(first);
      Fill(tokens, kKvHeads, kHeadDim, k.data(), request.mutable_k());
      Fill(tokens, kKvHeads, kValueDim, v.data(), request.mutable_v());
      request.set_prefill_complete(complete && i + 1 == kLayers);
      stream->Write(request);
      layer.k.insert(layer.k.end(), k.begin(), k.end());
      layer.v.insert(layer.v.end(), v.begin(), v.end());
    }
    stream->WritesDone();
    return stream->Finish();
  }

  // A good step of one row with random content.
  v1::DecodeRequest Step(uint64_t sequence, uint64_t position, uint32_t tokens = 1,
                         uint32_t layer = 0) {
    v1::DecodeRequest request;
    request.set_layer(layer);
    v1::DecodeRow* row = request.add_rows();
    row->set_sequence_id(sequence);
    row->set_position(position);
    row->set_query_tokens(tokens);
    Fill(tokens, kQueryHeads, kHeadDim, Random(tokens * kQueryHeads * kHeadDim, &random_).data(),
         request.mutable_q());
    Fill(tokens, kKvHeads, kHeadDim, Random(tokens * kKvHeads * kHeadDim, &random_).data(),
         request.mutable_k());
    Fill(tokens, kKvHeads, kValueDim, Random(tokens * kKvHeads * kValueDim, &random_).data(),
         request.mutable_v());
    return request;
  }

  // Sends one message on a stream of its own.
  v1::DecodeResponse Send(const v1::DecodeRequest& request, const std::string& tenant = "") {
    const auto context = Context(tenant);
    const auto stream = stub_->Decode(context.get());
    v1::DecodeResponse reply;
    EXPECT_TRUE(stream->Write(request));
    EXPECT_TRUE(stream->Read(&reply));
    stream->WritesDone();
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }

  // The code of a one-row message, of the message or of its row, and the text.
  static std::pair<int, std::string> Outcome(const v1::DecodeResponse& reply) {
    const v1::Status& status = reply.rows_size() > 0 ? reply.rows(0).status() : reply.status();
    return {status.code(), status.message()};
  }

  // Everything that ListSequences says, as text.
  std::string State(const std::string& tenant = "") {
    v1::ListSequencesResponse reply;
    EXPECT_TRUE(stub_->ListSequences(Context(tenant).get(), {}, &reply).ok());
    return reply.DebugString();
  }

  void ExpectOracle(const v1::DecodeRequest& request, const Layer& layer, uint64_t past,
                    const v1::DecodeResponse& reply) {
    oracle::DenseInput input;
    input.query_tokens = request.q().shape(0);
    input.query_heads = kQueryHeads;
    input.kv_heads = kKvHeads;
    input.head_dim = kHeadDim;
    input.value_dim = kValueDim;
    input.past = past;
    input.scale = 1.0 / std::sqrt(static_cast<double>(kHeadDim));
    const auto floats = [](const std::string& data) {
      const auto* first = reinterpret_cast<const float*>(data.data());
      return oracle::Vector(first, first + data.size() / sizeof(float));
    };
    input.q = floats(request.q().data());
    input.k.assign(layer.k.begin(), layer.k.end());
    input.v.assign(layer.v.begin(), layer.v.end());
    const oracle::DenseOutput expected = oracle::DenseAttention(input);
    const auto out = floats(reply.out().data()), lse = floats(reply.lse().data());
    ASSERT_EQ(out.size(), expected.out.size());
    ASSERT_EQ(lse.size(), expected.lse.size());
    for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected.out[i], 1e-5) << i;
    for (size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(lse[i], expected.lse[i], 1e-5) << i;
  }

  // What a step appended, appended to what the test keeps.
  static void Keep(const v1::DecodeRequest& request, Layer* layer) {
    const auto append = [](const std::string& data, std::vector<float>* numbers) {
      const auto* first = reinterpret_cast<const float*>(data.data());
      numbers->insert(numbers->end(), first, first + data.size() / sizeof(float));
    };
    append(request.k().data(), &layer->k);
    append(request.v().data(), &layer->v);
  }

  std::mt19937 random_{kSeed};
  const ::testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(kSeed)};
  TempDir directory_;
  server::ServerOptions options_ = TestOptions(directory_.path());
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<v1::Attnd::Stub> stub_;
};

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

TEST_F(EndToEndTest, ABadStepChangesNothing) {
  const uint64_t sequence = Open();
  std::vector<Layer> layers;
  ASSERT_TRUE(Upload(sequence, 20, &layers).ok());
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto poke = [](v1::Tensor* tensor, float value) {
    std::memcpy(tensor->mutable_data()->data() + 8, &value, sizeof(value));
  };
  struct Case {
    int code;
    const char* named;
    std::function<void(v1::DecodeRequest*)> spoil;
  };
  const std::vector<Case> cases = {
      {3, "q", [=](auto* r) { poke(r->mutable_q(), kNan); }},
      {3, "q", [=](auto* r) { poke(r->mutable_q(), -kInf); }},
      {3, "k", [=](auto* r) { poke(r->mutable_k(), kNan); }},
      {3, "k", [=](auto* r) { poke(r->mutable_k(), kInf); }},
      {3, "v", [=](auto* r) { poke(r->mutable_v(), kNan); }},
      {3, "v", [=](auto* r) { poke(r->mutable_v(), kInf); }},
      {3, "layer", [](auto* r) { r->set_layer(kLayers); }},
      {3, "layer", [](auto* r) { r->set_layer(~0u); }},
      {3, "q", [](auto* r) { FillTensor(1, 3, kHeadDim, 1, r->mutable_q()); }},
      {3, "q", [](auto* r) { FillTensor(1, kQueryHeads, 64, 1, r->mutable_q()); }},
      {3, "q", [](auto* r) { FillTensor(2, kQueryHeads, kHeadDim, 1, r->mutable_q()); }},
      {3, "k", [](auto* r) { FillTensor(1, 1, kHeadDim, 1, r->mutable_k()); }},
      {3, "k", [](auto* r) { FillTensor(1, kKvHeads, 16, 1, r->mutable_k()); }},
      {3, "k",
       [](auto* r) { FillTensor(1, kKvHeads, kHeadDim, 1, r->mutable_k(), v1::DTYPE_BF16); }},
      {3, "v", [](auto* r) { FillTensor(1, kKvHeads, kHeadDim, 1, r->mutable_v()); }},
      {3, "v",
       [](auto* r) { FillTensor(1, kKvHeads, kValueDim, 1, r->mutable_v(), v1::DTYPE_FP16); }},
      {3, "k", [](auto* r) { r->clear_k(); }},
      {3, "q", [](auto* r) { r->mutable_q()->set_shape(0, 1u << 31); }},
      {3, "rows", [](auto* r) { r->clear_rows(); }},
      {3, "rows",
       [](auto* r) {
         r->add_rows()->CopyFrom(r->rows(0));
         r->clear_k();
         r->clear_v();
       }},
      {3, "psychic", [](auto* r) { r->mutable_rows(0)->mutable_policy()->set_preset("psychic"); }},
      {3, "token_ids", [](auto* r) { r->mutable_rows(0)->mutable_token_ids()->Resize(2, 1); }},
      {5, "", [](auto* r) { r->mutable_rows(0)->set_sequence_id(0); }},
      {5, "", [](auto* r) { r->mutable_rows(0)->set_sequence_id(~uint64_t{0}); }},
      {9, "20", [](auto* r) { r->mutable_rows(0)->set_position(21); }},
      {9, "20", [](auto* r) { r->mutable_rows(0)->set_position(~uint64_t{0}); }},
  };
  const std::string before = State();
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::DecodeRequest request = Step(sequence, 20);
    cases[i].spoil(&request);
    const auto [code, message] = Outcome(Send(request));
    EXPECT_EQ(code, cases[i].code) << "case " << i << ": " << message;
    EXPECT_THAT(message, HasSubstr(cases[i].named)) << "case " << i;
    EXPECT_EQ(State(), before) << "case " << i;
  }
  EXPECT_EQ(Outcome(Send(Step(sequence, 20))).first, 0);
}

TEST_F(EndToEndTest, OneBadRowLeavesTheOthersTheirAnswer) {
  const uint64_t good = Open(), other = Open();
  std::vector<Layer> layers, ignored;
  ASSERT_TRUE(Upload(good, 10, &layers).ok());
  ASSERT_TRUE(Upload(other, 10, &ignored).ok());
  v1::DecodeRequest request = Step(good, 10, 2);
  request.mutable_rows(0)->set_query_tokens(1);
  request.add_rows()->CopyFrom(request.rows(0));
  request.mutable_rows(1)->set_sequence_id(12345678);
  const v1::DecodeResponse reply = Send(request);
  ASSERT_EQ(reply.rows_size(), 2);
  EXPECT_EQ(reply.rows(0).status().code(), 0);
  EXPECT_EQ(reply.rows(1).status().code(), StatusCode::NOT_FOUND);
  const auto* out = reinterpret_cast<const float*>(reply.out().data().data());
  const size_t row = kQueryHeads * kValueDim;
  ASSERT_EQ(reply.out().data().size(), 2 * row * sizeof(float));
  for (size_t i = 0; i < row; ++i) {
    EXPECT_TRUE(std::isfinite(out[i]));
    EXPECT_TRUE(std::isnan(out[row + i]));
  }
  const auto* lse = reinterpret_cast<const float*>(reply.lse().data().data());
  EXPECT_TRUE(std::isfinite(lse[0]));
  EXPECT_TRUE(std::isnan(lse[kQueryHeads]));
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
  EXPECT_EQ(Outcome(Send(second)).first, 0);  // at once: leases end before the stream does
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

// A query of a few bytes a head may ask for values of many.
TEST_F(EndToEndTest, AReplyThatWouldBeTooLargeIsRefusedBeforehand) {
  v1::OpenSequenceRequest wide = Model();
  wide.mutable_model()->mutable_shape()->set_query_heads(128);
  wide.mutable_model()->mutable_shape()->set_head_dim(16);
  wide.mutable_model()->mutable_shape()->set_value_dim(512);
  v1::OpenSequenceResponse opened;
  ASSERT_TRUE(stub_->OpenSequence(Context().get(), wide, &opened).ok());
  for (const bool query_only : {true, false}) {
    v1::DecodeRequest request;  // 512 KiB in, 128 MiB out
    v1::DecodeRow* row = request.add_rows();
    row->set_sequence_id(opened.sequence_id());
    row->set_query_tokens(512);
    row->set_query_only(query_only);
    FillTensor(512, 128, 16, 1, request.mutable_q());
    if (!query_only) {
      FillTensor(512, kKvHeads, 16, 1, request.mutable_k());
      FillTensor(512, kKvHeads, 512, 1, request.mutable_v());
    }
    const auto [code, message] = Outcome(Send(request));
    EXPECT_EQ(code, StatusCode::RESOURCE_EXHAUSTED) << message;
    EXPECT_THAT(message, HasSubstr("max_message_bytes"));
  }
  EXPECT_THAT(State(), Not(HasSubstr("committed_tokens")));
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

TEST_F(EndToEndTest, BadChunksNameThemselvesAndChangeNothing) {
  const uint64_t sequence = Open();
  std::vector<Layer> layers;
  ASSERT_TRUE(Upload(sequence, 20, &layers, false).ok());
  struct Case {
    StatusCode code;
    const char* named;
    std::function<void(v1::AppendKvRequest*)> spoil;
  };
  constexpr auto kInvalid = StatusCode::INVALID_ARGUMENT;
  const std::vector<Case> cases = {
      {kInvalid, "k",
       [](auto* r) {
         const float nan = std::nanf("");
         std::memcpy(r->mutable_k()->mutable_data()->data(), &nan, 4);
       }},
      {kInvalid, "v",
       [](auto* r) {
         const float infinite = INFINITY;
         std::memcpy(r->mutable_v()->mutable_data()->data(), &infinite, 4);
       }},
      {kInvalid, "k", [](auto* r) { r->clear_k(); }},
      {kInvalid, "k", [](auto* r) { FillTensor(3, 1, kHeadDim, 1, r->mutable_k()); }},
      {kInvalid, "v", [](auto* r) { FillTensor(3, kKvHeads, kHeadDim, 1, r->mutable_v()); }},
      {kInvalid, "k",
       [](auto* r) { FillTensor(3, kKvHeads, kHeadDim, 1, r->mutable_k(), v1::DTYPE_BF16); }},
      {kInvalid, "layer", [](auto* r) { r->set_layer(kLayers); }},
      {kInvalid, "token_ids", [](auto* r) { r->add_token_ids(5); }},
      {StatusCode::FAILED_PRECONDITION, "20", [](auto* r) { r->set_first_position(21); }},
      {StatusCode::FAILED_PRECONDITION, "", [](auto* r) { r->set_first_position(~uint64_t{0}); }},
      {StatusCode::ALREADY_EXISTS, "", [](auto* r) { r->set_first_position(19); }},
      {StatusCode::NOT_FOUND, "", [](auto* r) { r->set_sequence_id(999999); }},
  };
  const std::string before = State();
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::AppendKvRequest request;
    request.set_sequence_id(sequence);
    request.set_layer(0);
    request.set_first_position(20);
    FillTensor(3, kKvHeads, kHeadDim, 1, request.mutable_k());
    FillTensor(3, kKvHeads, kValueDim, 1, request.mutable_v());
    cases[i].spoil(&request);
    const auto context = Context();
    v1::AppendKvResponse reply;
    const auto stream = stub_->AppendKv(context.get(), &reply);
    stream->Write(request);
    stream->WritesDone();
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), cases[i].code) << "case " << i << ": " << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("chunk 0")) << "case " << i;
    EXPECT_THAT(status.error_message(), HasSubstr(cases[i].named)) << "case " << i;
    EXPECT_EQ(State(), before) << "case " << i;
  }
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
