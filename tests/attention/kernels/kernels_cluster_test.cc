// SPDX-License-Identifier: Apache-2.0
//
// Goal: the kernels of cluster scores, predicted errors and k-means assignment compute their
// definitions on every instruction set, and the whole backend gives answers of the same quality on
// each. Method: plain loops in double precision over the same inputs; odd counts; extreme values.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/cpu/cpu_backend.h"
#include "attention/kernels/kernels.h"
#include "tests/attention/kernels/targets.h"
#include "tests/attention/oracle_support.h"
#include "tests/attention/support.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::attention::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class ClusterKernelsTest : public EveryTarget {
 protected:
  // Variances from none to far above the cap.
  std::vector<float> Spreads(size_t n) {
    std::vector<float> d2 = random_.Normals(n * kQuad, 2);
    for (size_t i = 0; i < d2.size(); ++i) {
      d2[i] *= i % 7 == 0 ? 0.0f : i % 5 == 0 ? 1e-10f : i % 3 == 0 ? 20 * d2[i] : d2[i];
      d2[i] = std::fabs(d2[i]);
    }
    return d2;
  }

  Random random_{TestSeed()};
};

TEST_P(ClusterKernelsTest, ClusterScores) {
  for (size_t n = 0; n < 40; ++n) {
    for (const bool second_order : {false, true}) {
      for (const bool in_place : {false, true}) {
        SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", n " << n);
        const std::vector<float> dot = random_.Normals(n * kQuad, 20);
        const std::vector<float> d2 = Spreads(n);
        std::vector<float> log_size(n);
        for (float& x : log_size) x = static_cast<float>(std::log(1 + random_.Below(500)));
        std::vector<float> log_mass = dot;
        std::vector<float> separate = dot;
        std::vector<float> optimistic(n * kQuad, -1);
        kernels::ClusterScoreArgs args;
        args.dot = in_place ? log_mass.data() : separate.data();
        args.log_size = log_size.data();
        args.log_mass = log_mass.data();
        if (second_order) args.d2 = d2.data();
        if (second_order) args.optimistic = optimistic.data();
        args.optimism = in_place ? 2 : 4;
        kernels::ClusterScores(args, n);
        for (size_t i = 0; i < n * kQuad; ++i) {
          const double base = double{dot[i]} + log_size[i / kQuad];
          const double half = second_order ? std::min(double{d2[i]}, 8.0) / 2 : 0;
          ASSERT_NEAR(log_mass[i], base + half, 1e-6 * (1 + std::fabs(base)));
          if (!second_order) continue;
          const double best = base + args.optimism * std::sqrt(d2[i]);
          ASSERT_NEAR(optimistic[i], best, 1e-6 * (1 + std::fabs(base) + std::fabs(best)));
        }
      }
    }
  }
}

TEST_P(ClusterKernelsTest, ClusterErrors) {
  for (size_t n = 0; n < 40; ++n) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", n " << n);
    std::vector<float> weight = random_.Normals(n * kQuad);
    for (float& w : weight) w = std::exp(-10 * w * w);
    const std::vector<float> d2 = Spreads(n);
    std::vector<float> spread = random_.Normals(n);
    for (size_t i = 0; i < n; ++i) spread[i] = i % 4 == 0 ? 0.0f : std::fabs(spread[i]);
    const float unit[kQuad] = {1.0f, 0.3f, 0.0f, 20.0f};
    std::vector<float> error2(n * kQuad, -1);
    kernels::ClusterErrors(weight.data(), d2.data(), spread.data(), unit, n, error2.data());
    for (size_t i = 0; i < n * kQuad; ++i) {
      const double value = double{weight[i]} * unit[i % kQuad] * spread[i / kQuad];
      const double expected = value * value * std::expm1(std::min(double{d2[i]}, 8.0));
      ASSERT_NEAR(error2[i], expected, 2e-6 * expected + std::numeric_limits<float>::min());
    }
  }
}

