// SPDX-License-Identifier: Apache-2.0
//
// Single kernels on data in cache: what a change to one of them costs or gains.
//
//   kernels_benchmark --benchmark_filter=Attend
#include <benchmark/benchmark.h>

#include <vector>

#include "attention/kernels/kernels.h"
#include "attention/segment/pages.h"

namespace attnd::attention::kernels {
namespace {

constexpr size_t kRows = 64;

ModelShape Shape(int64_t head_dim, DType dtype) {
  ModelShape shape;
  shape.layers = shape.query_heads = shape.kv_heads = 1;
  shape.head_dim = shape.value_dim = static_cast<uint32_t>(head_dim);
  shape.dtype = dtype;
  shape.softmax_scale = 1;
  return shape;
}

// Queries of one quad, all 0.5: a bf16 number.
class TestQueries {
 public:
  TestQueries(DType dtype, size_t dim)
      : q_(kQuad * dim, 0.5f),
        memory_(QueriesFloats(dim)),
        queries_(PrepareQueries(dtype, q_.data(), 0.1f, dim, memory_.data())) {}
  const Queries& get() const { return queries_; }

 private:
  std::vector<float> q_, memory_;
  Queries queries_;
};

void CountRows(benchmark::State& state, size_t rows) {
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(rows));
}

void BM_DotRows(benchmark::State& state) {
  const auto dim = static_cast<size_t>(state.range(0));
  const std::vector<std::byte> rows(kRows * dim * 2);
  const TestQueries q(DType::kBf16, dim);
  std::vector<float> out(kRows * kQuad);
  for (auto _ : state) {
    DotRows(DType::kBf16, rows.data(), dim * 2, kRows, dim, q.get(), out.data());
    benchmark::DoNotOptimize(out.data());
  }
  CountRows(state, kRows);
}
BENCHMARK(BM_DotRows)->Arg(64)->Arg(128);

void BM_DotDeviations(benchmark::State& state) {
  const auto dim = static_cast<size_t>(state.range(0));
  const std::vector<uint8_t> codes(kRows * dim / 2, 0x5A);
  const std::vector<float> q(kQuad * dim, 0.5f), unit(kRows, 1.0f);
  std::vector<float> out(kRows * kQuad), memory(SquaresFloats(dim));
  const SquaredQueries squares = PrepareSquares(q.data(), 1, dim, memory.data());
  for (auto _ : state) {
    DotDeviations(codes.data(), unit.data(), kRows, dim, squares, out.data());
    benchmark::DoNotOptimize(out.data());
  }
  CountRows(state, kRows);
}
BENCHMARK(BM_DotDeviations)->Arg(64)->Arg(128);

void BM_AddWeightedRows(benchmark::State& state) {
  const auto dim = static_cast<size_t>(state.range(0));
  const std::vector<std::byte> rows(kRows * dim * 2);
  const std::vector<float> weight(kRows * kQuad, 0.5f);
  std::vector<float> sum(kQuad * dim);
  for (auto _ : state) {
    AddWeightedRows(DType::kBf16, rows.data(), dim * 2, kRows, dim, weight.data(), sum.data());
    benchmark::DoNotOptimize(sum.data());
  }
  CountRows(state, kRows);
}
BENCHMARK(BM_AddWeightedRows)->Arg(64)->Arg(128);

// Tokens that fit the first, the second and the third cache level, and memory.
void BM_AttendRuns(benchmark::State& state) {
  const ModelShape shape = Shape(state.range(0), static_cast<DType>(state.range(1)));
  const auto tokens = static_cast<uint32_t>(state.range(2));
  const PageGeometry geometry(shape);
  const std::vector<std::byte> pages(tokens / kPageTokens * geometry.page_bytes());
  const TestQueries q(shape.dtype, shape.head_dim);
  std::vector<float> values(kQuad * shape.value_dim);
  const TokenRun run{pages.data(), {0, tokens}};
  QuadState quad{{0, 0, 0, 0}, {0, 0, 0, 0}, values.data()};
  for (auto _ : state) {
    AttendRuns(geometry, {&run, 1}, &q.get(), 1, &quad);
    benchmark::DoNotOptimize(values.data());
  }
  CountRows(state, tokens);
}
BENCHMARK(BM_AttendRuns)
    ->ArgsProduct({{64, 128, 256},
                   {static_cast<int>(DType::kBf16), static_cast<int>(DType::kFp16),
                    static_cast<int>(DType::kFp32)},
                   {64, 1024, 16384, 262144}});

void BM_AssignClosest(benchmark::State& state) {
  const auto dim = static_cast<size_t>(state.range(0));
  constexpr size_t kClusters = 512;
  const std::vector<float> points(kRows * dim, 0.5f), centroids(dim * kClusters, 0.25f);
  const std::vector<float> half_norms(kClusters, 1.0f);
  std::vector<uint32_t> assignment(kRows);
  for (auto _ : state) {
    AssignClosest(points.data(), kRows, dim, centroids.data(), half_norms.data(), kClusters,
                  kClusters, assignment.data());
    benchmark::DoNotOptimize(assignment.data());
  }
  CountRows(state, kRows);
}
BENCHMARK(BM_AssignClosest)->Arg(64)->Arg(128);

}  // namespace
}  // namespace attnd::attention::kernels

BENCHMARK_MAIN();
