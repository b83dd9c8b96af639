// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a message's form can have wrong does not reach the engine. Method: a good message,
// spoiled in one place for each case of a table; the error must name the place. What the engine
// checks of a step, its limits and how tensors divide among rows, is in
// tests/engine/engine_faults_test.cc, and what a client sees of both in
// tests/server/refusals_test.cc.
#include "server/calls/conversions.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/calls/sequence_conversions.h"
#include "server/calls/step_conversions.h"

namespace attnd::server {
namespace {

using ::testing::HasSubstr;

void Fill(v1::Tensor* tensor, const std::vector<uint32_t>& shape,
          v1::DType dtype = v1::DTYPE_FP32) {
  tensor->Clear();
  tensor->set_dtype(dtype);
  size_t elements = 1;
  for (const uint32_t extent : shape) {
    tensor->add_shape(extent);
    elements *= extent;
  }
  tensor->set_data(std::string(elements * (dtype == v1::DTYPE_FP32 ? 4 : 2), '\0'));
}

v1::OpenSequenceRequest GoodOpen() {
  v1::OpenSequenceRequest request;
  v1::ModelShape* shape = request.mutable_model()->mutable_shape();
  shape->set_layers(2);
  shape->set_query_heads(8);
  shape->set_kv_heads(2);
  shape->set_head_dim(64);
  shape->set_dtype(v1::DTYPE_BF16);
  return request;
}

struct OpenCase {
  const char* named;
  absl::StatusCode code;
  std::function<void(v1::OpenSequenceRequest*)> spoil;
};

TEST(OpenSequence, WrongFieldsAreNamed) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const auto shape = [](auto* r) { return r->mutable_model()->mutable_shape(); };
  const std::vector<OpenCase> cases = {
      {"model", kInvalid, [](auto* r) { r->clear_model(); }},
      {"model.fingerprint", kInvalid,
       [](auto* r) { r->mutable_model()->set_fingerprint(std::string(257, 'x')); }},
      {"model.shape.layers", kInvalid, [=](auto* r) { shape(r)->set_layers(0); }},
      {"model.shape.layers", kInvalid, [=](auto* r) { shape(r)->set_layers(4000000000u); }},
      {"model.shape.query_heads", kInvalid, [=](auto* r) { shape(r)->set_query_heads(7); }},
      {"model.shape.query_heads", kInvalid, [=](auto* r) { shape(r)->set_query_heads(0); }},
      {"model.shape.kv_heads", kInvalid, [=](auto* r) { shape(r)->set_kv_heads(0); }},
      {"model.shape.kv_heads", kInvalid, [=](auto* r) { shape(r)->set_kv_heads(~0u); }},
      {"model.shape.head_dim", kInvalid, [=](auto* r) { shape(r)->set_head_dim(0); }},
      {"model.shape.head_dim", kInvalid, [=](auto* r) { shape(r)->set_head_dim(65); }},
      {"model.shape.head_dim", kInvalid, [=](auto* r) { shape(r)->set_head_dim(~0u); }},
      {"model.shape.value_dim", kInvalid, [=](auto* r) { shape(r)->set_value_dim(592); }},
      {"model.shape.dtype", kInvalid, [=](auto* r) { shape(r)->set_dtype(v1::DTYPE_UNSPECIFIED); }},
      {"model.shape.dtype", kInvalid,
       [=](auto* r) { shape(r)->set_dtype(static_cast<v1::DType>(9)); }},
      {"softmax_scale", kInvalid, [=](auto* r) { shape(r)->set_softmax_scale(-1); }},
      {"softmax_scale", kInvalid, [=](auto* r) { shape(r)->set_softmax_scale(std::nanf("")); }},
      {"softmax_scale", kInvalid, [=](auto* r) { shape(r)->set_softmax_scale(INFINITY); }},
      {"model.shape.kv_heads", kInvalid, [=](auto* r) { shape(r)->set_latent(true); }},
      {"model.shape.value_dim", kInvalid,
       [=](auto* r) {
         shape(r)->set_latent(true);
         shape(r)->set_kv_heads(1);
         shape(r)->set_value_dim(80);
       }},
      {"layout", kInvalid,
       [](auto* r) {
         r->set_layout(v1::OpenSequenceRequest::LAYOUT_TOKEN_ORDER);
         r->add_indexes(v1::OpenSequenceRequest::INDEX_CLUSTERS);
       }},
      {"layout", kInvalid,
       [](auto* r) {
         r->set_layout(v1::OpenSequenceRequest::LAYOUT_CLUSTER_ORDER);
         r->add_indexes(v1::OpenSequenceRequest::INDEX_LABELS);
       }},
      {"indexes", kInvalid,
       [](auto* r) { r->add_indexes(v1::OpenSequenceRequest::INDEX_UNSPECIFIED); }},
      {"layout", kInvalid,
       [](auto* r) { r->set_layout(static_cast<v1::OpenSequenceRequest::Layout>(9)); }},
      {"indexes", kInvalid,
       [](auto* r) { r->add_indexes(static_cast<v1::OpenSequenceRequest::Index>(9)); }},
      {"indexes", kInvalid,
       [](auto* r) {
         for (int i = 0; i < 9; ++i) r->add_indexes(v1::OpenSequenceRequest::INDEX_CLUSTERS);
       }},
      {"model.shard.kind", kInvalid,
       [](auto* r) {
         r->mutable_model()->mutable_shard()->set_kind(static_cast<v1::Shard::Kind>(9));
       }},
      {"model.shard.count", kInvalid,
       [](auto* r) { r->mutable_model()->mutable_shard()->set_count(4097); }},
      {"model.shard.index", kInvalid,
       [](auto* r) { r->mutable_model()->mutable_shard()->set_index(1); }},
      {"tree.leaf_tokens is 4; allowed are 8, 12, 16", kInvalid,
       [](auto* r) { r->mutable_tree()->set_leaf_tokens(4); }},
      {"tree.fan is 32; allowed are 4, 8, 16", kInvalid,
       [](auto* r) { r->mutable_tree()->set_fan(32); }},
      {"tree.levels is 1; allowed are 2, 3", kInvalid,
       [](auto* r) { r->mutable_tree()->set_levels(1); }},
      {"token_ids", kInvalid, [](auto* r) { r->mutable_token_ids()->Resize(101, 0); }},
      {"psychic", kInvalid, [](auto* r) { r->mutable_policy()->set_preset("psychic"); }},
      {"policy.preset", kInvalid,
       [](auto* r) { (*r->mutable_policy()->mutable_parameters())["sink"].assign(1, '1'); }},
      {"policy.parameters", kInvalid,
       [](auto* r) {
         r->mutable_policy()->set_preset("dense");
         for (int i = 0; i < 33; ++i) {
           (*r->mutable_policy()->mutable_parameters())[std::to_string(i)].assign(1, '1');
         }
       }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::OpenSequenceRequest request = GoodOpen();
    cases[i].spoil(&request);
    const auto args = FromProto(request, 100);
    EXPECT_EQ(args.status().code(), cases[i].code) << "case " << i << ": " << args.status();
    EXPECT_THAT(std::string(args.status().message()), HasSubstr(cases[i].named)) << "case " << i;
  }
}

// What a sequence is opened with: said, or left to its policy.
TEST(OpenSequence, LayoutAndIndexes) {
  using Request = v1::OpenSequenceRequest;
  using attention::IndexKind;
  const struct {
    Request::Layout layout;
    std::vector<Request::Index> indexes;
    std::optional<attention::IndexSet> expected;
  } kCases[] = {
      {Request::LAYOUT_UNSPECIFIED, {}, std::nullopt},
      {Request::LAYOUT_CLUSTER_ORDER, {}, std::nullopt},
      {Request::LAYOUT_CLUSTER_ORDER,
       {Request::INDEX_REGRESSION},
       attention::IndexSet{IndexKind::kRegression}},
      {Request::LAYOUT_TOKEN_ORDER, {}, attention::IndexSet()},
      {Request::LAYOUT_UNSPECIFIED,
       {Request::INDEX_BLOCKS_16, Request::INDEX_KEYS_4BIT},
       attention::IndexSet{IndexKind::kBlocks16, IndexKind::kKeys4}},
      {Request::LAYOUT_TOKEN_ORDER,
       {Request::INDEX_BLOCKS_64, Request::INDEX_LABELS},
       attention::IndexSet{IndexKind::kBlocks64, IndexKind::kLabels}},
      {Request::LAYOUT_CLUSTER_ORDER,
       {Request::INDEX_LABELS, Request::INDEX_CLUSTERS},
       attention::IndexSet{IndexKind::kClusters, IndexKind::kLabels}},
  };
  for (const auto& c : kCases) {
    Request request = GoodOpen();
    request.set_layout(c.layout);
    for (const Request::Index index : c.indexes) request.add_indexes(index);
    const auto args = FromProto(request, 100);
    ASSERT_TRUE(args.ok()) << args.status();
    EXPECT_EQ(args->indexes, c.expected);
    EXPECT_EQ(args->cluster_order, c.layout == Request::LAYOUT_CLUSTER_ORDER);
  }
}

TEST(OpenSequence, SizesOfATree) {
  v1::OpenSequenceRequest request = GoodOpen();
  EXPECT_FALSE(FromProto(request, 100)->tree.has_value());
  v1::TreeOptions* const tree = request.mutable_tree();
  EXPECT_EQ(FromProto(request, 100)->tree, attention::TreeSizes());
  tree->set_leaf_tokens(12);
  EXPECT_EQ(FromProto(request, 100)->tree, (attention::TreeSizes{12, 8, 3}));
  tree->set_fan(4);
  tree->set_levels(2);
  EXPECT_EQ(FromProto(request, 100)->tree, (attention::TreeSizes{12, 4, 2}));
}

TEST(OpenSequence, PresetsSayWhatTheyNeed) {
  for (const attention::Policy& policy : attention::PresetPolicies()) {
    v1::PresetInfo info;
    ToProto(policy, policy.Indexes(), &info);
    EXPECT_EQ(info.policy().preset(), policy.preset);
    EXPECT_EQ(info.policy().parameters_size(), info.allowed_size());
    for (const auto& [name, value] : info.policy().parameters()) {
      EXPECT_FALSE(info.allowed().at(name).empty());
    }
    // A sequence that is opened as it says can be read.
    v1::OpenSequenceRequest request = GoodOpen();
    request.set_layout(info.layout());
    *request.mutable_indexes() = info.indexes();
    const auto args = FromProto(request, 100);
    ASSERT_TRUE(args.ok()) << policy.preset << ": " << args.status();
    EXPECT_TRUE(policy.CheckIndexes(args->indexes.value_or(attention::kClusterIndexes)).ok());
  }
}

TEST(OpenSequence, DefaultsAreFilledIn) {
  const auto args = FromProto(GoodOpen(), 100);
  ASSERT_TRUE(args.ok()) << args.status();
  EXPECT_EQ(args->shape.value_dim, 64u);
  EXPECT_FALSE(args->shape.latent);
  EXPECT_FLOAT_EQ(args->shape.softmax_scale, 0.125f);
  EXPECT_EQ(args->shard.count, 1u);
  EXPECT_FALSE(args->policy.has_value());
}

v1::AppendKvRequest GoodAppend() {
  v1::AppendKvRequest request;
  Fill(request.mutable_k(), {3, 2, 64}, v1::DTYPE_BF16);
  Fill(request.mutable_v(), {3, 2, 32}, v1::DTYPE_BF16);
  return request;
}

TEST(AppendKv, GoodChunk) {
  v1::AppendKvRequest request = GoodAppend();
  request.set_layer(1);
  request.set_first_position(5);
  const auto chunk = FromProto(request);
  ASSERT_TRUE(chunk.ok()) << chunk.status();
  EXPECT_EQ(chunk->layer, 1u);
  EXPECT_EQ(chunk->first_position, 5u);
  EXPECT_EQ(chunk->tokens, 3u);
  EXPECT_EQ(chunk->k.elements, 384u);
  EXPECT_EQ(chunk->v.elements, 192u);
}

TEST(AppendKv, LatentModelsSendNoValues) {
  v1::AppendKvRequest request = GoodAppend();
  request.clear_v();
  const auto chunk = FromProto(request);
  ASSERT_TRUE(chunk.ok()) << chunk.status();
  EXPECT_EQ(chunk->k.elements, 384u);
  EXPECT_EQ(chunk->v.elements, 0u);
}

TEST(AppendKv, WrongFieldsAreNamed) {
  struct Case {
    const char* named;
    std::function<void(v1::AppendKvRequest*)> spoil;
  };
  const std::vector<Case> cases = {
      {"k.dtype", [](auto* r) { r->clear_k(); }},
      {"k.dtype", [](auto* r) { r->mutable_k()->set_dtype(v1::DTYPE_UNSPECIFIED); }},
      {"v.dtype", [](auto* r) { r->mutable_v()->Clear(); }},
      {"k.shape", [](auto* r) { r->mutable_k()->clear_shape(); }},
      {"k.shape", [](auto* r) { r->mutable_k()->add_shape(1); }},
      {"k.shape",
       [](auto* r) {
         Fill(r->mutable_k(), {0, 2, 64}, v1::DTYPE_BF16);
       }},
      {"k.shape",
       [](auto* r) {
         for (int i = 0; i < 3; ++i) r->mutable_k()->set_shape(i, ~0u);  // 2^96
       }},
      {"k.shape",
       [](auto* r) {  // 2^64 elements, 0 after the overflow
         r->mutable_k()->set_shape(0, 1u << 31);
         r->mutable_k()->set_shape(1, 1u << 31);
         r->mutable_k()->set_shape(2, 4);
       }},
      {"k.shape",
       [](auto* r) {  // 2^63 elements, 2^64 bytes
         r->mutable_k()->set_shape(0, 1u << 31);
         r->mutable_k()->set_shape(1, 1u << 31);
         r->mutable_k()->set_shape(2, 2);
       }},
      {"k.data", [](auto* r) { r->mutable_k()->mutable_data()->pop_back(); }},
      {"k.data", [](auto* r) { r->mutable_k()->mutable_data()->push_back('x'); }},
      {"k.data", [](auto* r) { r->mutable_k()->clear_data(); }},
      {"v.shape[0]",
       [](auto* r) {
         Fill(r->mutable_v(), {2, 2, 32}, v1::DTYPE_BF16);
       }},
      {"v.shape[1]",
       [](auto* r) {
         Fill(r->mutable_v(), {3, 1, 32}, v1::DTYPE_BF16);
       }},
      {"token_ids", [](auto* r) { r->add_token_ids(1); }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::AppendKvRequest request = GoodAppend();
    cases[i].spoil(&request);
    const auto chunk = FromProto(request);
    EXPECT_EQ(chunk.status().code(), absl::StatusCode::kInvalidArgument) << "case " << i;
    EXPECT_THAT(std::string(chunk.status().message()), HasSubstr(cases[i].named)) << "case " << i;
  }
}

// Two rows, 1 and 2 query tokens, the second query_only.
v1::DecodeRequest GoodDecode() {
  v1::DecodeRequest request;
  request.add_rows()->set_query_tokens(1);
  request.add_rows()->set_query_tokens(2);
  request.mutable_rows(1)->set_query_only(true);
  Fill(request.mutable_q(), {3, 8, 64});
  Fill(request.mutable_k(), {1, 2, 64});
  Fill(request.mutable_v(), {1, 2, 64});
  return request;
}

const auto kArrival = std::chrono::steady_clock::time_point(std::chrono::seconds(1000));

TEST(Decode, GoodMessage) {
  v1::DecodeRequest request = GoodDecode();
  request.set_layer(3);
  request.set_deadline_us(500);
  request.set_output_dtype(v1::DTYPE_FP16);
  request.mutable_rows(0)->add_token_ids(77);
  request.mutable_rows(1)->mutable_policy()->set_preset("streaming");
  request.mutable_rows(1)->set_want_kv_head_errors(true);
  DecodeStep step;
  ASSERT_TRUE(FromProto(request, kArrival, &step).ok());
  EXPECT_EQ(step.args.layer, 3u);
  EXPECT_EQ(step.args.q_heads, 8u);
  EXPECT_EQ(step.args.k_head_dim, 64u);
  EXPECT_EQ(step.output_dtype, DType::kFp16);
  ASSERT_TRUE(step.args.deadline.has_value());
  EXPECT_EQ(*step.args.deadline - kArrival, std::chrono::microseconds(500));
  ASSERT_EQ(step.args.rows.size(), 2u);
  EXPECT_EQ(step.args.rows[0].token_ids[0], 77u);
  EXPECT_FALSE(step.args.rows[0].policy.has_value());
  EXPECT_EQ(step.args.rows[1].policy->preset, "streaming");
  EXPECT_TRUE(step.args.rows[1].query_only);
  EXPECT_FALSE(step.args.rows[0].want_kv_head_errors);
  EXPECT_TRUE(step.args.rows[1].want_kv_head_errors);
}

TEST(Decode, LatentModelsSendNoValues) {
  v1::DecodeRequest request = GoodDecode();
  request.clear_v();
  DecodeStep step;
  ASSERT_TRUE(FromProto(request, kArrival, &step).ok());
  EXPECT_EQ(step.args.k.elements, 128u);
  EXPECT_EQ(step.args.v.elements, 0u);
  EXPECT_EQ(step.args.v_value_dim, 0u);
}

TEST(Decode, AFarDeadlineIsNone) {
  v1::DecodeRequest request = GoodDecode();
  request.set_deadline_us(~uint64_t{0});
  DecodeStep step;
  ASSERT_TRUE(FromProto(request, kArrival, &step).ok());
  EXPECT_FALSE(step.args.deadline.has_value());
}

TEST(Decode, WrongMessagesNameTheField) {
  struct Case {
    const char* named;
    std::function<void(v1::DecodeRequest*)> spoil;
  };
  const std::vector<Case> cases = {
      {"q.dtype", [](auto* r) { r->clear_q(); }},
      {"q.data", [](auto* r) { r->mutable_q()->mutable_data()->push_back('x'); }},
      {"k.dtype", [](auto* r) { r->clear_k(); }},
      {"v.dtype", [](auto* r) { r->mutable_v()->Clear(); }},
      {"output_dtype", [](auto* r) { r->set_output_dtype(static_cast<v1::DType>(9)); }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::DecodeRequest request = GoodDecode();
    cases[i].spoil(&request);
    DecodeStep step;
    const absl::Status status = FromProto(request, kArrival, &step);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << "case " << i;
    EXPECT_THAT(std::string(status.message()), HasSubstr(cases[i].named)) << "case " << i;
  }
}

TEST(Decode, ARowsFaultIsTheRows) {
  struct Case {
    const char* named;
    std::function<void(v1::DecodeRow*)> spoil;
  };
  const std::vector<Case> cases = {
      {"psychic", [](auto* r) { r->mutable_policy()->set_preset("psychic"); }},
      {"sink",
       [](auto* r) {
         r->mutable_policy()->set_preset("dense");
         (*r->mutable_policy()->mutable_parameters())["sink"] = "many";
       }},
      {"policy.preset",
       [](auto* r) { (*r->mutable_policy()->mutable_parameters())["sink"].assign(1, '1'); }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::DecodeRequest request = GoodDecode();
    cases[i].spoil(request.mutable_rows(1));
    DecodeStep step;
    ASSERT_TRUE(FromProto(request, kArrival, &step).ok()) << "case " << i;
    EXPECT_TRUE(step.rows[0].precheck.ok());
    EXPECT_EQ(step.rows[1].precheck.code(), absl::StatusCode::kInvalidArgument) << "case " << i;
    EXPECT_THAT(std::string(step.rows[1].precheck.message()), HasSubstr(cases[i].named));
  }
}

// A step's memory is used again; nothing of an earlier message may stay.
TEST(Decode, NothingStaysFromTheMessageBefore) {
  v1::DecodeRequest first = GoodDecode();
  first.set_deadline_us(5);
  first.mutable_rows(0)->mutable_policy()->set_preset("streaming");
  DecodeStep step;
  ASSERT_TRUE(FromProto(first, kArrival, &step).ok());
  v1::DecodeRequest second;
  second.add_rows()->set_query_tokens(1);
  second.mutable_rows(0)->set_query_only(true);
  Fill(second.mutable_q(), {1, 8, 64}, v1::DTYPE_BF16);
  ASSERT_TRUE(FromProto(second, kArrival, &step).ok());
  EXPECT_EQ(step.args.rows.size(), 1u);
  EXPECT_FALSE(step.args.rows[0].policy.has_value());
  EXPECT_FALSE(step.args.deadline.has_value());
  EXPECT_EQ(step.args.k.data, nullptr);
  EXPECT_EQ(step.output_dtype, DType::kBf16);
}

TEST(Status, LongMessagesAreCutBetweenCharacters) {
  std::string umlauts(1, 'x');
  for (int i = 0; i < 1000; ++i) umlauts.append("\xc3\xa4");
  const absl::string_view cut = CutMessage(umlauts);
  EXPECT_LE(cut.size(), kStatusMessageBytesMax);
  EXPECT_EQ(cut.size() % 2, 1u);
  EXPECT_EQ(CutMessage("short"), "short");
}

}  // namespace
}  // namespace attnd::server