// At the cap and below it, where a product's rounding may make it negative, nothing is hidden.
TEST_P(ClusterKernelsTest, HiddenMass) {
  const std::vector<float> d2 = {0.0f, -1e-6f, 8.0f, 8.01f, 9.0f, 100.0f, 3000.0f, kInfinity};
  const std::vector<float> log_mass = {3.0f, 3.0f, 3.0f, -2.0f, -90.0f, 5.0f, -1.0f, 1.0f};
  for (const float deviations : {2.0f, 4.0f}) {
    std::vector<float> hidden(d2.size() + 1, 7.0f);
    kernels::HiddenMass(log_mass.data(), d2.data(), deviations, d2.size() / kQuad, hidden.data());
    for (size_t i = 0; i < d2.size(); ++i) {
      const double most =
          log_mass[i] + deviations * (std::sqrt(std::max(d2[i], 0.0f)) - std::sqrt(8.0));
      if (!(d2[i] > 8)) {
        EXPECT_EQ(hidden[i], -kInfinity);
      } else if (d2[i] == kInfinity) {
        EXPECT_EQ(hidden[i], kInfinity);
      } else {
        EXPECT_NEAR(hidden[i], most, 1e-6 * (std::fabs(most) + 100));
      }
    }
    EXPECT_EQ(hidden.back(), 7.0f);
  }
}

// Where an output cancels to nothing its unit is huge: no NaN, also for a cluster without
// deviation, and sums over many clusters stay finite.
TEST_P(ClusterKernelsTest, ClusterErrorsOfVanishingOutputs) {
  constexpr size_t kCount = 1000;
  const std::vector<float> weight(kCount * kQuad, 1.0f), spread(kCount, 1e6f);
  std::vector<float> d2(kCount * kQuad, 100.0f);
  std::fill_n(d2.begin(), kQuad, 0.0f);
  const float unit[kQuad] = {8.5e37f, 8.5e37f, 8.5e37f, 8.5e37f};
  std::vector<float> error2(kCount * kQuad), sum(kQuad, 0.0f);
  kernels::ClusterErrors(weight.data(), d2.data(), spread.data(), unit, kCount, error2.data());
  for (size_t j = 0; j < kQuad; ++j) EXPECT_EQ(error2[j], 0.0f);
  kernels::ScaleQuads(error2.data(), weight.data(), kCount, nullptr, sum.data());
  for (const float total : sum) EXPECT_TRUE(std::isfinite(total)) << total;
}

// Sizes from one member up, where nothing can be wrong, to many.
TEST_P(ClusterKernelsTest, RegressionErrors) {
  constexpr double kShare = 0.5;
  for (size_t n = 0; n < 40; ++n) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", n " << n);
    std::vector<float> weight = random_.Normals(n * kQuad);
    for (float& w : weight) w = std::exp(-10 * w * w);
    const std::vector<float> d2 = Spreads(n);
    std::vector<float> spread = random_.Normals(n), norm2 = random_.Normals(n), size(n);
    for (size_t i = 0; i < n; ++i) {
      spread[i] = i % 4 == 0 ? 0.0f : std::fabs(spread[i]);
      norm2[i] = i % 5 == 0 ? 0.0f : 30 * norm2[i] * norm2[i];
      size[i] = static_cast<float>(1 + random_.Below(i % 3 == 0 ? 3 : 5000));
    }
    const float error_unit[kQuad] = {1.0f, 0.3f, 0.0f, 20.0f};
    const float mass_unit[kQuad] = {0.5f, 0.01f, 1.0f, 0.0f};
    std::vector<float> error2(n * kQuad + 1, -1), mass2(n * kQuad + 1, -1);
    kernels::RegressionErrorArgs args;
    args.weight = weight.data();
    args.d2 = d2.data();
    args.size = size.data();
    args.spread = spread.data();
    args.value_norm2 = norm2.data();
    args.error_unit = error_unit;
    args.mass_unit = mass_unit;
    args.error2 = error2.data();
    args.mass2 = mass2.data();
    kernels::RegressionErrors(args, n);
    for (size_t i = 0; i < n * kQuad; ++i) {
      const size_t cluster = i / kQuad;
      const double g = std::min(double{d2[i]}, 8.0);
      const double growth = std::min(std::expm1(g), double{size[cluster]} - 1);
      const double rest = double{weight[i]} * error_unit[i % kQuad] * spread[cluster];
      const double moved = double{weight[i]} * error_unit[i % kQuad] * g / 2;
      const double error =
          rest * rest * growth / size[cluster] + kShare * moved * moved * norm2[cluster];
      ASSERT_NEAR(error2[i], error, 3e-6 * error + std::numeric_limits<float>::min());
      const double mass = double{weight[i]} * mass_unit[i % kQuad] * g / 2;
      const double expected = kShare * mass * mass;
      ASSERT_NEAR(mass2[i], expected, 2e-6 * expected + std::numeric_limits<float>::min());
    }
    ASSERT_EQ(error2[n * kQuad], -1);
    ASSERT_EQ(mass2[n * kQuad], -1);
  }
}

