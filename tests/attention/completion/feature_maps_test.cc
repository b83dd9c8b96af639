// SPDX-License-Identifier: Apache-2.0
//
// Goal: feature maps are those of the definition, and wrong ones are refused. Method: random maps
// against the oracle in double precision; good parts with one thing wrong.
#include "attention/completion/feature_maps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/attention/completion/completion_support.h"

namespace attnd::attention::test {
namespace {

using testing::HasSubstr;

TEST(FeatureMaps, AreThoseOfTheDefinition) {
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "ATTND_TEST_SEED=" << seed);
  Random random(seed);
  for (const auto& [width, inner] :
       {std::pair(16u, 16u), std::pair(64u, 128u), std::pair(48u, 80u)}) {
    const ModelShape shape = MakeShape(4, 2, width == 48 ? 80 : 64, 32, DType::kFp32, 2);
    const FeatureMapParts parts = RandomParts(shape, width, inner, &random);
    const auto maps = FeatureMaps::Make(parts);
    ASSERT_TRUE(maps.ok()) << maps.status();
    const std::vector<float> x = random.Normals(4 * shape.head_dim, 3);
    std::vector<float> query(4 * shape.head_dim), key(query.size());
    (*maps)->QueryFeatures(1, 2, x.data(), query.data());
    (*maps)->KeyFeatures(1, 1, x.data(), key.data());
    for (uint32_t lane = 0; lane < 4; ++lane) {
      const oracle::Vector vector = Rows(x, shape.head_dim, lane, 1)[0];
      const auto of_query = oracle::LogFeatures(OracleMap(parts, parts.query, 4 + 2), vector);
      const auto of_key = oracle::LogFeatures(OracleMap(parts, parts.key, 2 + 1), vector);
      for (uint32_t f = 0; f < shape.head_dim; ++f) {
        EXPECT_NEAR(query[f * 4 + lane], of_query[f], 2e-5 * (1 + std::abs(of_query[f])));
        EXPECT_NEAR(key[f * 4 + lane], of_key[f], 2e-5 * (1 + std::abs(of_key[f])));
      }
    }
  }
}

// Whatever a key is, its features are numbers.
TEST(FeatureMaps, GreatInputsGiveNumbers) {
  const ModelShape shape = MakeShape(1, 1, 64, 64, DType::kFp32);
  Random random(TestSeed());
  FeatureMapParts parts = RandomParts(shape, 64, 64, &random);
  for (float& weight : parts.key.output_weight) weight = kMapWeightMax;
  const auto maps = FeatureMaps::Make(parts);
  ASSERT_TRUE(maps.ok()) << maps.status();
  for (const float size : {1e10f, 3e38f, -3e38f}) {
    const std::vector<float> x(4 * shape.head_dim, size);
    std::vector<float> features(4 * shape.head_dim);
    (*maps)->KeyFeatures(0, 0, x.data(), features.data());
    for (const float feature : features) EXPECT_LE(std::abs(feature), kLogFeatureMax);
  }
}

TEST(FeatureMaps, WrongPartsAreNamed) {
  const ModelShape shape = MakeShape(4, 2, 64, 32, DType::kFp32, 2);
  Random random(TestSeed());
  const FeatureMapParts good = RandomParts(shape, 32, 48, &random);
  ASSERT_TRUE(FeatureMaps::Make(good).ok());
  const struct {
    const char* named;
    std::function<void(FeatureMapParts*)> spoil;
  } kCases[] = {
      {"layers", [](FeatureMapParts* p) { p->layers = 0; }},
      {"query_heads", [](FeatureMapParts* p) { p->query_heads = 4000000000u; }},
      {"width", [](FeatureMapParts* p) { p->width = 528; }},
      {"inner", [](FeatureMapParts* p) { p->inner = 40; }},
      {"head_dim", [](FeatureMapParts* p) { p->head_dim = 0; }},
      {"completed", [](FeatureMapParts* p) { p->completed.pop_back(); }},
      {"query.stem.bias", [](FeatureMapParts* p) { p->query.stem_bias.pop_back(); }},
      {"key.alpha", [](FeatureMapParts* p) { p->key.alpha.push_back(0); }},
      {"key.outer.weight", [](FeatureMapParts* p) { p->key.outer_weight[7] = std::nanf(""); }},
      {"query.output.weight",
       [](FeatureMapParts* p) {
         p->query.output_weight[3] = std::numeric_limits<float>::infinity();
       }},
      {"key.inner.bias", [](FeatureMapParts* p) { p->key.inner_bias[0] = -1.1e4f; }},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.named);
    FeatureMapParts parts = good;
    c.spoil(&parts);
    const absl::Status status = FeatureMaps::Make(parts).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.named));
  }
}

TEST(FeatureMaps, BelongToAModelsShape) {
  const ModelShape shape = MakeShape(4, 2, 64, 32, DType::kFp32, 2);
  Random random(TestSeed());
  const auto maps = FeatureMaps::Make(RandomParts(shape, 32, 48, &random));
  ASSERT_TRUE(maps.ok());
  EXPECT_TRUE((*maps)->CheckShape(shape).ok());
  ModelShape other = shape;
  other.layers = 3;
  EXPECT_TRUE(absl::IsFailedPrecondition((*maps)->CheckShape(other)));
  other = shape;
  other.softmax_scale *= 1.01f;
  EXPECT_TRUE(absl::IsFailedPrecondition((*maps)->CheckShape(other)));
}

}  // namespace
}  // namespace attnd::attention::test
