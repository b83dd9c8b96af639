// SPDX-License-Identifier: Apache-2.0
//
// Goal: an upload's messages, put together again, are the blocks; mistakes are named before
// anything is sent. Method: every chunk size from one token to more than everything.
#include "client/cpp/chunker.h"

#include <functional>
#include <string>
#include <vector>

#include "client/cpp/memory_client.h"
#include "common/owned_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plane/region.h"

namespace attnd::client {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kTokens = 7;
constexpr uint64_t kKBytes = 2 * 16 * 2, kVBytes = 2 * 32 * 2;  // of a token

v1::ModelShape Shape() {
  v1::ModelShape shape;
  shape.set_layers(2);
  shape.set_query_heads(2);
  shape.set_kv_heads(2);
  shape.set_head_dim(16);
  shape.set_value_dim(32);
  shape.set_dtype(v1::DTYPE_BF16);
  return shape;
}

std::string Numbered(size_t bytes, int seed) {
  std::string text(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * 31 + seed);
  return text;
}

class ChunkerTest : public ::testing::Test {
 protected:
  ChunkerTest() {
    for (uint32_t i = 0; i < 2; ++i) {
      k_.push_back(Numbered(kTokens * kKBytes, static_cast<int>(i)));
      v_.push_back(Numbered(kTokens * kVBytes, static_cast<int>(i) + 100));
    }
    for (uint32_t i = 0; i < 2; ++i) {
      blocks_.push_back(
          {.layer = i, .first_position = 5, .tokens = kTokens, .k = k_[i], .v = v_[i]});
    }
  }
  absl::StatusOr<Chunker> Make() const {
    return Chunker::Create(9, shape_, blocks_, ids_, options_);
  }

