// SPDX-License-Identifier: Apache-2.0
//
// What the tests of gpu/ share: a CUDA backend over a fake device, and rows for it.
#ifndef ATTND_TESTS_GPU_SUPPORT_H_
#define ATTND_TESTS_GPU_SUPPORT_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "attention/backend.h"
#include "attention/policy/policy.h"
#include "gpu/cuda_backend.h"
#include "tests/attention/support.h"
#include "tests/gpu/fake_device.h"

namespace attnd::gpu::test {

// Two streams with 64 MiB of device memory in all; everything is timed.
CudaBackendOptions SmallOptions();

// The control first: it outlives the backend that holds the device.
struct FakeBackend {
  std::shared_ptr<FakeControl> control;
  std::unique_ptr<attention::Backend> backend;
};
FakeBackend MakeFakeBackend(const CudaBackendOptions& options = SmallOptions(),
                            bool maps_host_memory = false);

std::unique_ptr<attention::Backend> MakeCpu();

using attention::test::Describe;
using attention::test::Parse;
// Every preset that the backend has over these indexes (clusters, or a tree), with variants of its
// parts.
std::vector<attention::Policy> Policies(const attention::IndexSet& indexes);

// Whether it looks at clusters and reads all of them: such rows have one plan.
bool ReadsAllClusters(const attention::Policy& policy);

// A sequence of two layers for the parity tests.
struct ParityCase {
  uint32_t query_heads, kv_heads, head_dim, value_dim;
  std::vector<uint32_t> segments;
  uint64_t tail;
  attention::IndexSet indexes = attention::kClusterIndexes;
  // As the CPU builds long segments' trees. A GPU looks at the groups below, and the CPU opens all
  // of so few sections: both choose from the same.
  bool sections = false;
};
void PrintTo(const ParityCase& c, std::ostream* out);
attention::test::SequenceSpec SpecOf(const ParityCase& c, DType dtype);
// The dtypes of kKernelShapes, each once: those of a matrix of cases.
std::vector<DType> ListedDTypes();
// The head dims of kKernelShapes that no case has, as text. A matrix of cases has to have them all.
std::string ListedDimsWithout(std::span<const ParityCase> cases);
// For every policy a causal row with fp32 queries and a query-only row with queries of `dtype`, of
// 1 to `most` query tokens.
std::vector<attention::test::TestRow> RowsOfPolicies(attention::test::TestSequence* sequence,
                                                     uint32_t layer, uint32_t most, DType dtype);

// The elements of both in turn, then what is left of the longer one.
template <typename T>
std::vector<T> Alternating(const std::vector<T>& a, const std::vector<T>& b) {
  std::vector<T> both;
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    if (i < a.size()) both.push_back(a[i]);
    if (i < b.size()) both.push_back(b[i]);
  }
  return both;
}

// Two layers, two segments of 1,300 tokens and a tail: of three blocks, and 1.4 MiB of device
// copies, unless `tail` says otherwise. seed: beside the tests' own.
attention::test::TestSequence MakeHistory(
    uint64_t seed, const attention::IndexSet& indexes = attention::kTreeIndexes,
    uint64_t tail = 120);

// 2,048 tokens in two segments and a tail, two layers of two KV heads: 2 MiB of pages. A backend
// with kFewPages of page memory reads them where they lie: an eighth of it holds the tail.
attention::test::TestSequence HostSequence(uint64_t seed, const attention::IndexSet& indexes);
inline constexpr uint64_t kFewPages = uint64_t{1100} << 10;
inline constexpr uint64_t kSomePages = uint64_t{2} << 20;
inline constexpr uint64_t kManyPages = uint64_t{16} << 20;  // a cache holds every page of it
// SmallOptions with so much page memory.
CudaBackendOptions OfPages(uint64_t bytes);
// Rows of every policy, of up to 3 query tokens.
std::vector<attention::test::TestRow> RowsOfLayer(attention::test::TestSequence* sequence,
                                                  uint32_t layer);
// The same rows over another sequence of the same tokens.
std::vector<attention::test::TestRow> RowsOver(attention::test::TestSequence* sequence,
                                               std::vector<attention::test::TestRow> rows);
// Whether the row chooses nothing: it is dense, or has no tolerance for an error.
bool ReadsAllTokens(const attention::test::TestRow& row, uint32_t layer);

// Waits for what another thread brings about; fails the test if it never does.
template <typename Condition>
void Await(const Condition& condition) {
  for (int waited = 0; !condition(); ++waited) {
    ASSERT_LT(waited, 60000) << "it did not happen";
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// A tree beside a tail of nothing but zeros, and rows whose queries look at that tail more and
// more: of the last ones' outputs next to nothing is left, so that errors are relative to the least
// norm.
attention::test::TestSequence MakeTreeBesideZeros();
std::vector<attention::test::TestRow> RowsThatLookAtZeros(attention::test::TestSequence* sequence);

// A tree whose values follow keys, so that clusters err together; and rows of quantiles whose
// queries are longer and longer: of some all groups are opened, as the first choices are not within
// the tolerance.
attention::test::TestSequence MakeTreeOfKeys(const ParityCase& c, DType dtype);
// 1,500 tokens of keys that are values, in no clusters: most of an estimate's error is what
// clusters have in common. At the first tolerance no choice of a quantile is enough, and all is
// read: that part does not shrink while less and less of clusters' own errors is allowed. At the
// other one, which is a fifth greater, few are read. (Of these keys and this query, which are
// always the same.)
attention::test::TestSequence MakeTreeOfCommonErrors();
std::vector<attention::test::TestRow> RowsThatReadAll(attention::test::TestSequence* sequence);
std::vector<attention::test::TestRow> RowsThatReadFew(attention::test::TestSequence* sequence);
std::vector<attention::test::TestRow> RowsOfQuantiles(attention::test::TestSequence* sequence,
                                                      uint32_t layer);
// How many plans of a step leave groups closed, and how many do not.
struct QuantileEnds {
  int closed = 0, opened = 0;
};
QuantileEnds EndsOf(const std::vector<attention::Plan>& plans);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_SUPPORT_H_
