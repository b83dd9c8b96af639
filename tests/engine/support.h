// SPDX-License-Identifier: Apache-2.0
//
// What the tests of engine/ share: small engines, random keys and values, a plain model of a
// sequence's history in double precision, Decode messages with their buffers, and the comparison of
// dense answers with the oracle.
#ifndef ATTND_TESTS_ENGINE_SUPPORT_H_
#define ATTND_TESTS_ENGINE_SUPPORT_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "attention/policy/policy.h"
#include "common/model_shape.h"
#include "engine/engine.h"
#include "tests/test_seed.h"

namespace attnd::engine::test {

using attnd::test::TestSeed;

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  // 0 .. n - 1
  uint64_t Below(uint64_t n) {
    return std::uniform_int_distribution<uint64_t>(0, n - 1)(generator_);
  }
  // Cheap and finite; about as wide as a standard normal.
  float Number() {
    return static_cast<float>(std::uniform_real_distribution<double>(-1.7, 1.7)(generator_));
  }
  std::mt19937_64& generator() { return generator_; }

 private:
  std::mt19937_64 generator_;
};

inline constexpr char kTenant[] = "tenant";
inline constexpr WriterId kWriter = 1;

// Segments of 512 tokens, a budget of 256 MiB, dense by default.
EngineOptions SmallOptions();
std::unique_ptr<Engine> MakeEngine(const EngineOptions& options, EventListener* observer = nullptr,
                                   uint32_t threads = 2);
attention::Policy PolicyOf(const std::string& preset,
                           const std::map<std::string, std::string>& parameters = {});
ModelShape MakeShape(uint32_t layers, uint32_t query_heads, uint32_t kv_heads, uint32_t head_dim,
                     uint32_t value_dim, DType dtype);
// One KV head whose value is the front of its key.
ModelShape MakeLatentShape(uint32_t layers, uint32_t query_heads, uint32_t head_dim,
                           uint32_t value_dim, DType dtype);
OpenArgs ArgsOf(const ModelShape& shape, std::optional<attention::Policy> policy = std::nullopt);

// Numbers as they are sent, and what they mean.
struct Numbers {
  DType dtype = DType::kFp32;
  std::vector<std::byte> bytes;
  std::vector<double> values;

  void Append(const Numbers& other);
  // Replaces one element.
  void Set(size_t index, float value);
  TensorView view() const { return {dtype, bytes.data(), values.size()}; }
};
Numbers NumbersOf(DType dtype, const std::vector<float>& values);
Numbers RandomNumbers(DType dtype, size_t count, Random* random, float scale = 1);

// Keys and values of some tokens of one layer.
struct Kv {
  uint64_t tokens = 0;
  Numbers k;            // [tokens, kv_heads, head_dim]
  Numbers v;            // [tokens, kv_heads, value_dim]
  bool latent = false;  // v is the front of k, and not sent
};
Kv RandomKv(const ModelShape& shape, uint64_t tokens, Random* random);

// What a sequence should hold: every layer's tokens from position 0.
struct History {
  explicit History(const ModelShape& s) : shape(s), layers(s.layers) {}
  uint64_t committed() const;
  void Append(uint32_t layer, const Kv& kv);
  void Truncate(uint64_t length);
  // Tokens [first, + tokens) of a layer.
  Kv Slice(uint32_t layer, uint64_t first, uint64_t tokens) const;

  ModelShape shape;
  std::vector<Kv> layers;
};

// A sequence of an engine with its model. What the helpers send is in the model when they return.
struct TestSequence {
  TestSequence(Engine* e, uint64_t sequence_id, const ModelShape& shape)
      : engine(e), id(sequence_id), history(shape) {}

  Engine* engine;
  uint64_t id;
  WriterId writer = kWriter;
  uint64_t prompt_tokens = 0;  // that its uploads say
  History history;

  const ModelShape& shape() const { return history.shape; }
  SequenceInfo Info() const;
};

TestSequence OpenSequence(Engine* engine, const ModelShape& shape,
                          std::optional<attention::Policy> policy = std::nullopt);
AppendChunk ChunkOf(uint32_t layer, uint64_t first_position, const Kv& kv);
// Sends `kv` as the next tokens of the layer; the model takes them only if the engine does.
absl::Status AppendNext(TestSequence* sequence, uint32_t layer, const Kv& kv);
// Appends `tokens` random tokens to every layer, in random chunks and a random order of layers, if
// chunked.
void Prefill(TestSequence* sequence, uint64_t tokens, Random* random, bool chunked = true);
PrefillResult FinishPrefill(TestSequence* sequence);

// One row of a message.
struct Row {
  TestSequence* sequence = nullptr;
  uint64_t position = 0;
  uint32_t query_tokens = 1;
  bool query_only = false;
  std::optional<attention::Policy> policy;
  std::vector<uint32_t> token_ids;
  Numbers q;                            // [query_tokens, query_heads, head_dim]
  Kv kv;                                // nothing if query_only
  std::optional<uint64_t> sequence_id;  // instead of the sequence's
  absl::Status precheck;
};
// The next tokens of a layer, random.
Row NextRow(TestSequence* sequence, uint32_t layer, uint32_t query_tokens, Random* random,
            DType query_dtype = DType::kFp32);
Row QueryOnlyRow(TestSequence* sequence, uint32_t layer, uint32_t query_tokens, Random* random);

// A Decode message with its buffers: rows of one shape.
struct Message {
  Message(uint32_t layer, const std::vector<Row>& rows);
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  std::vector<Row> rows;
  std::vector<DecodeRow> decode_rows;
  Numbers q, k, v;
  DecodeArgs args;
};

struct Answer {
  absl::Status status;
  DecodeResult result;
  AnswerVectors memory;

  absl::Status row_status(size_t row) const {
    return status.ok() ? result.rows.at(row).status : status;
  }
};
// Sends the message; the models take the tokens of rows that were answered and were not there yet.
Answer Send(Engine* engine, const Message& message, WriterId writer = kWriter);
// Sends one row, or a row of random next tokens.
Answer SendRow(const Row& row, uint32_t layer);
Answer DecodeNext(TestSequence* sequence, uint32_t layer, uint32_t query_tokens, Random* random);
// `steps` steps of one token through all layers; every answer is compared with the oracle if
// `check`.
void Generate(TestSequence* sequence, uint64_t steps, Random* random, bool check = false);

// A row's part of an answer.
struct RowAnswer {
  std::vector<float> out;
  std::vector<float> lse;
  bool operator==(const RowAnswer&) const = default;
};
RowAnswer AnswerOf(const Message& message, const Answer& answer, size_t row);

// Whether the row's answer is dense attention over its sequence's model, as it is now.
testing::AssertionResult IsDense(const Message& message, const Answer& answer, size_t row);
// A query_only row of every layer, compared with the oracle.
testing::AssertionResult AnswersDense(TestSequence* sequence, Random* random);
// The same, and the lengths.
testing::AssertionResult MatchesModel(TestSequence* sequence, Random* random);

// What a refused call must leave as it was: Info, usage and the bits of an answer of every layer.
struct State {
  SequenceInfo info;
  std::vector<RowAnswer> answers;
};
State StateOf(TestSequence* sequence);
testing::AssertionResult Unchanged(TestSequence* sequence, const State& before);

}  // namespace attnd::engine::test

#endif  // ATTND_TESTS_ENGINE_SUPPORT_H_
