// SPDX-License-Identifier: Apache-2.0
//
// Goal: the shape is that of the model, for each family of files; a file that says no shape, or
// one that is not allowed, is refused with the field, what it is and what is allowed. Method: texts
// by hand, with the sizes that the models' papers and pages give.
#include "ctl/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace attnd::ctl::test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr char kLlama[] = R"({"model_type": "llama", "torch_dtype": "bfloat16",
  "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
  "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
  "eos_token_id": [128001, 128008]})";

ModelShape ShapeOf(const std::string& json, std::optional<DType> dtype = std::nullopt) {
  const auto config = ParseModelConfig(json, dtype);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? config->shape : ModelShape();
}

TEST(ModelConfigTest, Llama) {
  const ModelShape shape = ShapeOf(kLlama);
  EXPECT_EQ(shape.layers, 32u);
  EXPECT_EQ(shape.query_heads, 32u);
  EXPECT_EQ(shape.kv_heads, 8u);
  EXPECT_EQ(shape.head_dim, 128u);
  EXPECT_EQ(shape.value_dim, 128u);
  EXPECT_EQ(shape.dtype, DType::kBf16);
  EXPECT_FALSE(shape.latent);
  EXPECT_FLOAT_EQ(shape.softmax_scale, 1 / std::sqrt(128.0f));
  EXPECT_EQ(ParseModelConfig(kLlama, std::nullopt)->model_type, "llama");
}

// head_dim is not hidden_size / heads.
TEST(ModelConfigTest, Qwen3) {
  const ModelShape shape = ShapeOf(R"({"model_type": "qwen3", "hidden_size": 2560,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "dtype": "float16", "sliding_window": null})");
  EXPECT_EQ(shape.head_dim, 128u);
  EXPECT_EQ(shape.dtype, DType::kFp16);
}

TEST(ModelConfigTest, WithoutKvHeadsEachQueryHeadHasOne) {
  const ModelShape shape = ShapeOf(
      R"({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
          "num_key_value_heads": null, "head_dim": null})");
  EXPECT_EQ(shape.kv_heads, 32u);
  EXPECT_EQ(shape.dtype, DType::kBf16) << "no dtype: bf16";
}

TEST(ModelConfigTest, DeepSeekIsLatent) {
  const ModelShape shape = ShapeOf(R"({"model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "head_dim": 64, "torch_dtype": "bfloat16"})");
  EXPECT_TRUE(shape.latent);
  EXPECT_EQ(shape.kv_heads, 1u);
  EXPECT_EQ(shape.query_heads, 128u);
  EXPECT_EQ(shape.head_dim, 576u);
  EXPECT_EQ(shape.value_dim, 512u);
  EXPECT_FLOAT_EQ(shape.softmax_scale, 1 / std::sqrt(192.0f));
}

TEST(ModelConfigTest, EntriesMayLieInTextConfig) {
  const std::string nested =
      absl::StrCat(R"({"model_type": "mistral3", "vision_config": {"num_hidden_layers": 24},)",
                   R"("text_config": )", kLlama, "}");
  EXPECT_EQ(ShapeOf(nested), ShapeOf(kLlama));
}

TEST(ModelConfigTest, TheOptionDecidesTheDType) {
  EXPECT_EQ(ShapeOf(kLlama, DType::kFp32).dtype, DType::kFp32);
  EXPECT_EQ(ShapeOf(R"({"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
                        "dtype": "float8_e4m3fn"})",
                    DType::kFp16)
                .dtype,
            DType::kFp16);
  EXPECT_EQ(DTypeOf("fp16"), DType::kFp16);
  EXPECT_EQ(DTypeOf("float16"), std::nullopt);
}

// kLlama with one entry exchanged.
std::string With(const std::string& name, const std::string& value) {
  std::string json = kLlama;
  const size_t end = json.rfind('}');
  return json.substr(0, end) + ", \"" + name + "\": " + value + "}";
}

