// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/support.h"

#include <algorithm>
#include <random>

#include "attention/cpu/cpu_backend.h"

namespace attnd::gpu::test {

using attention::Backend;
using attention::Policy;
using attention::test::TestRow;

CudaBackendOptions SmallOptions() {
  CudaBackendOptions options;
  options.device_memory_bytes = uint64_t{64} << 20;
  options.streams = 2;
  options.input_bytes = uint64_t{1} << 20;
  options.result_bytes = uint64_t{1} << 20;
  options.timed_steps = 1;
  options.build_threads = 1;
  return options;
}

FakeBackend MakeFakeBackend(const CudaBackendOptions& options, bool maps_host_memory) {
  FakePair fake = MakeFakeDevice(uint64_t{1} << 30, maps_host_memory);
  auto backend = MakeCudaBackend(options, std::move(fake.device), MakeCpu());
  EXPECT_TRUE(backend.ok()) << backend.status();
  return {std::move(fake.control), *std::move(backend)};
}

std::unique_ptr<Backend> MakeCpu() { return attention::MakeCpuBackend({.threads = 1}); }

std::vector<Policy> Policies(const attention::IndexSet& indexes) {
  if (indexes.Has(attention::IndexKind::kTree)) {
    return {
        Parse("dense"),
        Parse("streaming"),
        Parse("error-target"),
        Parse("error-target", {{"tolerance", "0.02"}, {"floor", "0"}}),
        Parse("error-target", {{"tolerance", "0.3"}, {"floor", "0.04"}}),
        Parse("error-target", {{"tolerance", "1"}, {"floor", "0"}}),
        Parse("error-target", {{"tolerance", "1e-9"}}),
        Parse("error-target", {{"tolerance", "0"}}),
        Parse("error-target", {{"tolerance", "off"}}),
        Parse("error-target", {{"tolerance", "off"}, {"floor", "0"}}),
        Parse("error-target", {{"tolerance", "off"}, {"floor", "0.4"}}),
        Parse("error-target", {{"tolerance", "off"}, {"floor", "1"}}),
        Parse("error-target", {{"dense_layers", "1"}}),
        Parse("error-target", {{"quantile", "0.95"}}),
        Parse("error-target", {{"quantile", "0.9"}, {"tolerance", "1"}, {"floor", "0"}}),
        Parse("error-target", {{"quantile", "0.5"}, {"tolerance", "3"}}),
        Parse("error-target", {{"quantile", "0.99"}, {"tolerance", "0.01"}}),
        Parse("error-target", {{"quantile", "0.9"}, {"tolerance", "off"}}),
        Parse("clusters-top-k"),
        Parse("clusters-top-k",
              {{"exact", "0.3"}, {"estimated", "1"}, {"estimator", "second-order"}}),
        Parse("clusters-top-k", {{"exact", "0.1"}, {"estimator", "second-order"}}),
        Parse("clusters-top-k", {{"exact", "0.0001"}, {"estimated", "0"}}),
        Parse("clusters-top-k", {{"exact", "1"}}),
        Parse("double-p"),
        Parse("double-p", {{"p1", "0.99"}, {"p2", "0.8"}, {"estimator", "second-order"}}),
        Parse("double-p", {{"p1", "1"}, {"p2", "0.5"}, {"estimator", "second-order"}}),
        Parse("double-p", {{"p1", "0.0001"}, {"p2", "0.0001"}}),
        Parse("double-p", {{"p1", "1"}, {"p2", "1"}}),
    };
  }
  return {
      Parse("dense"),
      Parse("streaming"),
      Parse("clusters-top-k"),
      Parse("clusters-top-k",
            {{"exact", "0.3"}, {"estimated", "1"}, {"estimator", "second-order"}}),
      Parse("clusters-top-k", {{"exact", "1"}}),
      Parse("double-p"),
      Parse("double-p", {{"p1", "0.99"}, {"p2", "0.8"}, {"estimator", "second-order"}}),
      Parse("double-p", {{"p1", "1"}, {"p2", "1"}}),
      Parse("error-target"),
      Parse("error-target", {{"tolerance", "0.05"}}),
      Parse("error-target", {{"tolerance", "0"}}),
      Parse("error-target", {{"tolerance", "off"}, {"floor", "0.02"}}),
      Parse("error-target", {{"dense_layers", "1"}}),
  };
}

bool ReadsAllClusters(const Policy& policy) {
  return policy.exact_share == 1 || policy.p2 == 1 || policy.floor == 1;
}

void PrintTo(const ParityCase& c, std::ostream* out) {
  *out << c.query_heads << "/" << c.kv_heads << " heads, " << c.head_dim << "/" << c.value_dim
       << ", " << c.segments.size() << " segments, " << c.indexes.ToString()
       << (c.sections ? " with sections" : "");
}

attention::test::SequenceSpec SpecOf(const ParityCase& c, DType dtype) {
  attention::test::SequenceSpec spec;
  spec.shape = attention::test::MakeShape(c.query_heads, c.kv_heads, c.head_dim, c.value_dim, dtype,
                                          /*layers=*/2);
  spec.segment_tokens = c.segments;
  spec.tail_tokens = c.tail;
  spec.indexes = c.indexes;
  if (c.sections) spec.sections_above = 0;
  spec.seed = attention::test::TestSeed() + c.head_dim + c.query_heads;
  return spec;
}

std::vector<DType> ListedDTypes() {
  std::vector<DType> dtypes;
  for (const KernelShape& shape : kKernelShapes) {
    if (std::find(dtypes.begin(), dtypes.end(), shape.dtype) == dtypes.end()) {
      dtypes.push_back(shape.dtype);
    }
  }
  return dtypes;
}

std::string ListedDimsWithout(std::span<const ParityCase> cases) {
  std::string without;
  for (const KernelShape& shape : kKernelShapes) {
    const bool has_case = std::any_of(cases.begin(), cases.end(), [&](const ParityCase& c) {
      return c.head_dim == shape.head_dim && c.value_dim == shape.value_dim;
    });
    if (!has_case) {
      without += std::to_string(shape.head_dim) + "/" + std::to_string(shape.value_dim) + " ";
    }
  }
  return without;
}

std::vector<TestRow> RowsOfPolicies(attention::test::TestSequence* sequence, uint32_t layer,
                                    uint32_t most, DType dtype) {
  using attention::test::MakeRow;
  const attention::test::SequenceSpec& spec = sequence->spec;
  const auto fitting = static_cast<uint32_t>(std::min<uint64_t>(most, spec.tail_tokens));
  std::vector<TestRow> rows;
  uint64_t seed = spec.seed;
  for (const Policy& policy : Policies(spec.indexes)) {
    const uint32_t tokens = 1 + static_cast<uint32_t>(++seed % fitting);
    rows.push_back(MakeRow(sequence, policy, spec.tokens() - tokens, tokens, false, DType::kFp32,
                           layer, seed));
    rows.push_back(MakeRow(sequence, policy, spec.tokens(), tokens, true, dtype, layer, ++seed));
  }
  return rows;
}

attention::test::TestSequence HostSequence(uint64_t seed, const attention::IndexSet& indexes) {
  attention::test::SequenceSpec spec;
  spec.shape = attention::test::MakeShape(4, 2, 64, 64, DType::kBf16, 2);
  spec.segment_tokens = {1500, 548};
  spec.tail_tokens = 70;
  spec.indexes = indexes;
  spec.seed = attention::test::TestSeed() + seed;
  return MakeSequence(spec);
}

CudaBackendOptions OfPages(uint64_t bytes) {
  CudaBackendOptions options = SmallOptions();
  options.page_memory_bytes = bytes;
  return options;
}

attention::test::TestSequence MakeHistory(uint64_t seed, const attention::IndexSet& indexes,
                                          uint64_t tail) {
  attention::test::SequenceSpec spec =
      SpecOf({4, 2, 64, 64, {700, 600}, tail, indexes}, DType::kBf16);
  spec.seed = attention::test::TestSeed() + seed;
  return MakeSequence(spec);
}

std::vector<TestRow> RowsOfLayer(attention::test::TestSequence* sequence, uint32_t layer) {
  return RowsOfPolicies(sequence, layer, 3, DType::kFp32);
}

std::vector<TestRow> RowsOver(attention::test::TestSequence* sequence, std::vector<TestRow> rows) {
  for (TestRow& row : rows) row.sequence = sequence;
  return rows;
}

bool ReadsAllTokens(const TestRow& row, uint32_t layer) {
  return row.policy.DenseIn(layer) ||
         (row.policy.cut == attention::Cut::kErrorBudget && row.policy.tolerance == 0);
}

attention::test::TestSequence MakeTreeBesideZeros() {
  attention::test::SequenceSpec spec =
      SpecOf({4, 2, 64, 64, {2300}, 40, attention::kTreeIndexes}, DType::kBf16);
  spec.sink = 0;
  attention::test::TestSequence sequence = MakeSequence(spec);
  std::vector<attention::test::HeadData> heads = sequence.heads;
  const size_t dim = spec.shape.head_dim, value_dim = spec.shape.value_dim;
  for (attention::test::HeadData& head : heads) {
    for (size_t t = 0; t < spec.tokens(); ++t) {
      // The first channel says whether a token is of the tail.
      head.keys[t * dim] = t < spec.segment_tokens[0] ? 0 : 16;
      if (t < spec.segment_tokens[0]) continue;
      std::fill_n(head.values.begin() + static_cast<ptrdiff_t>(t * value_dim), value_dim, 0.0f);
    }
  }
  return MakeSequenceOf(spec, std::move(heads));
}

std::vector<TestRow> RowsThatLookAtZeros(attention::test::TestSequence* sequence) {
  const attention::test::SequenceSpec& spec = sequence->spec;
  std::vector<TestRow> rows;
  for (const float logit : {4.0f, 12.0f, 16.0f, 20.0f, 24.0f}) {
    for (const char* tolerance : {"0.3", "0.02", "off"}) {
      TestRow row = MakeRow(sequence, Parse("error-target", {{"tolerance", tolerance}}),
                            spec.tokens(), 2, true, DType::kFp32, /*layer=*/0, spec.seed);
      for (size_t i = 0; i < row.queries.size(); i += spec.shape.head_dim) {
        row.queries[i] = logit / (16 * spec.shape.softmax_scale);
      }
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

attention::test::TestSequence MakeTreeOfKeys(const ParityCase& c, DType dtype) {
  const attention::test::SequenceSpec spec = SpecOf(c, dtype);
  std::vector<attention::test::HeadData> heads = MakeSequence(spec).heads;
  for (attention::test::HeadData& head : heads) {
    for (size_t t = 0; t < spec.tokens(); ++t) {
      std::copy_n(head.keys.begin() + static_cast<ptrdiff_t>(t * c.head_dim), c.value_dim,
                  head.values.begin() + static_cast<ptrdiff_t>(t * c.value_dim));
    }
  }
  return MakeSequenceOf(spec, std::move(heads));
}

std::vector<TestRow> RowsOfQuantiles(attention::test::TestSequence* sequence, uint32_t layer) {
  const attention::test::SequenceSpec& spec = sequence->spec;
  std::vector<TestRow> rows;
  uint64_t seed = spec.seed;
  for (const float length : {0.1f, 0.5f, 1.5f, 4.0f}) {
    for (const char* const tolerance : {"0.00001", "0.002", "0.02", "0.06", "0.11", "0.5"}) {
      for (const char* const quantile : {"0.3", "0.8", "0.95"}) {
        const Policy policy =
            Parse("error-target", {{"tolerance", tolerance}, {"quantile", quantile}});
        TestRow row =
            MakeRow(sequence, policy, spec.tokens(), 1, true, DType::kFp32, layer, ++seed);
        for (float& x : row.queries) x *= length;
        rows.push_back(std::move(row));
      }
    }
  }
  return rows;
}

attention::test::TestSequence MakeTreeOfCommonErrors() {
  const attention::test::SequenceSpec spec =
      SpecOf({2, 1, 64, 64, {1500}, 20, attention::kTreeIndexes}, DType::kBf16);
  std::vector<attention::test::HeadData> heads = MakeSequence(spec).heads;
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal(0, 0.5f);
  for (attention::test::HeadData& head : heads) {
    for (float& x : head.keys) x = normal(random);
    head.values = head.keys;
  }
  return MakeSequenceOf(spec, std::move(heads));
}

namespace {

std::vector<TestRow> RowsOfCommonErrors(attention::test::TestSequence* sequence,
                                        const char* tolerance) {
  TestRow row =
      MakeRow(sequence, Parse("error-target", {{"tolerance", tolerance}, {"quantile", "0.8"}}),
              sequence->spec.tokens(), 1, true, DType::kFp32, 0, /*seed=*/3);
  for (float& x : row.queries) x *= 0.5f;
  return {row};
}

}  // namespace

std::vector<TestRow> RowsThatReadAll(attention::test::TestSequence* sequence) {
  return RowsOfCommonErrors(sequence, "0.041");
}
std::vector<TestRow> RowsThatReadFew(attention::test::TestSequence* sequence) {
  return RowsOfCommonErrors(sequence, "0.05");
}

QuantileEnds EndsOf(const std::vector<attention::Plan>& plans) {
  QuantileEnds ends;
  for (const attention::Plan& plan : plans) ++(plan.closed.empty() ? ends.opened : ends.closed);
  return ends;
}

}  // namespace attnd::gpu::test
