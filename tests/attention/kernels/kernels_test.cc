// SPDX-License-Identifier: Apache-2.0
//
// Goal: every kernel computes its definition, for every dtype, dimension, count and alignment, on
// every instruction set that this machine has, up to float32 rounding; and keeps to the memory it
// was given. Method: plain loops in double precision over the same stored bytes. Tolerances are
// float32 roundings of the terms' absolute sum, so they hold for every dtype: inputs are exact once
// they are stored. Each test runs once per Highway target. Outputs lie between guard values, inputs
// end where their memory ends (the address sanitizer sees overruns).
#include "attention/kernels/kernels.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "attention/segment/pages.h"
#include "tests/attention/kernels/targets.h"
#include "tests/attention/support.h"

namespace attnd::attention::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kGuard = 12345.0f;
// Of a sum of products, relative to its terms' absolute sum.
constexpr double kRounding = 4 * 0x1p-24;
constexpr DType kDTypes[] = {DType::kBf16, DType::kFp16, DType::kFp32};

class KernelsTest : public EveryTarget {
 protected:
  // Rows of dtype, some bytes apart, starting at an odd element.
  struct Matrix {
    Matrix(DType type, size_t n, size_t columns, Random* random)
        : dtype(type), dim(columns), row_bytes((columns + 2) * DTypeBytes(type)) {
      values = Rounded(type, random->Normals(n * columns));
      const size_t offset = DTypeBytes(type);
      bytes.resize(offset + (n == 0 ? 0 : (n - 1) * row_bytes + dim * offset));
      for (size_t i = 0; i < n; ++i) {
        FromFloat(type, values.data() + i * dim, dim, bytes.data() + offset + i * row_bytes);
      }
    }
    const std::byte* rows() const { return bytes.data() + DTypeBytes(dtype); }

    DType dtype;
    size_t dim, row_bytes;
    std::vector<float> values;
    std::vector<std::byte> bytes;
  };

  static constexpr size_t kCounts[] = {0, 1, 2, 3, 7, 16, 33};
  Random random_{TestSeed()};
};

// Queries made ready, with the memory they lie in.
class PreparedQueries {
 public:
  PreparedQueries(DType dtype, const float* q, float scale, size_t dim)
      : memory_(kernels::QueriesFloats(dim)),
        queries_(kernels::PrepareQueries(dtype, q, scale, dim, memory_.data())) {}
  const kernels::Queries& get() const { return queries_; }

 private:
  std::vector<float> memory_;
  kernels::Queries queries_;
};

// Normal numbers, and the same rounded to bf16: some processors have a shorter way for those.
std::vector<std::vector<float>> BothKindsOfQueries(size_t count, double size, Random* random) {
  std::vector<float> q = random->Normals(count, size);
  return {q, Rounded(DType::kBf16, q)};
}

std::vector<float> Guarded(size_t size, float fill = 0) {
  std::vector<float> values(size + 1, fill);
  values.back() = kGuard;
  return values;
}

// Rows in bytes that lie as in an index, and a base.
struct ByteMatrix {
  ByteMatrix(size_t n, size_t columns, Random* random)
      : scales(random->Normals(n)), base(random->Normals(columns)), codes(n * columns) {
    for (int8_t& code : codes)
      code = static_cast<int8_t>(static_cast<int>(random->Below(255)) - 127);
  }
  ByteRows rows() const { return {codes.data(), scales.data(), base.data()}; }

  std::vector<float> scales, base;
  std::vector<int8_t> codes;
};

