// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/support.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <optional>

#include "attention/index/segment_builder.h"
#include "common/dtype.h"
#include "tests/attention/client_memory.h"
#include "tests/attention/made_before.h"

namespace attnd::attention::test {
namespace {

// Turns the first half of each key's channels, in pairs, by angles that grow with the position.
void Rotate(size_t head_dim, uint64_t position, float* key) {
  const size_t pairs = head_dim / 4;
  for (size_t c = 0; c < pairs; ++c) {
    const double angle = static_cast<double>(position) *
                         std::pow(1000.0, -static_cast<double>(c + 1) / static_cast<double>(pairs));
    const double x = key[c];
    const double y = key[c + pairs];
    key[c] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
    key[c + pairs] = static_cast<float>(x * std::sin(angle) + y * std::cos(angle));
  }
}

// Multiplies stored numbers, at most up to the largest finite ones.
void Scale(DType dtype, double factor, std::vector<float>* values) {
  if (factor == 1) return;
  const double max = dtype == DType::kFp16 ? 65504 : 3.3e38;
  for (float& x : *values) x = static_cast<float>(std::clamp(x * factor, -max, max));
  *values = Rounded(dtype, *values);
}

// [tokens][value_dim] the values of a latent shape's keys.
std::vector<float> FrontsOf(const ModelShape& shape, const std::vector<float>& keys) {
  std::vector<float> values;
  for (size_t first = 0; first < keys.size(); first += shape.head_dim) {
    const auto row = keys.begin() + static_cast<ptrdiff_t>(first);
    values.insert(values.end(), row, row + shape.value_dim);
  }
  return values;
}

}  // namespace

std::vector<float> Random::Normals(size_t count, double scale) {
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(scale * Normal());
  return values;
}

std::vector<std::byte> Stored(DType dtype, std::span<const float> values) {
  std::vector<std::byte> bytes(values.size() * DTypeBytes(dtype));
  FromFloat(dtype, values.data(), values.size(), bytes.data());
  return bytes;
}

std::vector<float> Rounded(DType dtype, std::span<const float> values) {
  std::vector<float> rounded(values.size());
  ToFloat(dtype, Stored(dtype, values).data(), values.size(), rounded.data());
  return rounded;
}

double UnitRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return 0x1p-8;
    case DType::kFp16:
      return 0x1p-11;
    case DType::kFp32:
      return 0x1p-24;
  }
  return 0;
}

Policy Parse(const std::string& preset, const std::map<std::string, std::string>& parameters) {
  const absl::StatusOr<Policy> policy = ParsePolicy(preset, parameters);
  EXPECT_TRUE(policy.ok()) << policy.status();
  return policy.ok() ? *policy : Policy();
}

std::string Describe(const Policy& policy) {
  std::string text = policy.preset;
  for (const auto& [name, value] : policy.Parameters()) text += " " + name + "=" + value;
  return text;
}

ModelShape MakeShape(uint32_t query_heads, uint32_t kv_heads, uint32_t head_dim, uint32_t value_dim,
                     DType dtype, uint32_t layers) {
  ModelShape shape;
  shape.layers = layers;
  shape.query_heads = query_heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  shape.value_dim = value_dim;
  shape.dtype = dtype;
  shape.softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
  return shape;
}

ModelShape MakeLatentShape(uint32_t query_heads, uint32_t head_dim, uint32_t value_dim, DType dtype,
                           uint32_t layers) {
  ModelShape shape = MakeShape(query_heads, 1, head_dim, value_dim, dtype, layers);
  shape.latent = true;
  return shape;
}

uint64_t SequenceSpec::tokens() const {
  return std::accumulate(segment_tokens.begin(), segment_tokens.end(), tail_tokens);
}

