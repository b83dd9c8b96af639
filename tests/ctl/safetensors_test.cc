// SPDX-License-Identifier: Apache-2.0
//
// Goal: heads that are written are read back the same, and whatever else is read is either refused
// or within the file. Method: round trips, heads with one thing wrong, and random changes of a good
// one.
#include "common/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "ctl/kv_file.h"
#include "tests/storage/io/io_support.h"

namespace attnd::ctl::test {
namespace {

using testing::HasSubstr;

engine::OpenArgs Args() {
  engine::OpenArgs args;
  args.fingerprint = "a \"model\"";
  args.shape = {3, 4, 2, 32, 48, DType::kBf16, 0.1f};
  args.shard = {engine::Shard::Kind::kHeads, 1, 2};
  args.policy = attention::ParsePolicy("error-target", {{"tolerance", "0.05"}}).value();
  return args;
}

std::string JsonOf(const KvFile& file) {
  const std::string head = EncodeHead(HeadOf(file).value()).value();
  EXPECT_EQ(head.size() % 8, 0u);
  EXPECT_EQ(DecodeHeadLength(head, head.size()).value(), head.size() - kHeadLengthBytes);
  return head.substr(kHeadLengthBytes);
}

TEST(SafetensorsTest, ASequencesFileIsReadBack) {
  for (const bool has_ids : {false, true}) {
    // Sizes beyond 32 bits, and beyond what six digits say.
    const KvFile file = PlanKvFile(Args(), 123456789, has_ids).value();
    const SafetensorsHead head = DecodeHead(JsonOf(file), file.data_bytes).value();
    EXPECT_EQ(head.tensors.size(), has_ids ? 7u : 6u);
    const auto parsed = ParseKvFile(head);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->model.SerializeAsString(), file.model.SerializeAsString());
    EXPECT_EQ(parsed->policy.preset(), "error-target");
    EXPECT_EQ(parsed->policy.parameters().at("tolerance"), "0.05");
    EXPECT_EQ(parsed->tokens, file.tokens);
    EXPECT_EQ(parsed->keys, file.keys);
    EXPECT_EQ(parsed->values, file.values);
    EXPECT_EQ(parsed->token_ids, file.token_ids);
    EXPECT_EQ(parsed->data_bytes, file.data_bytes);
    EXPECT_EQ(parsed->token_bytes(), 3u * 2 * (32 + 48) * 2);
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeHead(JsonOf(file), file.data_bytes - 1).status()));
  }
}

TEST(SafetensorsTest, TooMuchIsRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(PlanKvFile(Args(), ~uint64_t{0}, true).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(PlanKvFile(Args(), uint64_t{1} << 40, true).status()));
}

TEST(SafetensorsTest, WhatIsWrongIsNamed) {
  const std::pair<const char*, const char*> wrong[] = {
      {R"([])", "JSON"},
      {R"({"a": 1})", "no object"},
      {R"({"a": {"shape": [1], "data_offsets": [0, 4]}})", "dtype"},
      {R"({"a": {"dtype": "F32", "data_offsets": [0, 4]}})", "shape"},
      {R"({"a": {"dtype": "F32", "shape": [1]}})", "data_offsets"},
      {R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}})", "data_offsets"},
      {R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}})", "data_offsets"},
      {R"({"a": {"dtype": "F32", "shape": [30], "data_offsets": [0, 120]}})", "data_offsets"},
      {R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}})", "make 4 bytes"},
      {R"({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})", "shape"},
      {R"({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}})", "shape"},
      {R"({"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}})", "shape"},
      {R"({"a": {"dtype": "F32", "shape": [1e300], "data_offsets": [0, 4]}})", "shape"},
      // 2^48 * 2^48 elements of 4 bytes: 4 in 64 bits, if nobody looks.
      {R"({"a": {"dtype": "F32", "shape": [281474976710656, 281474976710656],
          "data_offsets": [0, 0]}})",
       "make 0 bytes"},
      {R"({"__metadata__": {"a": 1}})", "texts"},
  };
  for (const auto& [json, message] : wrong) {
    const auto head = DecodeHead(json, 100);
    EXPECT_TRUE(absl::IsInvalidArgument(head.status())) << json;
    EXPECT_THAT(std::string(head.status().message()), HasSubstr(message)) << json;
  }
  EXPECT_TRUE(
      DecodeHead(R"({"a": {"dtype": "F8", "shape": [9], "data_offsets": [0, 1]}}   )", 100).ok());
  const std::string length(8, '\xff');
  EXPECT_FALSE(DecodeHeadLength(length, ~uint64_t{0}).ok());
  EXPECT_FALSE(DecodeHeadLength(length.substr(1), 100).ok());
  EXPECT_FALSE(DecodeHeadLength(std::string("\x10\0\0\0\0\0\0\0", 8), 23).ok());
  EXPECT_TRUE(DecodeHeadLength(std::string("\x10\0\0\0\0\0\0\0", 8), 24).ok());
}

TEST(SafetensorsTest, AnyHeadIsRefusedOrWithinTheFile) {
  const uint64_t seed = storage::test::TestSeed();
  std::mt19937_64 random(seed);
  const KvFile file = PlanKvFile(Args(), 10, true).value();
  const std::string good = JsonOf(file);
  uint64_t accepted = 0;
  for (int round = 0; round < 5000; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", round " << round);
    std::string json = good;
    for (uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
      const size_t at = random() % json.size();
      if (random() % 4 == 0) {
        json.erase(at, 1 + random() % 4);
      } else {
        json[at] = "0123456789-.eE\"{}[],:\\\0x"[random() % 24];
      }
    }
    const auto head = DecodeHead(json, file.data_bytes);
    if (!head.ok()) continue;
    const auto parsed = ParseKvFile(*head);
    if (!parsed.ok()) continue;
    ++accepted;
    for (const uint64_t keys : parsed->keys) {
      ASSERT_LE(keys + parsed->tokens * parsed->key_row_bytes, file.data_bytes);
    }
    for (const uint64_t values : parsed->values) {
      ASSERT_LE(values + parsed->tokens * parsed->value_row_bytes, file.data_bytes);
    }
  }
  EXPECT_GT(accepted, 20u) << "some changes change nothing that counts";
}

}  // namespace
}  // namespace attnd::ctl::test