TEST_P(KernelsTest, DotByteRows) {
  for (size_t dim = 16; dim <= kernels::kDimMax; dim += 16) {
    for (const size_t n : kCounts) {
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", n " << n << ", dim " << dim);
      const ByteMatrix matrix(n, dim, &random_);
      const std::vector<float> q = random_.Normals(kQuad * dim), base_dot = random_.Normals(kQuad);
      constexpr float kScale = 0.3f, kUnit = 8;
      std::vector<float> out = Guarded(n * kQuad, kGuard);
      const PreparedQueries prepared(DType::kFp32, q.data(), kScale / kUnit, dim);
      kernels::Queries queries = prepared.get();
      queries.scale = kUnit;
      kernels::DotByteRows(matrix.rows(), dim, n, dim, queries, base_dot.data(), out.data());
      for (size_t i = 0; i < n * kQuad; ++i) {
        double sum = base_dot[i % kQuad], size = std::fabs(sum);
        for (size_t c = 0; c < dim; ++c) {
          const double term = double{kScale} * q[i % kQuad * dim + c] * matrix.scales[i / kQuad] *
                              matrix.codes[i / kQuad * dim + c];
          sum += term;
          size += std::fabs(term);
        }
        ASSERT_NEAR(out[i], sum, kRounding * size);
      }
      ASSERT_EQ(out.back(), kGuard);
    }
  }
}

TEST_P(KernelsTest, AddWeightedByteRows) {
  for (size_t dim = 16; dim <= kernels::kDimMax; dim += 16) {
    for (const size_t n : kCounts) {
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", n " << n << ", dim " << dim);
      const ByteMatrix matrix(n, dim, &random_);
      const std::vector<float> weight = random_.Normals(n * kQuad);
      std::vector<float> sum = Guarded(kQuad * dim, 1);
      kernels::AddWeightedByteRows(matrix.rows(), dim, n, dim, weight.data(), sum.data());
      for (size_t j = 0; j < kQuad; ++j) {
        for (size_t c = 0; c < dim; ++c) {
          double expected = 1, size = 1;
          for (size_t i = 0; i < n; ++i) {
            const double term =
                double{weight[i * kQuad + j]} * matrix.scales[i] * matrix.codes[i * dim + c];
            expected += term;
            size += std::fabs(term);
          }
          ASSERT_NEAR(sum[j * dim + c], expected, 2 * kRounding * size);
        }
      }
      ASSERT_EQ(sum.back(), kGuard);
    }
  }
}

TEST_P(KernelsTest, DotRows) {
  for (const DType dtype : kDTypes) {
    for (size_t dim = 16; dim <= kernels::kDimMax; dim += 16) {
      for (const size_t n : kCounts) {
        SCOPED_TRACE(testing::Message()
                     << "seed " << TestSeed() << ", " << std::string(DTypeName(dtype)) << ", n "
                     << n << ", dim " << dim);
        const Matrix matrix(dtype, n, dim, &random_);
        for (const auto& q : BothKindsOfQueries(kQuad * dim, 1, &random_)) {
          constexpr float kScale = 0.3f;
          std::vector<float> out = Guarded(n * kQuad, kGuard);
          kernels::DotRows(dtype, matrix.rows(), matrix.row_bytes, n, dim,
                           PreparedQueries(dtype, q.data(), kScale, dim).get(), out.data());
          for (size_t i = 0; i < n * kQuad; ++i) {
            double sum = 0, size = 0;
            for (size_t c = 0; c < dim; ++c) {
              const double term =
                  double{kScale} * q[i % kQuad * dim + c] * matrix.values[i / kQuad * dim + c];
              sum += term;
              size += std::fabs(term);
            }
            ASSERT_NEAR(out[i], sum, kRounding * size);
          }
          ASSERT_EQ(out.back(), kGuard);
        }
      }
    }
  }
}

// Scaled logits within bounds say nothing of those before an extreme scale: bf16 queries take the
// longer way then.
TEST_P(KernelsTest, DotRowsOfAnExtremeScale) {
  constexpr size_t kDim = 32;
  for (const float scale : {1e-25f, 1e25f}) {
    const float size = 1 / scale;  // so that scaled queries are about 1
    const std::vector<float> q =
        Rounded(DType::kBf16, std::vector<float>(kQuad * kDim, -1e11f * size));
    const std::vector<float> key(kDim, 1024.0f);
    const std::vector<std::byte> row = Stored(DType::kBf16, key);
    std::vector<float> out(kQuad);
    kernels::DotRows(DType::kBf16, row.data(), kDim * 2, 1, kDim,
                     PreparedQueries(DType::kBf16, q.data(), scale, kDim).get(), out.data());
    for (const float logit : out) EXPECT_NEAR(logit / (-1e11f * 1024 * kDim), 1, 0.01) << scale;
  }
}

