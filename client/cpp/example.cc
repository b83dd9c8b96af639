// SPDX-License-Identifier: Apache-2.0
//
// The whole path from C++: opens a sequence, uploads a prompt's keys and values, decodes a few
// tokens of every layer, and compares what attnd answers with attention computed here.
//
//   attnd_example unix:/run/attnd/attnd.sock
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/client.h"

namespace {

using namespace std::chrono_literals;

constexpr uint32_t kLayers = 2;
constexpr size_t kQueryHeads = 8, kKvHeads = 2, kHeadDim = 64;
constexpr uint64_t kPromptTokens = 2000, kNewTokens = 4;
constexpr double kTolerance = 1e-4;  // fp32 there, double here

std::vector<float> RandomNumbers(size_t count, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(*random);
  return numbers;
}

absl::string_view Bytes(const std::vector<float>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float)};
}

// One token: [1, heads, head_dim].
void FillTensor(const std::vector<float>& numbers, size_t heads, attnd::v1::Tensor* tensor) {
  tensor->set_dtype(attnd::v1::DTYPE_FP32);
  for (const size_t extent : {size_t{1}, heads, kHeadDim}) {
    tensor->add_shape(static_cast<uint32_t>(extent));
  }
  tensor->set_data(Bytes(numbers).data(), Bytes(numbers).size());
}

// What this program keeps of one layer, to compare: [tokens, kv_heads, head_dim].
struct Layer {
  std::vector<float> k, v;
};

// Softmax attention of one query token over all tokens of the layer; the largest difference to
// `out`.
double LargestDifference(const Layer& layer, const std::vector<float>& q, const float* out) {
  const size_t tokens = layer.k.size() / (kKvHeads * kHeadDim);
  double largest = 0;
  for (size_t head = 0; head < kQueryHeads; ++head) {
    const size_t kv_head = head / (kQueryHeads / kKvHeads);
    std::vector<double> sum(kHeadDim, 0.0);
    double weights = 0;
    for (size_t t = 0; t < tokens; ++t) {
      const size_t row = (t * kKvHeads + kv_head) * kHeadDim;
      double logit = 0;
      for (size_t c = 0; c < kHeadDim; ++c) {
        logit += double{q[head * kHeadDim + c]} * layer.k[row + c];
      }
      const double weight = std::exp(logit / std::sqrt(static_cast<double>(kHeadDim)));
      weights += weight;
      for (size_t c = 0; c < kHeadDim; ++c) sum[c] += weight * layer.v[row + c];
    }
    for (size_t c = 0; c < kHeadDim; ++c) {
      largest = std::max(largest, std::abs(sum[c] / weights - out[head * kHeadDim + c]));
    }
  }
  return largest;
}

// One step of one layer: sends a token's query, key and value, returns the difference of the answer
// to the truth.
absl::StatusOr<double> DecodeToken(attnd::DecodeSession* session, uint64_t sequence,
                                   uint32_t number, uint64_t position, Layer* layer,
                                   std::mt19937* random) {
  const auto q = RandomNumbers(kQueryHeads * kHeadDim, random);
  const auto k = RandomNumbers(kKvHeads * kHeadDim, random);
  const auto v = RandomNumbers(kKvHeads * kHeadDim, random);
  layer->k.insert(layer->k.end(), k.begin(), k.end());
  layer->v.insert(layer->v.end(), v.begin(), v.end());

  attnd::v1::DecodeRequest request;
  request.set_step_id(position);
  request.set_layer(number);
  attnd::v1::DecodeRow* row = request.add_rows();
  row->set_sequence_id(sequence);
  row->set_position(position);
  row->set_query_tokens(1);
  FillTensor(q, kQueryHeads, request.mutable_q());
  FillTensor(k, kKvHeads, request.mutable_k());
  FillTensor(v, kKvHeads, request.mutable_v());

  attnd::v1::DecodeResponse reply;
  if (auto status = session->Step(request, &reply, 10s); !status.ok()) return status;
  if (reply.status().code() != 0) return absl::InternalError(reply.status().message());
  if (reply.rows(0).status().code() != 0) {
    return absl::InternalError(reply.rows(0).status().message());
  }
  const attnd::v1::RowStats& stats = reply.rows(0).stats();
  // Token counts are sums over the KV heads.
  std::cout << "token " << position << " layer " << number << ": "
            << (stats.zone_tokens() + stats.exact_tokens()) / kKvHeads << " tokens read, "
            << stats.estimated_tokens() / kKvHeads << " estimated for each KV head, "
            << reply.engine_us() << " us in the engine\n";
  return LargestDifference(*layer, q, reinterpret_cast<const float*>(reply.out().data().data()));
}

absl::Status Run(const std::string& target) {
  const auto connected = attnd::Client::Connect({.target = target});
  if (!connected.ok()) return connected.status();
  attnd::Client* const client = connected->get();
  if (auto status = client->WaitHealthy(10s); !status.ok()) return status;

  // 1. Open a sequence.
  attnd::v1::OpenSequenceRequest open;
  open.mutable_model()->set_fingerprint("example");
  attnd::v1::ModelShape* shape = open.mutable_model()->mutable_shape();
  shape->set_layers(kLayers);
  shape->set_query_heads(kQueryHeads);
  shape->set_kv_heads(kKvHeads);
  shape->set_head_dim(kHeadDim);
  shape->set_dtype(attnd::v1::DTYPE_FP32);
  open.mutable_policy()->set_preset("dense");
  const auto opened = client->OpenSequence(open);
  if (!opened.ok()) return opened.status();
  const uint64_t sequence = opened->sequence_id();

  // 2. Upload the prompt's keys and values, here random ones.
  std::mt19937 random(42);
  std::vector<Layer> layers(kLayers);
  std::vector<attnd::KvBlock> blocks;
  for (uint32_t i = 0; i < kLayers; ++i) {
    layers[i].k = RandomNumbers(kPromptTokens * kKvHeads * kHeadDim, &random);
    layers[i].v = RandomNumbers(kPromptTokens * kKvHeads * kHeadDim, &random);
    blocks.push_back({.layer = i,
                      .first_position = 0,
                      .tokens = kPromptTokens,
                      .k = Bytes(layers[i].k),
                      .v = Bytes(layers[i].v)});
  }
  const auto appended = client->AppendKv(sequence, *shape, blocks, {}, {});
  if (!appended.ok()) return appended.status();
  std::cout << "prompt: " << appended->committed_tokens() << " tokens, "
            << appended->segmented_tokens() << " of them in segments\n";

  // 3. Decode: one message for each layer of each token.
  double largest = 0;
  const auto session = client->StartDecode();
  for (uint64_t token = 0; token < kNewTokens; ++token) {
    for (uint32_t i = 0; i < kLayers; ++i) {
      const auto difference =
          DecodeToken(session.get(), sequence, i, kPromptTokens + token, &layers[i], &random);
      if (!difference.ok()) return difference.status();
      largest = std::max(largest, *difference);
    }
  }
  if (auto status = session->Finish(10s); !status.ok()) return status;

  // 4. Close, and compare.
  if (auto status = client->CloseSequence(sequence); !status.ok()) return status;
  std::cout << "largest difference to attention computed here: " << largest << "\n";
  if (largest > kTolerance) return absl::InternalError("attnd's answer is wrong");
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: attnd_example ADDRESS\n";
    return 2;
  }
  const absl::Status status = Run(argv[1]);
  if (!status.ok()) std::cerr << "attnd_example: " << status << "\n";
  return status.ok() ? 0 : 1;
}
