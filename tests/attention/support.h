// SPDX-License-Identifier: Apache-2.0
//
// What the tests of attention/ share: seeded sequences with their segments, the same data as the
// oracles see it, and steps of a backend with their plans.
#ifndef ATTND_TESTS_ATTENTION_SUPPORT_H_
#define ATTND_TESTS_ATTENTION_SUPPORT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "attention/policy/policy.h"
#include "attention/segment/segment.h"
#include "common/model_shape.h"
#include "tests/normal_numbers.h"
#include "tests/oracle/policies.h"
#include "tests/oracle/ranking.h"
#include "tests/oracle/regression.h"
#include "tests/oracle/regression_policy.h"
#include "tests/test_seed.h"

namespace attnd::attention::test {

using attnd::test::TestSeed;

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  double Normal() { return normal_(generator_); }
  double Uniform() { return std::uniform_real_distribution<double>(0, 1)(generator_); }
  // 0 .. n - 1
  uint64_t Below(uint64_t n) {
    return std::uniform_int_distribution<uint64_t>(0, n - 1)(generator_);
  }
  std::vector<float> Normals(size_t count, double scale = 1);
  std::mt19937_64& generator() { return generator_; }

 private:
  std::mt19937_64 generator_;
  attnd::test::NormalNumbers normal_;
};

// Stored form of floats, and what is left of them after storing.
std::vector<std::byte> Stored(DType dtype, std::span<const float> values);
std::vector<float> Rounded(DType dtype, std::span<const float> values);

// Relative rounding of a dtype: half the distance from 1 to the next number.
double UnitRoundoff(DType dtype);

ModelShape MakeShape(uint32_t query_heads, uint32_t kv_heads, uint32_t head_dim, uint32_t value_dim,
                     DType dtype, uint32_t layers = 1);

// One KV head whose value is the front of its key.
ModelShape MakeLatentShape(uint32_t query_heads, uint32_t head_dim, uint32_t value_dim, DType dtype,
                           uint32_t layers = 1);

// A policy that must be one; its name and parameters, for traces.
Policy Parse(const std::string& preset, const std::map<std::string, std::string>& parameters = {});
std::string Describe(const Policy& policy);

struct SequenceSpec {
  ModelShape shape;
  std::vector<uint32_t> segment_tokens;  // the segments' lengths, from position 0
  uint64_t tail_tokens = 0;              // behind them
  uint32_t sink = 4;                     // unclustered tokens of the first segment
  uint64_t seed = 1;
  IndexSet indexes = kClusterIndexes;
  uint32_t sections_above = kSegmentTokensMax;      // longer ones may have sections
  std::shared_ptr<const FeatureMaps> feature_maps;  // of indexes with a summary
  double key_scale = 1, value_scale = 1;            // factors on keys and values of unit size

  uint64_t tokens() const;
};
std::ostream& operator<<(std::ostream& out, const SequenceSpec& spec);

// Keys and values of one (layer, KV head) as stored, position after position.
struct HeadData {
  std::vector<float> keys;    // [tokens][head_dim]
  std::vector<float> values;  // [tokens][value_dim]
};

// Keys that cluster: a mixture of gaussians whose centres differ in weight, some channels larger
// than others, a part of the channels turned by position as rotary embeddings do. Values follow
// their key's centre; those of a latent shape are the fronts of the keys.
HeadData MakeHeadData(const ModelShape& shape, uint64_t tokens, Random* random);

// Two far apart halves of [half] tokens, a single KV head's, with opposite values: under a query
// that does not look at the first channel the output cancels.
HeadData OppositeHalves(size_t half, size_t dim, Random* random);

// A view without segments whose tail holds `heads`, [layers * kv_heads].
std::shared_ptr<const SequenceView> MakeTailView(const ModelShape& shape, uint64_t tokens,
                                                 const std::vector<HeadData>& heads,
                                                 const IndexSet& indexes = kClusterIndexes);