TEST_P(KernelsTest, AddWeightedRows) {
  for (const DType dtype : kDTypes) {
    for (size_t dim = 16; dim <= kernels::kDimMax; dim += 16) {
      for (const size_t n : kCounts) {
        SCOPED_TRACE(testing::Message()
                     << "seed " << TestSeed() << ", " << std::string(DTypeName(dtype)) << ", n "
                     << n << ", dim " << dim);
        const Matrix matrix(dtype, n, dim, &random_);
        const std::vector<float> weight = random_.Normals(n * kQuad);
        std::vector<float> sum = Guarded(kQuad * dim, 0.5f);
        kernels::AddWeightedRows(dtype, matrix.rows(), matrix.row_bytes, n, dim, weight.data(),
                                 sum.data());
        for (size_t j = 0; j < kQuad * dim; ++j) {
          double expected = 0.5, size = 0.5;
          for (size_t i = 0; i < n; ++i) {
            const double term =
                double{weight[i * kQuad + j / dim]} * matrix.values[i * dim + j % dim];
            expected += term;
            size += std::fabs(term);
          }
          ASSERT_NEAR(sum[j], expected, 2 * kRounding * size);
        }
        ASSERT_EQ(sum.back(), kGuard);
      }
    }
  }
}

// Every 16-bit pattern that is a finite number arrives as that number, subnormals among them.
TEST_P(KernelsTest, StoredTypesAreReadExactly) {
  constexpr size_t kDim = 16;
  const float weight[kQuad] = {1, 0, 2, -1};
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    for (uint32_t first = 0; first < 65536; first += kDim) {
      uint16_t bits[kDim];
      std::iota(bits, bits + kDim, static_cast<uint16_t>(first));
      const auto* row = reinterpret_cast<const std::byte*>(bits);
      if (!AllFinite(dtype, row, kDim)) continue;
      float expected[kDim];
      ToFloat(dtype, row, kDim, expected);
      std::vector<float> sum(kQuad * kDim, 0.0f);
      kernels::AddWeightedRows(dtype, row, kDim * 2, 1, kDim, weight, sum.data());
      for (size_t c = 0; c < kDim; ++c) {
        ASSERT_EQ(sum[c], expected[c]) << std::string(DTypeName(dtype)) << " bits " << bits[c];
        ASSERT_EQ(sum[3 * kDim + c], -expected[c]);
      }
    }
  }
}

TEST_P(KernelsTest, DotDeviations) {
  for (size_t dim = 16; dim <= kernels::kDimMax; dim += 16) {
    for (const size_t n : kCounts) {
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", n " << n << ", dim " << dim);
      std::vector<uint8_t> codes(n * dim / 2);
      for (uint8_t& code : codes) code = static_cast<uint8_t>(random_.Below(256));
      std::vector<float> unit = random_.Normals(n);
      std::vector<float> q = random_.Normals(kQuad * dim);
      for (float& u : unit) u *= u;
      std::vector<float> memory = Guarded(kernels::SquaresFloats(dim));
      const kernels::SquaredQueries squares =
          kernels::PrepareSquares(q.data(), 1, dim, memory.data());
      for (float& x : q) x *= x;
      std::vector<float> out = Guarded(n * kQuad, kGuard);
      kernels::DotDeviations(codes.data(), unit.data(), n, dim, squares, out.data());
      for (size_t i = 0; i < n * kQuad; ++i) {
        double sum = 0, code2 = 0, greatest = 0;
        for (size_t c = 0; c < dim; ++c) {
          const uint8_t byte = codes[i / kQuad * dim / 2 + c % (dim / 2)];
          const int code = c < dim / 2 ? byte % 16 : byte / 16;
          sum += double{q[i % kQuad * dim + c]} * code * code;
          code2 += double{1} * code * code;
          greatest = std::max(greatest, double{q[i % kQuad * dim + c]});
        }
        sum *= unit[i / kQuad];
        // As kernels.h says: 2^-16 of the greatest, if the processor's integers are used.
        const double rounded =
            squares.int16.values != nullptr ? 0x1p-16 * greatest * code2 * unit[i / kQuad] : 0;
        ASSERT_NEAR(out[i], sum, rounded + 2 * kRounding * sum);
      }
      ASSERT_EQ(out.back(), kGuard);
      ASSERT_EQ(memory.back(), kGuard);
    }
  }
}