// As ClusterErrorsOfVanishingOutputs: neither part is NaN, and both sum to a float.
TEST_P(ClusterKernelsTest, RegressionErrorsOfVanishingOutputs) {
  constexpr size_t kCount = 1000;
  const std::vector<float> weight(kCount * kQuad, 1.0f), spread(kCount, 1e6f), norm2(kCount, 1e30f);
  const std::vector<float> size(kCount, 20.0f);
  std::vector<float> d2(kCount * kQuad, 100.0f);
  std::fill_n(d2.begin(), kQuad, 0.0f);
  const float error_unit[kQuad] = {8.5e37f, 8.5e37f, 8.5e37f, 8.5e37f};
  const float mass_unit[kQuad] = {1, 1, 1, 1};
  std::vector<float> error2(kCount * kQuad), mass2(kCount * kQuad);
  kernels::RegressionErrorArgs args;
  args.weight = weight.data();
  args.d2 = d2.data();
  args.size = size.data();
  args.spread = spread.data();
  args.value_norm2 = norm2.data();
  args.error_unit = error_unit;
  args.mass_unit = mass_unit;
  args.error2 = error2.data();
  args.mass2 = mass2.data();
  kernels::RegressionErrors(args, kCount);
  for (size_t j = 0; j < kQuad; ++j) EXPECT_EQ(error2[j], 0.0f);
  for (const std::vector<float>* part : {&error2, &mass2}) {
    std::vector<float> sum(kQuad, 0.0f);
    kernels::ScaleQuads(part->data(), weight.data(), kCount, nullptr, sum.data());
    for (const float total : sum) EXPECT_TRUE(std::isfinite(total)) << total;
  }
}

// Counts about the rows that are taken at once, and dims that are odd multiples of 16.
TEST_P(ClusterKernelsTest, AddWeightedVariances) {
  for (const size_t dim : {16, 48, 64, 80, 128, 240, 576}) {
    for (const size_t n : {0, 1, 3, 63, 64, 65, 130}) {
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", dim " << dim << ", n " << n);
      std::vector<uint8_t> codes(n * dim / 2);
      for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random_.Below(256));
      std::vector<float> unit = random_.Normals(n);
      for (float& x : unit) x *= x;
      const std::vector<float> d2 = Spreads(n);
      std::vector<float> weight = random_.Normals(n * kQuad);
      for (float& w : weight) w = std::exp(-2 * w * w);
      const std::vector<float> before = random_.Normals(kQuad * dim);
      std::vector<float> sum = before;
      sum.push_back(-1);
      kernels::AddWeightedVariances(codes.data(), unit.data(), n, dim, d2.data(), weight.data(),
                                    sum.data());
      ASSERT_EQ(sum.back(), -1);
      for (size_t j = 0; j < kQuad; ++j) {
        for (size_t c = 0; c < dim; ++c) {
          double expected = before[j * dim + c];
          double size = std::fabs(expected);
          for (size_t i = 0; i < n; ++i) {
            const uint8_t byte = codes[i * dim / 2 + c % (dim / 2)];
            const int code = c < dim / 2 ? byte % 16 : byte / 16;
            const double damping = d2[i * kQuad + j] > 8 ? 8 / double{d2[i * kQuad + j]} : 1;
            const double part = damping * weight[i * kQuad + j] * unit[i] * code * code;
            expected += part;
            size += part;
          }
          ASSERT_NEAR(sum[j * dim + c], expected, 2e-6 * size) << "lane " << j << ", " << c;
        }
      }
    }
  }
}

