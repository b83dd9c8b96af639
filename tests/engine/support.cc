// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/support.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>

#include "attention/cpu/cpu_backend.h"
#include "common/dtype.h"
#include "tests/oracle/attention.h"

namespace attnd::engine::test {
namespace {

// Answers are single precision; a token lost or counted twice among a few thousand moves them much
// further.
constexpr double kTolerance = 5e-5;

// The distribution's oneTBB is not instrumented: the thread sanitizer sees its workers but not how
// they wait for one another, and takes every parallel step for a race. With one thread a step runs
// on the thread that asks for it and uses no TBB; the engine's own threads (callers, background,
// prefill) stay as they are.
#ifdef __SANITIZE_THREAD__
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

uint64_t KeyWidth(const ModelShape& shape) { return uint64_t{shape.kv_heads} * shape.head_dim; }
uint64_t ValueWidth(const ModelShape& shape) { return uint64_t{shape.kv_heads} * shape.value_dim; }

Numbers SliceNumbers(const Numbers& all, uint64_t first, uint64_t count) {
  Numbers slice;
  slice.dtype = all.dtype;
  const size_t element = DTypeBytes(all.dtype);
  slice.values.assign(all.values.begin() + static_cast<ptrdiff_t>(first),
                      all.values.begin() + static_cast<ptrdiff_t>(first + count));
  slice.bytes.assign(all.bytes.begin() + static_cast<ptrdiff_t>(first * element),
                     all.bytes.begin() + static_cast<ptrdiff_t>((first + count) * element));
  return slice;
}

bool SameInfo(const SequenceInfo& a, const SequenceInfo& b) {
  return a.committed_tokens == b.committed_tokens && a.segmented_tokens == b.segmented_tokens &&
         a.segments == b.segments && a.resident_bytes == b.resident_bytes &&
         a.layer_tokens == b.layer_tokens;
}

}  // namespace

EngineOptions SmallOptions() {
  EngineOptions options;
  options.memory_budget_bytes = uint64_t{256} << 20;
  options.segment_tokens = 512;
  options.default_policy = PolicyOf("dense");
  return options;
}

std::unique_ptr<Engine> MakeEngine(const EngineOptions& options, EventListener* observer,
                                   uint32_t threads) {
  attention::CpuBackendOptions backend;
  backend.threads = kThreadSanitizer ? 1 : threads;
  auto engine = Engine::Create(options, attention::MakeCpuBackend(backend), observer);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return *std::move(engine);
}

attention::Policy PolicyOf(const std::string& preset,
                           const std::map<std::string, std::string>& parameters) {
  auto policy = attention::ParsePolicy(preset, parameters);
  EXPECT_TRUE(policy.ok()) << policy.status();
  return *std::move(policy);
}

ModelShape MakeShape(uint32_t layers, uint32_t query_heads, uint32_t kv_heads, uint32_t head_dim,
                     uint32_t value_dim, DType dtype) {
  ModelShape shape;
  shape.layers = layers;
  shape.query_heads = query_heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  shape.value_dim = value_dim;
  shape.dtype = dtype;
  shape.softmax_scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  return shape;
}

ModelShape MakeLatentShape(uint32_t layers, uint32_t query_heads, uint32_t head_dim,
                           uint32_t value_dim, DType dtype) {
  ModelShape shape = MakeShape(layers, query_heads, 1, head_dim, value_dim, dtype);
  shape.latent = true;
  return shape;
}

OpenArgs ArgsOf(const ModelShape& shape, std::optional<attention::Policy> policy) {
  OpenArgs args;
  args.fingerprint = "test";
  args.shape = shape;
  args.policy = std::move(policy);
  return args;
}

void Numbers::Append(const Numbers& other) {
  dtype = other.dtype;
  bytes.insert(bytes.end(), other.bytes.begin(), other.bytes.end());
  values.insert(values.end(), other.values.begin(), other.values.end());
}

void Numbers::Set(size_t index, float value) {
  std::byte* target = bytes.data() + index * DTypeBytes(dtype);
  FromFloat(dtype, &value, 1, target);
  float stored = 0;
  ToFloat(dtype, target, 1, &stored);
  values[index] = stored;
}

Numbers NumbersOf(DType dtype, const std::vector<float>& values) {
  Numbers numbers;
  numbers.dtype = dtype;
  numbers.bytes.resize(values.size() * DTypeBytes(dtype));
  FromFloat(dtype, values.data(), values.size(), numbers.bytes.data());
  std::vector<float> stored(values.size());
  ToFloat(dtype, numbers.bytes.data(), values.size(), stored.data());
  numbers.values.assign(stored.begin(), stored.end());
  return numbers;
}

Numbers RandomNumbers(DType dtype, size_t count, Random* random, float scale) {
  std::vector<float> values(count);
  for (float& value : values) value = scale * random->Number();
  return NumbersOf(dtype, values);
}

Kv RandomKv(const ModelShape& shape, uint64_t tokens, Random* random) {
  Kv kv;
  kv.tokens = tokens;
  kv.k = RandomNumbers(shape.dtype, tokens * KeyWidth(shape), random);
  kv.latent = shape.latent;
  if (!shape.latent) {
    kv.v = RandomNumbers(shape.dtype, tokens * ValueWidth(shape), random);
    return kv;
  }
  kv.v.dtype = shape.dtype;
  for (uint64_t token = 0; token < tokens; ++token) {
    kv.v.Append(SliceNumbers(kv.k, token * shape.head_dim, shape.value_dim));
  }
  return kv;
}

uint64_t History::committed() const {
  uint64_t least = layers[0].tokens;
  for (const Kv& layer : layers) least = std::min(least, layer.tokens);
  return least;
}

void History::Append(uint32_t layer, const Kv& kv) {
  layers[layer].tokens += kv.tokens;
  layers[layer].latent = kv.latent;
  layers[layer].k.Append(kv.k);
  layers[layer].v.Append(kv.v);
}

void History::Truncate(uint64_t length) {
  for (uint32_t layer = 0; layer < shape.layers; ++layer) layers[layer] = Slice(layer, 0, length);
}

Kv History::Slice(uint32_t layer, uint64_t first, uint64_t tokens) const {
  Kv kv;
  kv.tokens = tokens;
  kv.latent = shape.latent;
  kv.k = SliceNumbers(layers[layer].k, first * KeyWidth(shape), tokens * KeyWidth(shape));
  kv.v = SliceNumbers(layers[layer].v, first * ValueWidth(shape), tokens * ValueWidth(shape));
  return kv;
}

SequenceInfo TestSequence::Info() const {
  auto info = engine->Info(kTenant, id);
  EXPECT_TRUE(info.ok()) << info.status();
  return info.ok() ? *info : SequenceInfo();
}

TestSequence OpenSequence(Engine* engine, const ModelShape& shape,
                          std::optional<attention::Policy> policy) {
  const auto id = engine->Open(kTenant, ArgsOf(shape, std::move(policy)));
  EXPECT_TRUE(id.ok()) << id.status();
  return TestSequence(engine, id.value_or(0), shape);
}

AppendChunk ChunkOf(uint32_t layer, uint64_t first_position, const Kv& kv) {
  AppendChunk chunk;
  chunk.layer = layer;
  chunk.first_position = first_position;
  chunk.tokens = kv.tokens;
  chunk.k = kv.k.view();
  if (!kv.latent) chunk.v = kv.v.view();
  return chunk;
}

absl::Status AppendNext(TestSequence* sequence, uint32_t layer, const Kv& kv) {
  const uint64_t first = sequence->history.layers[layer].tokens;
  AppendChunk chunk = ChunkOf(layer, first, kv);
  chunk.prompt_tokens = sequence->prompt_tokens;
  absl::Status status = sequence->engine->Append(kTenant, sequence->writer, sequence->id, chunk);
  if (status.ok()) sequence->history.Append(layer, kv);
  return status;
}

void Prefill(TestSequence* sequence, uint64_t tokens, Random* random, bool chunked) {
  const ModelShape& shape = sequence->shape();
  std::vector<uint64_t> left(shape.layers, tokens);
  for (uint64_t remaining = tokens * shape.layers; remaining > 0;) {
    uint32_t layer = static_cast<uint32_t>(random->Below(shape.layers));
    while (left[layer] == 0) layer = (layer + 1) % shape.layers;
    const uint64_t most = std::min<uint64_t>(left[layer], 700);
    const uint64_t now = chunked ? 1 + random->Below(most) : left[layer];
    const absl::Status status = AppendNext(sequence, layer, RandomKv(shape, now, random));
    ASSERT_TRUE(status.ok()) << status;
    left[layer] -= now;
    remaining -= now;
  }
}

PrefillResult FinishPrefill(TestSequence* sequence) {
  auto result = sequence->engine->FinishPrefill(kTenant, sequence->writer, sequence->id, nullptr);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *result : PrefillResult();
}

Row NextRow(TestSequence* sequence, uint32_t layer, uint32_t query_tokens, Random* random,
            DType query_dtype) {
  const ModelShape& shape = sequence->shape();
  Row row;
  row.sequence = sequence;
  row.position = sequence->history.layers[layer].tokens;
  row.query_tokens = query_tokens;
  row.q = RandomNumbers(query_dtype, size_t{query_tokens} * shape.query_heads * shape.head_dim,
                        random, 1.5f);
  row.kv = RandomKv(shape, query_tokens, random);
  return row;
}

Row QueryOnlyRow(TestSequence* sequence, uint32_t layer, uint32_t query_tokens, Random* random) {
  const ModelShape& shape = sequence->shape();
  Row row;
  row.sequence = sequence;
  row.position = sequence->history.layers[layer].tokens;
  row.query_tokens = query_tokens;
  row.query_only = true;
  row.q = RandomNumbers(DType::kFp32, size_t{query_tokens} * shape.query_heads * shape.head_dim,
                        random, 1.5f);
  return row;
}

Message::Message(uint32_t layer, const std::vector<Row>& from) : rows(from) {
  const ModelShape& shape = rows.at(0).sequence->shape();
  for (const Row& row : rows) {
    DecodeRow& decode_row = decode_rows.emplace_back();
    decode_row.sequence_id = row.sequence_id.value_or(row.sequence->id);
    decode_row.position = row.position;
    decode_row.query_tokens = row.query_tokens;
    decode_row.token_ids = row.token_ids;
    decode_row.policy = row.policy;
    decode_row.query_only = row.query_only;
    decode_row.precheck = row.precheck;
    q.Append(row.q);
    if (row.query_only) continue;
    k.Append(row.kv.k);
    v.Append(row.kv.v);
  }
  args.layer = layer;
  args.rows = decode_rows;
  args.q = q.view();
  args.q_heads = shape.query_heads;
  args.q_head_dim = shape.head_dim;
  if (k.values.empty()) return;
  args.k = k.view();
  args.k_heads = shape.kv_heads;
  args.k_head_dim = shape.head_dim;
  if (shape.latent) return;
  args.v = v.view();
  args.v_heads = shape.kv_heads;
  args.v_value_dim = shape.value_dim;
}

Answer Send(Engine* engine, const Message& message, WriterId writer) {
  Answer answer;
  answer.status = engine->Decode(kTenant, writer, message.args, answer.memory, &answer.result);
  if (!answer.status.ok()) return answer;
  for (size_t i = 0; i < message.rows.size(); ++i) {
    const Row& row = message.rows[i];
    if (row.query_only || !answer.result.rows[i].status.ok()) continue;
    History& history = row.sequence->history;
    if (history.layers[message.args.layer].tokens == row.position) {
      history.Append(message.args.layer, row.kv);
    }
  }
  return answer;
}

Answer SendRow(const Row& row, uint32_t layer) {
  const Message message(layer, {row});
  return Send(row.sequence->engine, message, row.sequence->writer);
}

Answer DecodeNext(TestSequence* sequence, uint32_t layer, uint32_t query_tokens, Random* random) {
  return SendRow(NextRow(sequence, layer, query_tokens, random), layer);
}

void Generate(TestSequence* sequence, uint64_t steps, Random* random, bool check) {
  for (uint64_t step = 0; step < steps; ++step) {
    for (uint32_t layer = 0; layer < sequence->shape().layers; ++layer) {
      const Message message(layer, {NextRow(sequence, layer, 1, random)});
      const Answer answer = Send(sequence->engine, message, sequence->writer);
      ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
      if (check) {
        ASSERT_TRUE(IsDense(message, answer, 0)) << "step " << step;
      }
    }
  }
}

RowAnswer AnswerOf(const Message& message, const Answer& answer, size_t row) {
  const ModelShape& shape = message.rows[row].sequence->shape();
  size_t first = 0;
  for (size_t i = 0; i < row; ++i) first += message.rows[i].query_tokens;
  const size_t slot = first * shape.query_heads;
  const size_t lanes = size_t{message.rows[row].query_tokens} * shape.query_heads;
  const auto cut = [](const std::vector<float>& from, size_t begin, size_t count) {
    if (from.size() < begin + count) {
      ADD_FAILURE() << "an answer of " << from.size() << " values has none at " << begin + count;
      return std::vector<float>(count, std::nanf(""));
    }
    const auto start = from.begin() + static_cast<ptrdiff_t>(begin);
    return std::vector<float>(start, start + static_cast<ptrdiff_t>(count));
  };
  return {cut(answer.memory.out(), slot * shape.value_dim, lanes * shape.value_dim),
          cut(answer.memory.lse(), slot, lanes)};
}

testing::AssertionResult IsDense(const Message& message, const Answer& answer, size_t number) {
  const Row& row = message.rows[number];
  if (!answer.row_status(number).ok()) {
    return testing::AssertionFailure() << "row " << number << ": " << answer.row_status(number);
  }
  const ModelShape& shape = row.sequence->shape();
  const RowAnswer found = AnswerOf(message, answer, number);
  const Kv& all = row.sequence->history.layers[message.args.layer];
  for (uint64_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    const oracle::StridedRows keys{all.k.values.data() + kv_head * shape.head_dim, KeyWidth(shape)};
    const oracle::StridedRows values{all.v.values.data() + kv_head * shape.value_dim,
                                     ValueWidth(shape)};
    for (uint64_t i = 0; i < uint64_t{row.query_tokens} * shape.group(); ++i) {
      const uint64_t token = i / shape.group();
      const uint64_t head = kv_head * shape.group() + i % shape.group();
      const uint64_t slot = token * shape.query_heads + head;
      const uint64_t seen = row.query_only ? row.position : row.position + token + 1;
      oracle::Require(seen * KeyWidth(shape) <= all.k.values.size() &&
                          seen * ValueWidth(shape) <= all.v.values.size(),
                      "a history of what the query token sees");
      const auto query = row.q.values.begin() + static_cast<ptrdiff_t>(slot * shape.head_dim);
      const oracle::HeadOutput right =
          oracle::DenseHead(oracle::Vector(query, query + static_cast<ptrdiff_t>(shape.head_dim)),
                            keys, values, seen, shape.softmax_scale, shape.value_dim);
      oracle::Vector out(shape.value_dim);
      for (uint64_t c = 0; c < shape.value_dim; ++c) out[c] = found.out[slot * shape.value_dim + c];
      const double error = oracle::RelativeError(out, right.out);
      const bool empty = std::isinf(right.lse) && std::isinf(found.lse[slot]);
      const double lse_error = empty ? 0 : std::abs(found.lse[slot] - right.lse);
      if (error <= kTolerance && lse_error <= kTolerance * std::max(1.0, std::abs(right.lse))) {
        continue;
      }
      if (empty && error == 0) continue;
      return testing::AssertionFailure()
             << "row " << number << " layer " << message.args.layer << " query token " << token
             << " head " << head << " of position " << row.position << ": relative error " << error
             << ", lse " << found.lse[slot] << " for " << right.lse;
    }
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult AnswersDense(TestSequence* sequence, Random* random) {
  for (uint32_t layer = 0; layer < sequence->shape().layers; ++layer) {
    Row row = QueryOnlyRow(sequence, layer, 1, random);
    row.policy = PolicyOf("dense", {{"sink", "0"}, {"window", "0"}});
    const Message message(layer, {row});
    const Answer answer = Send(sequence->engine, message, sequence->writer);
    if (testing::AssertionResult result = IsDense(message, answer, 0); !result) return result;
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult MatchesModel(TestSequence* sequence, Random* random) {
  const SequenceInfo info = sequence->Info();
  for (uint32_t layer = 0; layer < sequence->shape().layers; ++layer) {
    if (info.layer_tokens[layer] == sequence->history.layers[layer].tokens) continue;
    return testing::AssertionFailure() << "layer " << layer << " has " << info.layer_tokens[layer]
                                       << " tokens for " << sequence->history.layers[layer].tokens;
  }
  if (info.committed_tokens != sequence->history.committed()) {
    return testing::AssertionFailure() << "committed " << info.committed_tokens << " tokens for "
                                       << sequence->history.committed();
  }
  return AnswersDense(sequence, random);
}

State StateOf(TestSequence* sequence) {
  State state;
  state.info = sequence->Info();
  for (uint32_t layer = 0; layer < sequence->shape().layers; ++layer) {
    Random random(TestSeed());
    const Message message(layer, {QueryOnlyRow(sequence, layer, 1, &random)});
    const Answer answer = Send(sequence->engine, message, sequence->writer);
    if (!answer.row_status(0).ok()) {
      ADD_FAILURE() << "layer " << layer << ": " << answer.row_status(0);
      return state;
    }
    state.answers.push_back(AnswerOf(message, answer, 0));
  }
  return state;
}

testing::AssertionResult Unchanged(TestSequence* sequence, const State& before) {
  const State after = StateOf(sequence);
  if (!SameInfo(before.info, after.info)) {
    return testing::AssertionFailure()
           << "lengths, segments or bytes changed: committed " << before.info.committed_tokens
           << " -> " << after.info.committed_tokens << ", bytes " << before.info.resident_bytes
           << " -> " << after.info.resident_bytes;
  }
  if (before.answers != after.answers) return testing::AssertionFailure() << "an answer changed";
  return testing::AssertionSuccess();
}

}  // namespace attnd::engine::test