std::ostream& operator<<(std::ostream& out, const SequenceSpec& spec) {
  const ModelShape& s = spec.shape;
  out << "seed " << spec.seed << ", layers " << s.layers << ", heads " << s.query_heads << "/"
      << s.kv_heads << ", dims " << s.head_dim << "/" << s.value_dim
      << (s.latent ? " latent, " : ", ") << std::string(DTypeName(s.dtype)) << ", sink "
      << spec.sink << ", segments";
  for (const uint32_t tokens : spec.segment_tokens) out << " " << tokens;
  return out << ", tail " << spec.tail_tokens << ", scales " << spec.key_scale << "/"
             << spec.value_scale;
}

HeadData MakeHeadData(const ModelShape& shape, uint64_t tokens, Random* random) {
  constexpr double kNoise = 0.6;
  const size_t dim = shape.head_dim;
  const size_t value_dim = shape.value_dim;
  const size_t centres = tokens / 40 + 2;
  const std::vector<float> centre_keys = random->Normals(centres * dim);
  const std::vector<float> centre_values = random->Normals(centres * value_dim);
  std::vector<double> channel_scale(dim);
  for (double& scale : channel_scale) scale = std::exp(0.5 * random->Normal());
  const std::vector<float> offset = random->Normals(dim);

  HeadData data;
  data.keys.resize(tokens * dim);
  data.values.resize(tokens * value_dim);
  for (uint64_t t = 0; t < tokens; ++t) {
    // Squaring makes the first centres popular and the last rare.
    const double place = random->Uniform();
    const size_t centre = static_cast<size_t>(place * place * static_cast<double>(centres));
    float* key = data.keys.data() + t * dim;
    for (size_t c = 0; c < dim; ++c) {
      key[c] = static_cast<float>(channel_scale[c] *
                                  (centre_keys[centre * dim + c] + kNoise * random->Normal()));
    }
    Rotate(dim, t, key);
    for (size_t c = 0; c < dim; ++c) key[c] += offset[c];
    for (size_t c = 0; c < value_dim; ++c) {
      data.values[t * value_dim + c] =
          static_cast<float>(centre_values[centre * value_dim + c] + kNoise * random->Normal());
    }
  }
  data.keys = Rounded(shape.dtype, data.keys);
  data.values = shape.latent ? FrontsOf(shape, data.keys) : Rounded(shape.dtype, data.values);
  return data;
}

HeadData OppositeHalves(size_t half, size_t dim, Random* random) {
  HeadData data;
  data.keys = random->Normals(half * dim);
  data.values = random->Normals(half * dim);
  for (size_t t = 0; t < half; ++t) data.keys[t * dim] = 64;
  for (size_t i = 0; i < half * dim; ++i) {
    data.keys.push_back(i % dim == 0 ? -64 : data.keys[i]);
    data.values.push_back(-data.values[i]);
  }
  return data;
}

std::shared_ptr<const SequenceView> MakeTailView(const ModelShape& shape, uint64_t tokens,
                                                 const std::vector<HeadData>& heads,
                                                 const IndexSet& indexes) {
  const PageGeometry geometry(shape);
  auto view = std::make_shared<SequenceView>();
  view->shape = shape;
  view->indexes = indexes;
  for (uint64_t begin = 0; begin < tokens; begin += kTailBlockTokens) {
    auto block = std::make_shared<TailBlock>(shape);
    for (uint32_t h = 0; h < heads.size(); ++h) {
      std::byte* pages = block->pages(h / shape.kv_heads, h % shape.kv_heads);
      for (uint64_t t = begin; t < std::min(tokens, begin + kTailBlockTokens); ++t) {
        FromFloat(shape.dtype, heads[h].keys.data() + t * shape.head_dim, shape.head_dim,
                  pages + geometry.KeyOffset(t - begin));
        if (shape.latent) continue;
        FromFloat(shape.dtype, heads[h].values.data() + t * shape.value_dim, shape.value_dim,
                  pages + geometry.ValueOffset(t - begin));
      }
    }
    view->tail.push_back(std::move(block));
  }
  return view;
}

