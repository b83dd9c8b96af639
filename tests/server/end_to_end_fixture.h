// SPDX-License-Identifier: Apache-2.0
//
// EndToEndTest: a client's raw messages, right and wrong, to a server with the real engine, and
// what the oracle makes of the same tokens. Random numbers have a fixed seed, printed on failure.
#ifndef ATTND_TESTS_SERVER_END_TO_END_FIXTURE_H_
#define ATTND_TESTS_SERVER_END_TO_END_FIXTURE_H_

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/oracle/attention.h"
#include "tests/server/server_fixture.h"
#include "tests/server/test_server.h"

namespace attnd::testing {

inline constexpr uint32_t kSeed = 20261121;
inline constexpr uint32_t kLayers = 2;
inline constexpr size_t kQueryHeads = 4, kKvHeads = 2, kHeadDim = 32, kValueDim = 16;

inline std::vector<float> Random(size_t count, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(*random);
  return numbers;
}

inline void Fill(size_t tokens, size_t heads, size_t dim, const float* data, v1::Tensor* tensor) {
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

class EndToEndTest : public RealEngineFixture {
 protected:
  EndToEndTest() { StartServer(); }

  std::unique_ptr<grpc::ClientContext> Context(const std::string& tenant = "") {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
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
};

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVER_END_TO_END_FIXTURE_H_