// An infinite variance of logits leaves nothing of a cluster's share, and no NaN.
TEST_P(ClusterKernelsTest, AddWeightedVariancesOfInfiniteSpread) {
  const std::vector<uint8_t> codes(8, 0xff);
  const std::vector<float> unit(1, 1e30f), d2(kQuad, kInfinity), weight(kQuad, 1.0f);
  std::vector<float> sum(kQuad * 16, 0.5f);
  kernels::AddWeightedVariances(codes.data(), unit.data(), 1, 16, d2.data(), weight.data(),
                                sum.data());
  for (const float x : sum) EXPECT_EQ(x, 0.5f);
}

// The cluster must be as near as the nearest, up to rounding; the lower one of true equals.
TEST_P(ClusterKernelsTest, AssignClosest) {
  for (const size_t dim : {16, 48, 64, 128, 512, 576}) {
    for (const size_t clusters : {1, 2, 15, 16, 17, 33, 64, 90}) {
      for (const size_t n : {1, 3, 4, 9, 17}) {
        SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", dim " << dim << ", clusters "
                                        << clusters << ", n " << n);
        const size_t stride = (clusters + 15) / 16 * 16;
        const std::vector<float> points = random_.Normals(n * dim);
        std::vector<float> centroids = random_.Normals(clusters * dim);
        // Two of the clusters are the same: never the higher one.
        const size_t twin = clusters / 2;
        std::copy_n(centroids.begin(), dim, centroids.begin() + static_cast<ptrdiff_t>(twin * dim));
        std::vector<float> transposed(dim * stride, 0.0f);
        std::vector<float> half_norms(stride, kInfinity);
        for (size_t c = 0; c < clusters; ++c) {
          double norm2 = 0;
          for (size_t k = 0; k < dim; ++k) {
            transposed[k * stride + c] = centroids[c * dim + k];
            norm2 += std::pow(centroids[c * dim + k], 2);
          }
          half_norms[c] = static_cast<float>(norm2 / 2);
        }
        std::vector<uint32_t> assignment(n + 1, 777);
        kernels::AssignClosest(points.data(), n, dim, transposed.data(), half_norms.data(),
                               clusters, stride, assignment.data());
        for (size_t i = 0; i < n; ++i) {
          const auto distance2 = [&](size_t c) {
            double sum = 0;
            for (size_t k = 0; k < dim; ++k) {
              sum += std::pow(double{points[i * dim + k]} - centroids[c * dim + k], 2);
            }
            return sum;
          };
          ASSERT_LT(assignment[i], clusters);
          ASSERT_TRUE(twin == 0 || assignment[i] != twin);
          const double mine = distance2(assignment[i]);
          for (size_t c = 0; c < clusters; ++c) ASSERT_LE(mine, distance2(c) * (1 + 1e-5));
        }
        ASSERT_EQ(assignment[n], 777u);
      }
    }
  }
}