std::shared_ptr<const Segment> BuildSegment(const std::shared_ptr<const SequenceView>& view,
                                            uint32_t tokens, uint32_t unclustered, uint64_t id,
                                            int64_t quantum_us, bool sections) {
  SegmentBuilder builder(view, id, {view->shape, view->indexes, tokens, unclustered, sections});
  EXPECT_TRUE(builder.allocated());
  HeadBuilder head_builder;
  for (uint32_t head = 0; head < builder.heads(); ++head) {
    head_builder.Start(&builder, head);
    while (!head_builder.Advance(std::chrono::microseconds(quantum_us))) {
    }
  }
  return builder.Finish();
}

TestSequence MakeSequence(const SequenceSpec& spec) {
  return MakeSequenceOf(spec, MakeHeads(spec));
}

std::vector<HeadData> MakeHeads(const SequenceSpec& spec) {
  if (std::optional<std::vector<HeadData>> made = MadeBefore::Get().Heads(spec)) {
    return *std::move(made);
  }
  std::vector<HeadData> heads;
  Random random(spec.seed);
  for (uint32_t h = 0; h < spec.shape.layers * spec.shape.kv_heads; ++h) {
    HeadData& data = heads.emplace_back(MakeHeadData(spec.shape, spec.tokens(), &random));
    Scale(spec.shape.dtype, spec.key_scale, &data.keys);
    Scale(spec.shape.dtype, spec.value_scale, &data.values);
    if (spec.shape.latent) data.values = FrontsOf(spec.shape, data.keys);
  }
  MadeBefore::Get().KeepHeads(spec, heads);
  return heads;
}

TestSequence MakeSequenceOf(const SequenceSpec& spec, std::vector<HeadData> heads) {
  TestSequence sequence;
  sequence.spec = spec;
  sequence.heads = std::move(heads);
  std::shared_ptr<const SequenceView> view =
      MakeTailView(spec.shape, spec.tokens(), sequence.heads, spec.indexes);
  if (spec.feature_maps != nullptr) {
    auto with_maps = std::make_shared<SequenceView>(*view);
    with_maps->state.feature_maps = spec.feature_maps;
    view = std::move(with_maps);
  }
  const std::vector<std::shared_ptr<const TailBlock>> blocks = view->tail;
  const std::optional<MadeBefore::Segments> made =
      MadeBefore::Get().SegmentsOf(spec, sequence.heads);
  for (size_t s = 0; s < spec.segment_tokens.size(); ++s) {
    auto next = std::make_shared<SequenceView>(*view);
    const uint32_t unclustered = s == 0 ? spec.sink : 0;
    const bool sections =
        spec.indexes.has_sections() && spec.segment_tokens[s] > spec.sections_above;
    next->segments.push_back(made.has_value()
                                 ? (*made)[s]
                                 : BuildSegment(view, spec.segment_tokens[s], unclustered, s + 1,
                                                kBuildQuantumUs, sections));
    next->tail_begin = view->tail_begin + spec.segment_tokens[s];
    if (s == 0 && spec.indexes.Has(IndexKind::kLabels)) {
      next->state.label_choice = LabelChoiceOf(*next->segments[0]);
    }
    const auto first = static_cast<ptrdiff_t>(next->tail_begin / kTailBlockTokens);
    next->tail.clear();
    if (first < static_cast<ptrdiff_t>(blocks.size())) {
      next->tail.assign(blocks.begin() + first, blocks.end());
    }
    view = std::move(next);
  }
  if (!made.has_value()) {
    MadeBefore::Get().KeepSegments(spec, sequence.heads, view->segments);
  }
  sequence.view = std::move(view);
  return sequence;
}