  v1::ModelShape shape_ = Shape();
  std::vector<std::string> k_, v_;
  std::vector<KvBlock> blocks_;
  std::vector<uint32_t> ids_ = {10, 11, 12, 13, 14, 15, 16};
  AppendOptions options_;
};

TEST_F(ChunkerTest, EverySizeGivesTheSameBytes) {
  for (uint64_t tokens = 1; tokens <= kTokens + 2; ++tokens) {
    options_.chunk_bytes = tokens * (kKBytes + kVBytes);
    auto chunker = Make();
    ASSERT_TRUE(chunker.ok()) << chunker.status();
    std::vector<std::string> k(2), v(2);
    std::vector<uint64_t> next = {5, 5};
    std::vector<uint32_t> ids;
    v1::AppendKvRequest message;
    int complete = 0;
    while (chunker->Next(&message)) {
      EXPECT_EQ(complete, 0);  // only the last message says so
      EXPECT_EQ(message.sequence_id(), 9u);
      EXPECT_EQ(message.first_position(), next[message.layer()]);
      EXPECT_LE(message.k().shape(0), tokens);
      next[message.layer()] += message.k().shape(0);
      k[message.layer()] += message.k().data();
      v[message.layer()] += message.v().data();
      ids.insert(ids.end(), message.token_ids().begin(), message.token_ids().end());
      complete += message.prefill_complete() ? 1 : 0;
    }
    EXPECT_EQ(k, k_);
    EXPECT_EQ(v, v_);
    EXPECT_EQ(ids, ids_);
    EXPECT_EQ(complete, 1);
  }
}

TEST_F(ChunkerTest, ALatentModelHasNoValues) {
  shape_.set_latent(true);
  shape_.set_kv_heads(1);
  shape_.set_head_dim(32);
  EXPECT_THAT(std::string(Make().status().message()), HasSubstr("blocks[0].v"));
  for (KvBlock& block : blocks_) block.v = {};
  options_.chunk_bytes = 2 * kKBytes;
  auto chunker = Make();
  ASSERT_TRUE(chunker.ok()) << chunker.status();
  std::vector<std::string> k(2);
  v1::AppendKvRequest message;
  message.mutable_v()->set_data("of an earlier upload");
  while (chunker->Next(&message)) {
    EXPECT_FALSE(message.has_v());
    EXPECT_LE(message.k().shape(0), 2u);
    k[message.layer()] += message.k().data();
  }
  EXPECT_EQ(k, k_);
}

TEST_F(ChunkerTest, AnUploadMayEndWithoutTheEndOfThePrefill) {
  options_.prefill_complete = false;
  auto chunker = Make();
  ASSERT_TRUE(chunker.ok());
  v1::AppendKvRequest message;
  while (chunker->Next(&message)) EXPECT_FALSE(message.prefill_complete());
}

TEST_F(ChunkerTest, WithoutBlocksOnlyTheEndIsSent) {
  blocks_.clear();
  ids_.clear();
  auto chunker = Make();
  ASSERT_TRUE(chunker.ok());
  v1::AppendKvRequest message;
  ASSERT_TRUE(chunker->Next(&message));
  EXPECT_TRUE(message.prefill_complete());
  EXPECT_FALSE(message.has_k());
  EXPECT_FALSE(chunker->Next(&message));
}

TEST_F(ChunkerTest, MistakesAreNamed) {
  struct Case {
    const char* named;
    std::function<void()> spoil;
  };
  const std::vector<Case> cases = {
      {"blocks[1].k", [this] { blocks_[1].k.remove_suffix(1); }},
      {"blocks[0].v", [this] { blocks_[0].v.remove_prefix(1); }},
      {"blocks[1].tokens", [this] { blocks_[1].tokens = 0; }},
      {"blocks[0].k", [this] { blocks_[0].tokens = uint64_t{1} << 62; }},
      {"token_ids", [this] { ids_.pop_back(); }},
      {"shape", [this] { shape_.clear_dtype(); }},
      {"shape", [this] { shape_.clear_kv_heads(); }},
  };
  const auto blocks = blocks_;
  for (const Case& one : cases) {
    blocks_ = blocks;
    ids_.resize(kTokens);
    shape_ = Shape();
    one.spoil();
    const auto chunker = Make();
    EXPECT_TRUE(absl::IsInvalidArgument(chunker.status())) << one.named;
    EXPECT_THAT(std::string(chunker.status().message()), HasSubstr(one.named));
  }
}

// Tokens of 32 and 64 bytes: each part but the last has an even number of them.
TEST(ChunkerMemory, PartsBeginWhereTensorsMay) {
  OwnedFd descriptor;
  ClientRegion region = {.id = 77, .memory = *plane::Region::Create(4096, &descriptor)};
  const auto* const bytes = reinterpret_cast<const char*>(region.memory->data());
  v1::ModelShape shape = Shape();
  shape.set_kv_heads(1);
  AppendOptions options;
  options.memory = &region;
  const KvBlock block = {.layer = 1,
                         .first_position = 3,
                         .tokens = 11,
                         .k = {bytes + 64, 11 * 32},
                         .v = {bytes + 1024, 11 * 64}};
  for (options.chunk_bytes = 1; options.chunk_bytes < 2000; options.chunk_bytes += 95) {
    auto chunker = Chunker::Create(9, shape, {&block, 1}, {}, options);
    ASSERT_TRUE(chunker.ok()) << chunker.status();
    v1::AppendKvRequest message;
    uint64_t sent = 0;
    while (chunker->Next(&message)) {
      EXPECT_EQ(message.first_position(), 3 + sent);
      EXPECT_EQ(message.memory().region_id(), 77u);
      EXPECT_EQ(message.memory().k_offset(), 64 + sent * 32);
      EXPECT_EQ(message.memory().v_offset(), 1024 + sent * 64);
      EXPECT_EQ(message.memory().k_offset() % 64, 0u);
      EXPECT_TRUE(message.k().data().empty());
      EXPECT_TRUE(message.v().data().empty());
      EXPECT_EQ(message.k().shape(0), message.v().shape(0));
      sent += message.k().shape(0);
    }
    EXPECT_EQ(sent, 11u) << options.chunk_bytes;
    EXPECT_TRUE(message.prefill_complete());
  }
}

}  // namespace
}  // namespace attnd::client