// Clusters beyond those that are there have centroids of anything, and do not count.
TEST_P(ClusterKernelsTest, AssignClosestLooksAtClustersThatAreThere) {
  constexpr size_t kDim = 32, kStride = 64, kCount = 11;
  const std::vector<float> points = random_.Normals(kCount * kDim);
  for (const size_t clusters : {1, 5, 16, 17, 32, 40}) {
    std::vector<float> transposed = random_.Normals(kDim * kStride), half_norms(kStride, kInfinity);
    for (size_t c = 0; c < clusters; ++c) {
      half_norms[c] = 0;
      for (size_t k = 0; k < kDim; ++k)
        half_norms[c] += std::pow(transposed[k * kStride + c], 2) / 2;
    }
    uint32_t all[kCount], some[kCount];
    kernels::AssignClosest(points.data(), kCount, kDim, transposed.data(), half_norms.data(),
                           kStride, kStride, all);
    kernels::AssignClosest(points.data(), kCount, kDim, transposed.data(), half_norms.data(),
                           clusters, kStride, some);
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(some[i], all[i]) << clusters << " clusters";
  }
}

// The closest centre of points that are centres is the lowest of equal ones, in every vector lane.
TEST_P(ClusterKernelsTest, AssignClosestTakesTheLowestOfEquals) {
  constexpr size_t kDim = 16, kStride = 64;
  std::vector<float> transposed(kDim * kStride, 1.0f);  // all clusters alike
  for (size_t first = 0; first < kStride; ++first) {
    std::vector<float> half_norms(kStride, kDim / 2.0f);
    std::fill_n(half_norms.begin(), first, kInfinity);
    const std::vector<float> points(5 * kDim, 1.0f);
    uint32_t assignment[5];
    kernels::AssignClosest(points.data(), 5, kDim, transposed.data(), half_norms.data(), kStride,
                           kStride, assignment);
    for (const uint32_t cluster : assignment) ASSERT_EQ(cluster, first);
  }
}

// The same step on another instruction set: other rounding, the same answer.
TEST_P(ClusterKernelsTest, TheBackendAgreesWithTheOracleOnThisTarget) {
  SequenceSpec spec;
  spec.shape = MakeShape(6, 2, 80, 48, DType::kBf16);
  spec.segment_tokens = {900, 600};
  spec.tail_tokens = 75;
  spec.seed = TestSeed();
  TestSequence sequence = MakeSequence(spec);
  std::vector<TestRow> rows;
  for (const Policy& policy : PresetsFor(kClusterIndexes)) {
    rows.push_back(MakeRow(&sequence, policy, spec.tokens() - 1, 1, false, DType::kFp32, 0,
                           spec.seed + rows.size()));
  }
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 1});
  EXPECT_EQ(std::string(backend->target()), hwy::TargetName(GetParam()));
  const StepResult step = RunStep(backend.get(), 0, rows);
  ASSERT_TRUE(step.status.ok()) << step.status;
  auto plan = step.plans.begin();
  for (size_t r = 0; r < rows.size(); ++r) {
    for (uint32_t kv_head = 0; kv_head < 2; ++kv_head) {
      SCOPED_TRACE(testing::Message() << rows[r].policy.preset << ", KV head " << kv_head);
      const oracle::PolicyInput input = MakeInput(rows[r], 0, 0, kv_head);
      const oracle::Policy policy = OraclePolicy(rows[r].policy, 0);
      const oracle::Selection selection = oracle::Select(input, policy);
      oracle::Plan numbered = selection.plan;
      if (rows[r].policy.selector == Selector::kClusters) {
        numbered = NumberedPlan(*plan++, input);
        EXPECT_EQ(oracle::CheckPlan(selection, numbered), "");
      }
      const oracle::Answer answer = oracle::Evaluate(input, policy.mass, numbered);
      for (size_t h = 0; h < 3; ++h) {
        const size_t slot = kv_head * 3 + h;
        const oracle::Vector out = Rows(step.rows[r].out, 48, slot, 1)[0];
        EXPECT_LE(oracle::RelativeError(out, answer.heads[h].out), 1e-4);
        EXPECT_NEAR(step.rows[r].lse[slot], answer.heads[h].lse, 2e-5);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, ClusterKernelsTest, testing::ValuesIn(HighwayTargets()),
                         TargetName);

}  // namespace
}  // namespace attnd::attention::test