// Squares beyond float32 must not make a NaN of a cluster without any deviation.
TEST_P(KernelsTest, DotDeviationsOfHugeQueriesAreFinite) {
  constexpr size_t kDim = 576;
  const std::vector<float> q(kQuad * kDim, 1e25f);
  std::vector<float> memory(kernels::SquaresFloats(kDim));
  const kernels::SquaredQueries squares = kernels::PrepareSquares(q.data(), 1, kDim, memory.data());
  const std::vector<uint8_t> codes(kDim / 2 * 2, 0xFF);
  const float unit[] = {0, 1e-3f};
  std::vector<float> out(2 * kQuad);
  kernels::DotDeviations(codes.data(), unit, 2, kDim, squares, out.data());
  for (size_t j = 0; j < kQuad; ++j) {
    EXPECT_EQ(out[j], 0);
    EXPECT_GT(out[kQuad + j], 1e30f);
    EXPECT_TRUE(std::isfinite(out[kQuad + j]));
  }
}

TEST_P(KernelsTest, MaxQuads) {
  for (size_t n = 0; n < 70; ++n) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", n " << n);
    std::vector<float> x = random_.Normals(n * kQuad, 30);
    for (size_t i = 0; i < x.size(); ++i) {
      if (i % 5 == 0) x[i] = -kInfinity;
    }
    float max[kQuad] = {-kInfinity, 0, 50, -40};
    float expected[kQuad];
    std::copy(max, max + kQuad, expected);
    for (size_t i = 0; i < x.size(); ++i) {
      expected[i % kQuad] = std::max(expected[i % kQuad], x[i]);
    }
    kernels::MaxQuads(x.data(), n, max);
    for (size_t j = 0; j < kQuad; ++j) ASSERT_EQ(max[j], expected[j]);
  }
}

TEST_P(KernelsTest, ExpQuads) {
  for (size_t n = 0; n < 70; ++n) {
    for (const bool in_place : {false, true}) {
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", n " << n);
      std::vector<float> x = random_.Normals(n * kQuad, 30);
      for (size_t i = 0; i < x.size(); ++i) {
        if (i % 11 == 0) x[i] = -kInfinity;
        if (i % 13 == 0) x[i] = -2000;
      }
      const float max[kQuad] = {120, 100, 150, 130};
      float sum[kQuad] = {0, 1, 2, 3};
      double expected_sum[kQuad] = {0, 1, 2, 3};
      const std::vector<float> input = x;
      std::vector<float> separate = Guarded(n * kQuad, kGuard);
      float* out = in_place ? x.data() : separate.data();
      kernels::ExpQuads(x.data(), n, max, out, sum);
      for (size_t i = 0; i < n * kQuad; ++i) {
        const double expected = std::exp(double{input[i] - max[i % kQuad]});
        // Below the least normal float a weight is nothing beside the maximum's 1.
        ASSERT_NEAR(out[i], expected, 1e-6 * expected + std::numeric_limits<float>::min());
        ASSERT_GE(out[i], 0.0f);
        expected_sum[i % kQuad] += expected;
      }
      for (size_t j = 0; j < kQuad; ++j) {
        ASSERT_NEAR(sum[j], expected_sum[j], 2e-6 * expected_sum[j] + 1e-36);
      }
      ASSERT_EQ(separate.back(), kGuard);
    }
  }
}