TEST(ModelConfigTest, WhatIsWrongIsNamed) {
  const std::string cases[][2] = {
      {"", "is no JSON object"},
      {"[1]", "is no JSON object"},
      {"{\"a\": ", "is no JSON object"},
      {"not json", "is no JSON object"},
      {"{}", "num_hidden_layers is missing"},
      {R"({"num_hidden_layers": 2})", "num_attention_heads is missing"},
      {R"({"num_hidden_layers": 2, "num_attention_heads": 2})", "hidden_size is missing"},
      {R"({"num_hidden_layers": 2, "num_attention_heads": 2, "kv_lora_rank": 512})",
       "qk_rope_head_dim is missing"},
      {With("head_dim", "0"), "head_dim is 0; allowed are whole numbers 1.."},
      {With("head_dim", "-128"), "head_dim is -128; allowed are whole numbers 1.."},
      {With("head_dim", "128.5"), "head_dim is 128.5; allowed"},
      {With("head_dim", "1e300"), "head_dim is 1e+300; allowed"},
      {With("head_dim", "\"many\""), "head_dim is \"many\"; allowed"},
      {With("head_dim", "[128]"), "head_dim is a list; allowed"},
      {With("head_dim", "{}"), "head_dim is an object; allowed"},
      {With("head_dim", "true"), "head_dim is true; allowed"},
      {With("head_dim", "592"), "head_dim is 592; allowed are multiples of 16 up to 576"},
      {With("head_dim", "8"), "head_dim is 8; allowed are multiples of 16"},
      {With("head_dim", "2147483647"), "head_dim is 2147483647; allowed are multiples"},
      {With("kv_lora_rank", "2147483647"), "qk_rope_head_dim is missing"},
      {R"({"num_hidden_layers": 2000, "num_attention_heads": 2, "hidden_size": 256})",
       "layers is 2000; allowed are 1..1024"},
      {R"({"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 2,
           "head_dim": 64})",
       "query_heads is 3; allowed are multiples of kv_heads (2)"},
      {R"({"num_hidden_layers": 2, "num_attention_heads": 0, "hidden_size": 64})",
       "num_attention_heads is 0; allowed"},
      {R"({"num_hidden_layers": 2, "num_attention_heads": 64, "hidden_size": 32})",
       "head_dim is 0; allowed"},
      {R"({"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64,
           "dtype": "float8"})",
       "dtype is \"float8\"; allowed are bfloat16"},
  };
  for (const auto& [json, message] : cases) {
    const auto config = ParseModelConfig(json, std::nullopt);
    EXPECT_TRUE(absl::IsInvalidArgument(config.status())) << json << ": " << config.status();
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(message)) << json;
  }
}

TEST(ModelConfigTest, DeepNestingIsRefused) {
  std::string json = "{\"a\": ";
  for (int i = 0; i < 100000; ++i) json += "[";
  EXPECT_TRUE(absl::IsInvalidArgument(ParseModelConfig(json, std::nullopt).status()));
}

class ModelConfigFileTest : public testing::Test {
 protected:
  ~ModelConfigFileTest() override { std::filesystem::remove_all(folder_); }
  std::string Write(const std::string& text) {
    std::filesystem::create_directory(folder_);
    std::ofstream(folder_ + "/config.json") << text;
    return folder_ + "/config.json";
  }
  const std::string folder_ =
      testing::TempDir() +
      absl::StrCat("model_config_", getpid(), "_", testing::UnitTest::GetInstance()->random_seed());
};

TEST_F(ModelConfigFileTest, Files) {
  EXPECT_EQ(ReadModelConfig(Write(kLlama), std::nullopt)->shape, ShapeOf(kLlama));
  const auto wrong = ReadModelConfig(Write("{}"), std::nullopt);
  EXPECT_THAT(std::string(wrong.status().message()),
              StartsWith(folder_ + "/config.json: num_hidden_layers"));
  EXPECT_TRUE(absl::IsNotFound(ReadModelConfig(folder_ + "/none", std::nullopt).status()));
  EXPECT_FALSE(ReadModelConfig(folder_, std::nullopt).ok()) << "a folder";
}

TEST_F(ModelConfigFileTest, SizeIsBounded) {
  const std::string fits = kLlama + std::string(kModelConfigBytesMax - sizeof(kLlama) + 1, ' ');
  ASSERT_EQ(fits.size(), kModelConfigBytesMax);
  EXPECT_TRUE(ReadModelConfig(Write(fits), std::nullopt).ok());
  const auto large = ReadModelConfig(Write(fits + " "), std::nullopt);
  EXPECT_TRUE(absl::IsInvalidArgument(large.status()));
  EXPECT_THAT(std::string(large.status().message()), HasSubstr("more than 1048576 bytes"));
}

}  // namespace
}  // namespace attnd::ctl::test