TestRow MakeRow(TestSequence* sequence, const Policy& policy, uint64_t past_tokens,
                uint32_t query_tokens, bool query_only, DType query_dtype, uint32_t layer,
                uint64_t seed) {
  constexpr double kAim = 0.8;  // how much of a key there is in a query
  const ModelShape& shape = sequence->spec.shape;
  Random random(seed);
  TestRow row;
  row.sequence = sequence;
  row.policy = policy;
  row.past_tokens = past_tokens;
  row.query_tokens = query_tokens;
  row.query_only = query_only;
  row.query_dtype = query_dtype;
  row.queries = random.Normals(size_t{query_tokens} * shape.query_heads * shape.head_dim);
  for (size_t i = 0; i < row.queries.size() && sequence->spec.tokens() > 0;) {
    const size_t head = i / shape.head_dim % shape.query_heads;
    const HeadData& data = sequence->head(layer, static_cast<uint32_t>(head / shape.group()));
    const uint64_t token = random.Below(sequence->spec.tokens());
    for (size_t c = 0; c < shape.head_dim; ++c, ++i) {
      row.queries[i] += static_cast<float>(kAim * data.keys[token * shape.head_dim + c]);
    }
  }
  // From flat to peaked softmax, so that both small and capped logit variances occur.
  const double sharpness = 0.1 + 0.9 * random.Uniform();
  for (float& x : row.queries) x = static_cast<float>(sharpness * x);
  row.queries = Rounded(query_dtype, row.queries);
  return row;
}

std::shared_ptr<BlockRecall> MakeRecall(uint32_t layers, uint32_t kv_heads) {
  return std::make_shared<BlockRecall>(
      layers, kv_heads, [](uint64_t bytes) { return std::make_shared<const uint64_t>(bytes); });
}

std::vector<Policy> PresetsFor(const IndexSet& indexes) {
  std::vector<Policy> policies = PresetPolicies();
  std::erase_if(policies, [&](const Policy& policy) {
    return policy.selector == Selector::kKeepSet || !policy.CheckIndexes(indexes).ok();
  });
  return policies;
}

namespace {

StepRow ExpectedRow(const TestRow& row) {
  StepRow step_row;
  step_row.view = row.sequence->view;
  step_row.policy = &row.policy;
  step_row.past_tokens = row.past_tokens;
  step_row.query_tokens = row.query_tokens;
  step_row.query_only = row.query_only;
  step_row.want_kv_head_errors = row.want_kv_head_errors;
  step_row.query_dtype = row.query_dtype;
  step_row.final_out.dtype = row.final_dtype;
  return step_row;
}

// Runs a step over the rows; request: all else of it. messages: which have their queries; empty:
// none do. final_out: the rows' final places; null: they are made.
StepResult RunRows(Backend* backend, StepRequest request, std::span<const TestRow> rows,
                   std::vector<absl::Status>* faults, bool with_plans,
                   std::span<const RowMessage> messages = {}, std::byte* final_out = nullptr) {
  StepResult result;
  result.layer = request.layer;
  result.rows.resize(rows.size());
  std::vector<std::vector<std::byte>> queries;
  std::vector<StepRow> step_rows;
  for (size_t r = 0; r < rows.size(); ++r) {
    const TestRow& row = rows[r];
    const ModelShape& shape = row.sequence->spec.shape;
    const size_t lanes = size_t{row.query_tokens} * shape.query_heads;
    RowResult& target = result.rows[r];
    // What the backend forgets to write stays visible.
    target.out.assign(lanes * shape.value_dim, std::nanf(""));
    target.lse.assign(lanes, std::nanf(""));
    target.stats.zone_tokens = 12345;
    StepRow step_row = ExpectedRow(row);
    step_row.queries = messages.empty()
                           ? queries.emplace_back(Stored(row.query_dtype, row.queries)).data()
                           : messages[r].queries.data();
    step_row.out = target.out.data();
    step_row.lse = target.lse.data();
    step_row.stats = &target.stats;
    if (row.final_dtype != DType::kFp32) {
      target.final_out.assign(target.out.size() * DTypeBytes(row.final_dtype), std::byte{0xcd});
      step_row.final_out.to = final_out != nullptr ? final_out : target.final_out.data();
      if (final_out != nullptr) final_out += target.final_out.size();
      step_row.final_out.written = &target.out_is_final;
    }
    if (faults != nullptr) step_row.fault = &faults->at(r);
    step_rows.push_back(step_row);
  }
  request.rows = step_rows;
  if (with_plans) request.plans = &result.plans;
  result.status = backend->Step(request);
  for (size_t r = 0; r < rows.size(); ++r) {
    if (!result.rows[r].out_is_final) continue;
    std::vector<std::byte>& out = result.rows[r].final_out;
    std::copy_n(step_rows[r].final_out.to, out.size(), out.begin());
  }
  return result;
}

StepRequest RequestOf(uint32_t layer) {
  StepRequest request;
  request.layer = layer;
  return request;
}

}  // namespace