inline constexpr int64_t kBuildQuantumUs = 1000000;
// Turns the first `tokens` of the view's tail into a segment; `quantum_us` at a time.
std::shared_ptr<const Segment> BuildSegment(const std::shared_ptr<const SequenceView>& view,
                                            uint32_t tokens, uint32_t unclustered, uint64_t id = 1,
                                            int64_t quantum_us = kBuildQuantumUs,
                                            bool sections = false);

struct TestSequence {
  SequenceSpec spec;
  std::vector<HeadData> heads;  // [layers * kv_heads]
  std::shared_ptr<const SequenceView> view;

  const HeadData& head(uint32_t layer, uint32_t kv_head) const {
    return heads[layer * spec.shape.kv_heads + kv_head];
  }
};
TestSequence MakeSequence(const SequenceSpec& spec);
// Its keys and values alone.
std::vector<HeadData> MakeHeads(const SequenceSpec& spec);
// The same with given keys and values, which must be representable in the dtype.
TestSequence MakeSequenceOf(const SequenceSpec& spec, std::vector<HeadData> heads);

// Remembers what blocks steps choose, with memory without end.
std::shared_ptr<BlockRecall> MakeRecall(uint32_t layers, uint32_t kv_heads);

// A row of a step with its own buffers.
struct TestRow {
  TestSequence* sequence = nullptr;
  Policy policy;
  uint64_t past_tokens = 0;
  uint32_t query_tokens = 1;
  bool query_only = false;
  bool want_kv_head_errors = true;
  DType query_dtype = DType::kFp32;
  DType final_dtype = DType::kFp32;  // of StepRow::final_out
  std::vector<float> queries;  // [query_tokens, query_heads, head_dim], as rounded to query_dtype
  uint64_t seen(uint32_t query_token) const {
    return query_only ? past_tokens : past_tokens + query_token + 1;
  }
};
// A row with random queries that look for some of the sequence's keys.
TestRow MakeRow(TestSequence* sequence, const Policy& policy, uint64_t past_tokens,
                uint32_t query_tokens, bool query_only, DType query_dtype, uint32_t layer,
                uint64_t seed);

struct RowResult {
  std::vector<float> out;  // [query_tokens, query_heads, value_dim]
  std::vector<float> lse;  // [query_tokens, query_heads]
  std::vector<std::byte> final_out;
  bool out_is_final = false;
  RowStats stats;
};
struct StepResult {
  uint32_t layer = 0;
  absl::Status status;
  std::vector<RowResult> rows;
  std::vector<Plan> plans;
};
// faults: [rows] receives why a row has no answer; null: that is then the step's status.
StepResult RunStep(Backend* backend, uint32_t layer, std::span<const TestRow> rows,
                   std::vector<absl::Status>* faults = nullptr);
// Backend::Prepare for such a step, without plans; and the step, with what that gave.
std::unique_ptr<PreparedStep> PrepareStep(Backend* backend, uint32_t layer,
                                          std::span<const TestRow> rows,
                                          const ClientTurn* turn = nullptr);
StepResult RunPrepared(Backend* backend, uint32_t layer, std::span<const TestRow> rows,
                       PreparedStep* prepared, const std::atomic<bool>* cancelled = nullptr);

// What a message brings for a row: its queries, and the sequence's own tokens.
struct RowMessage {
  std::vector<std::byte> queries, keys, values;

  static RowMessage Of(const TestRow& row, uint32_t layer);
  RowTokens tokens() const { return {queries.data(), keys.data(), values.data()}; }
};
class ClientMemory;
// RunPrepared, behind the client's ring, with the caller's copy of what the client has written
// there. Of rows with a final_dtype the answer is the client's place.
StepResult BeginAndRun(Backend* backend, uint32_t layer, std::span<const TestRow> rows,
                       PreparedStep* prepared, std::span<const RowMessage> messages,
                       ClientMemory* client);

// The presets that can read segments with these indexes, but for those that need a keep-set.
std::vector<Policy> PresetsFor(const IndexSet& indexes);

// Rows [begin, begin + count) of a flat matrix as vectors of doubles.
std::vector<oracle::Vector> Rows(std::span<const float> flat, size_t dim, size_t begin,
                                 size_t count);

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_SUPPORT_H_