// One stored run of pages, its last one part filled, and the state that attending to a range must
// give.
struct Attended {
  Attended(const ModelShape& shape, uint32_t tokens, double logit_size, Random* random)
      : geometry(shape),
        keys(Rounded(shape.dtype, random->Normals(tokens * shape.head_dim))),
        values(Rounded(shape.dtype, random->Normals(tokens * shape.value_dim))),
        q(BothKindsOfQueries(kQuad * shape.head_dim, logit_size, random)[random->Below(2)]),
        pages(PageGeometry::PagesFor(tokens) * geometry.page_bytes()) {
    for (uint32_t t = 0; t < tokens; ++t) {
      FromFloat(shape.dtype, keys.data() + t * shape.head_dim, shape.head_dim,
                pages.data() + geometry.KeyOffset(t));
      FromFloat(shape.dtype, values.data() + t * shape.value_dim, shape.value_dim,
                pages.data() + geometry.ValueOffset(t));
    }
  }

  // Folds tokens [range) into the state.
  void Attend(TokenRange range, QuadState* state) const {
    const TokenRun run{pages.data(), range};
    kernels::AttendRuns(geometry, {&run, 1},
                        &PreparedQueries(geometry.dtype, q.data(), 1, geometry.head_dim).get(), 1,
                        state);
  }

  // Adds tokens [range) to the oracle's states.
  void AddTo(TokenRange range, std::vector<oracle::SoftmaxState>* states) const {
    for (size_t j = 0; j < kQuad; ++j) {
      for (uint32_t t = range.begin; t < range.end; ++t) {
        double logit = 0;
        for (size_t c = 0; c < geometry.head_dim; ++c) {
          logit += double{q[j * geometry.head_dim + c]} * keys[t * geometry.head_dim + c];
        }
        (*states)[j].Add(logit, Rows(values, geometry.value_dim, t, 1)[0]);
      }
    }
  }

  PageGeometry geometry;
  std::vector<float> keys, values, q;
  std::vector<std::byte> pages;
};

void ExpectState(const QuadState& state, const std::vector<oracle::SoftmaxState>& expected,
                 size_t value_dim, double tolerance) {
  for (size_t j = 0; j < kQuad; ++j) {
    SCOPED_TRACE(testing::Message() << "member " << j);
    const double lse = state.max[j] + std::log(state.sum[j]);
    ASSERT_NEAR(lse, expected[j].Lse(), tolerance * (1 + std::fabs(lse)));
    const oracle::Vector out = expected[j].Out();
    for (size_t c = 0; c < value_dim; ++c) {
      ASSERT_NEAR(state.values[j * value_dim + c] / state.sum[j], out[c], 10 * tolerance);
    }
  }
}

TEST_P(KernelsTest, AttendRuns) {
  const std::pair<uint32_t, uint32_t> dims[] = {{16, 16},   {64, 64},  {48, 112}, {80, 32},
                                                {128, 128}, {256, 16}, {16, 512}, {512, 512},
                                                {576, 512}, {512, 576}};
  const TokenRange ranges[] = {{0, 1}, {5, 6}, {3, 17}, {15, 33}, {0, 64}, {7, 150}, {0, 203}};
  for (const DType dtype : kDTypes) {
    for (const auto& [head_dim, value_dim] : dims) {
      const Attended attended(MakeShape(1, 1, head_dim, value_dim, dtype), 203,
                              1 / std::sqrt(head_dim), &random_);
      for (const TokenRange& range : ranges) {
        SCOPED_TRACE(testing::Message()
                     << "seed " << TestSeed() << ", " << std::string(DTypeName(dtype)) << ", dims "
                     << head_dim << "/" << value_dim << ", tokens " << range.begin << ".."
                     << range.end);
        std::vector<float> values = Guarded(kQuad * value_dim);
        QuadState state = {{-kInfinity, -kInfinity, -kInfinity, -kInfinity}, {}, values.data()};
        attended.Attend(range, &state);
        std::vector<oracle::SoftmaxState> expected(kQuad, oracle::SoftmaxState(value_dim));
        attended.AddTo(range, &expected);
        ExpectState(state, expected, value_dim, 1e-6);
        ASSERT_EQ(values.back(), kGuard);
      }
    }
  }
}