StepResult RunStep(Backend* backend, uint32_t layer, std::span<const TestRow> rows,
                   std::vector<absl::Status>* faults) {
  return RunRows(backend, RequestOf(layer), rows, faults, /*with_plans=*/true);
}

std::unique_ptr<PreparedStep> PrepareStep(Backend* backend, uint32_t layer,
                                          std::span<const TestRow> rows, const ClientTurn* turn) {
  std::vector<StepRow> step_rows;
  for (const TestRow& row : rows) step_rows.push_back(ExpectedRow(row));
  StepRequest request = RequestOf(layer);
  request.rows = step_rows;
  return backend->Prepare(request, turn);
}

StepResult RunPrepared(Backend* backend, uint32_t layer, std::span<const TestRow> rows,
                       PreparedStep* prepared, const std::atomic<bool>* cancelled) {
  StepRequest request = RequestOf(layer);
  request.prepared = prepared;
  request.cancelled = cancelled;
  return RunRows(backend, request, rows, nullptr, /*with_plans=*/false);
}

RowMessage RowMessage::Of(const TestRow& row, uint32_t layer) {
  const ModelShape& shape = row.sequence->spec.shape;
  std::vector<float> keys, values;
  const auto add = [](const std::vector<float>& from, uint64_t token, uint64_t dim,
                      std::vector<float>* to) {
    const auto begin = from.begin() + static_cast<ptrdiff_t>(token * dim);
    to->insert(to->end(), begin, begin + static_cast<ptrdiff_t>(dim));
  };
  for (uint64_t i = 0; i < row.query_tokens && !row.query_only; ++i) {
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      const HeadData& data = row.sequence->head(layer, head);
      add(data.keys, row.past_tokens + i, shape.head_dim, &keys);
      add(data.values, row.past_tokens + i, shape.value_dim, &values);
    }
  }
  return {.queries = Stored(row.query_dtype, row.queries),
          .keys = Stored(shape.dtype, keys),
          .values = Stored(shape.dtype, values)};
}

StepResult BeginAndRun(Backend* backend, uint32_t layer, std::span<const TestRow> rows,
                       PreparedStep* prepared, std::span<const RowMessage> messages,
                       ClientMemory* client) {
  std::vector<RowTokens> tokens;
  for (const RowMessage& message : messages) tokens.push_back(message.tokens());
  client->Ring();
  if (prepared->takes_turn()) {
    EXPECT_TRUE(prepared->HasBegunWith(tokens));
    client->SpoilTensors();  // they are not looked at again
  }
  StepRequest request = RequestOf(layer);
  request.prepared = prepared;
  return RunRows(backend, request, rows, nullptr, /*with_plans=*/false, messages, client->out());
}

std::vector<oracle::Vector> Rows(std::span<const float> flat, size_t dim, size_t begin,
                                 size_t count) {
  std::vector<oracle::Vector> rows;
  for (size_t i = begin; i < begin + count; ++i) {
    const std::span<const float> row = flat.subspan(i * dim, dim);
    rows.emplace_back(row.begin(), row.end());
  }
  return rows;
}

}  // namespace attnd::attention::test