// Ranges one after another fold into one state, with maxima that rise and fall, and logits up to
// thousands.
TEST_P(KernelsTest, AttendRunsFoldsIntoWhatIsThere) {
  constexpr uint32_t kDim = 64;
  for (const double size : {1e-20, 0.1, 10.0, 300.0}) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", logit size " << size * 8);
    const Attended attended(MakeShape(1, 1, kDim, kDim, DType::kFp32), 160, size, &random_);
    std::vector<float> values(kQuad * kDim, 0.0f);
    QuadState state = {{-kInfinity, -kInfinity, -kInfinity, -kInfinity}, {}, values.data()};
    std::vector<oracle::SoftmaxState> expected(kQuad, oracle::SoftmaxState(kDim));
    for (const TokenRange range : {TokenRange{40, 90}, {0, 0}, {0, 17}, {100, 160}, {90, 91}}) {
      attended.Attend(range, &state);
      attended.AddTo(range, &expected);
    }
    // A logit's rounding error is relative to its terms, and becomes a weight's relative error.
    ExpectState(state, expected, kDim, 1e-6 + 1e-6 * size);
  }
}

// Runs of any length, some empty, in any order of place, are one sequence of tokens: the answer is
// the oracle's, and several quads at once are the same, bit for bit, as one after another.
TEST_P(KernelsTest, AttendRunsOfSeveralQuads) {
  constexpr size_t kQuads = 3;
  const TokenRange ranges[] = {{3, 70}, {70, 71}, {5, 5}, {71, 203}, {18, 19}, {0, 40}};
  for (const DType dtype : kDTypes) {
    for (const uint32_t head_dim : {16u, 48u, 128u}) {
      constexpr uint32_t kValueDim = 80;
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", "
                                      << std::string(DTypeName(dtype)) << ", dim " << head_dim);
      Attended attended(MakeShape(1, 1, head_dim, kValueDim, dtype), 203, 1, &random_);
      std::vector<TokenRun> runs;
      for (const TokenRange& range : ranges) runs.push_back({attended.pages.data(), range});
      const std::vector<float> q = random_.Normals(kQuads * kQuad * head_dim, 0.3);
      std::vector<PreparedQueries> prepared;
      std::vector<kernels::Queries> queries;
      for (size_t quad = 0; quad < kQuads; ++quad) {
        prepared.emplace_back(dtype, q.data() + quad * kQuad * head_dim, 1, head_dim);
        queries.push_back(prepared.back().get());
      }
      std::vector<float> values(2 * kQuads * kQuad * kValueDim, 0.0f);
      QuadState states[2][kQuads];
      for (size_t i = 0; i < 2 * kQuads; ++i) {
        states[i / kQuads][i % kQuads] = {{-kInfinity, -kInfinity, -kInfinity, -kInfinity},
                                          {},
                                          values.data() + i * kQuad * kValueDim};
      }
      kernels::AttendRuns(attended.geometry, runs, queries.data(), kQuads, states[0]);
      for (size_t quad = 0; quad < kQuads; ++quad) {
        kernels::AttendRuns(attended.geometry, runs, &queries[quad], 1, &states[1][quad]);
      }
      for (size_t quad = 0; quad < kQuads; ++quad) {
        ASSERT_EQ(std::memcmp(states[0][quad].max, states[1][quad].max, sizeof(float) * kQuad), 0);
        ASSERT_EQ(std::memcmp(states[0][quad].sum, states[1][quad].sum, sizeof(float) * kQuad), 0);
        ASSERT_EQ(std::memcmp(states[0][quad].values, states[1][quad].values,
                              sizeof(float) * kQuad * kValueDim),
                  0);
        std::copy_n(q.begin() + static_cast<ptrdiff_t>(quad * kQuad * head_dim), kQuad * head_dim,
                    attended.q.begin());
        std::vector<oracle::SoftmaxState> expected(kQuad, oracle::SoftmaxState(kValueDim));
        for (const TokenRange& range : ranges) attended.AddTo(range, &expected);
        ExpectState(states[0][quad], expected, kValueDim, 1e-6);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, KernelsTest, testing::ValuesIn(HighwayTargets()), TargetName);

}  // namespace
}  // namespace attnd::attention::test
