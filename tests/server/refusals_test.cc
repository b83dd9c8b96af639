// SPDX-License-Identifier: Apache-2.0
//
// Goal: the faults of the contract and their codes, seen by a client over a real Unix socket, with
// the real engine behind; and that state is unchanged after each. Method: raw messages, so that
// anything can be wrong in them; states are compared by ListSequences.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/end_to_end_fixture.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(EndToEndTest, ABadStepChangesNothing) {
  const uint64_t sequence = Open();
  std::vector<Layer> layers;
  ASSERT_TRUE(Upload(sequence, 20, &layers).ok());
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto poke = [](v1::Tensor* tensor, float value) {
    std::memcpy(tensor->mutable_data()->data() + 8, &value, sizeof(value));
  };
  struct Case {
    int code;
    const char* named;
    std::function<void(v1::DecodeRequest*)> spoil;
  };
  const std::vector<Case> cases = {
      {3, "q", [=](auto* r) { poke(r->mutable_q(), kNan); }},
      {3, "q", [=](auto* r) { poke(r->mutable_q(), -kInf); }},
      {3, "k", [=](auto* r) { poke(r->mutable_k(), kNan); }},
      {3, "k", [=](auto* r) { poke(r->mutable_k(), kInf); }},
      {3, "v", [=](auto* r) { poke(r->mutable_v(), kNan); }},
      {3, "v", [=](auto* r) { poke(r->mutable_v(), kInf); }},
      {3, "layer", [](auto* r) { r->set_layer(kLayers); }},
      {3, "layer", [](auto* r) { r->set_layer(~0u); }},
      {3, "q", [](auto* r) { FillTensor(1, 3, kHeadDim, 1, r->mutable_q()); }},
      {3, "q", [](auto* r) { FillTensor(1, kQueryHeads, 64, 1, r->mutable_q()); }},
      {3, "q", [](auto* r) { FillTensor(2, kQueryHeads, kHeadDim, 1, r->mutable_q()); }},
      {3, "k", [](auto* r) { FillTensor(1, 1, kHeadDim, 1, r->mutable_k()); }},
      {3, "k", [](auto* r) { FillTensor(1, kKvHeads, 16, 1, r->mutable_k()); }},
      {3, "k",
       [](auto* r) { FillTensor(1, kKvHeads, kHeadDim, 1, r->mutable_k(), v1::DTYPE_BF16); }},
      {3, "v", [](auto* r) { FillTensor(1, kKvHeads, kHeadDim, 1, r->mutable_v()); }},
      {3, "v",
       [](auto* r) { FillTensor(1, kKvHeads, kValueDim, 1, r->mutable_v(), v1::DTYPE_FP16); }},
      {3, "k", [](auto* r) { r->clear_k(); }},
      {3, "q", [](auto* r) { r->mutable_q()->set_shape(0, 1u << 31); }},
      {3, "rows", [](auto* r) { r->clear_rows(); }},
      {3, "rows", [](auto* r) { r->add_rows()->CopyFrom(r->rows(0)); }},
      {3, "psychic", [](auto* r) { r->mutable_rows(0)->mutable_policy()->set_preset("psychic"); }},
      {3, "token_ids", [](auto* r) { r->mutable_rows(0)->mutable_token_ids()->Resize(2, 1); }},
      {5, "", [](auto* r) { r->mutable_rows(0)->set_sequence_id(0); }},
      {5, "", [](auto* r) { r->mutable_rows(0)->set_sequence_id(~uint64_t{0}); }},
      {9, "20", [](auto* r) { r->mutable_rows(0)->set_position(21); }},
      {9, "20", [](auto* r) { r->mutable_rows(0)->set_position(~uint64_t{0}); }},
  };
  const std::string before = State();
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::DecodeRequest request = Step(sequence, 20);
    cases[i].spoil(&request);
    const auto [code, message] = Outcome(Send(request));
    EXPECT_EQ(code, cases[i].code) << "case " << i << ": " << message;
    EXPECT_THAT(message, HasSubstr(cases[i].named)) << "case " << i;
    EXPECT_EQ(State(), before) << "case " << i;
  }
  EXPECT_EQ(Outcome(Send(Step(sequence, 20))).first, 0);
}

// The whole texts: whichever part of the server checks something, clients are told what they were.
TEST_F(EndToEndTest, WhatClientsAreToldOfABadStep) {
  const uint64_t sequence = Open(), other = Open();
  struct Case {
    const char* told;
    std::function<void(v1::DecodeRequest*)> spoil;
  };
  const std::vector<Case> cases = {
      {"rows has 0 entries; allowed are 1..1024, as the stream is in no pass",
       [](auto* r) { r->clear_rows(); }},
      {"rows[0].query_tokens is 0; allowed are 1..4096 (max_query_tokens) in all rows together, 0 "
       "are in the rows before",
       [](auto* r) { r->mutable_rows(0)->set_query_tokens(0); }},
      {"rows[1].query_tokens is 4096; allowed are 1..4096 (max_query_tokens) in all rows together, "
       "1 are in the rows before",
       [=](auto* r) {
         r->add_rows()->set_sequence_id(other);
         r->mutable_rows(1)->set_query_tokens(4096);
       }},
      {"q.shape[0] is 2; the rows make it 1",
       [](auto* r) { FillTensor(2, kQueryHeads, kHeadDim, 1, r->mutable_q()); }},
      {"k.shape[0] is 3; the rows make it 1",
       [](auto* r) { FillTensor(3, kKvHeads, kHeadDim, 1, r->mutable_k()); }},
      {"v.shape[0] is 2; the rows make it 1",
       [](auto* r) { FillTensor(2, kKvHeads, kValueDim, 1, r->mutable_v()); }},
      {"k.dtype is 0; allowed are DTYPE_BF16, DTYPE_FP16 and DTYPE_FP32",
       [](auto* r) { r->clear_k(); }},
      {"k is present, but every row is query_only",
       [](auto* r) { r->mutable_rows(0)->set_query_only(true); }},
      {"v is present, but every row is query_only",
       [](auto* r) {
         r->mutable_rows(0)->set_query_only(true);
         r->clear_k();
       }},
      {"v is missing; the sequence needs shape [.., 2, 16]", [](auto* r) { r->clear_v(); }},
      // Of the row, before its sequence is looked for.
      {"token_ids has 2 entries; allowed are none or query_tokens (1)",
       [](auto* r) {
         r->mutable_rows(0)->mutable_token_ids()->Resize(2, 1);
         r->mutable_rows(0)->set_sequence_id(~uint64_t{0});
         r->mutable_rows(0)->mutable_policy()->set_preset("psychic");
       }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::DecodeRequest request = Step(sequence, 0);
    cases[i].spoil(&request);
    const auto [code, message] = Outcome(Send(request));
    EXPECT_EQ(code, StatusCode::INVALID_ARGUMENT) << "case " << i;
    EXPECT_EQ(message, cases[i].told) << "case " << i;
  }
}

// Sizes of a tree: what is refused says why and leaves nothing; what is taken is listed whole.
TEST_F(EndToEndTest, SizesOfATree) {
  const auto open = [&](const auto& change) {
    v1::OpenSequenceRequest request = Model();
    request.mutable_policy()->set_preset("error-target");
    change(&request);
    v1::OpenSequenceResponse reply;
    return stub_->OpenSequence(Context().get(), request, &reply);
  };
  const auto refused = [&](const char* told, const auto& change) {
    const grpc::Status status = open(change);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << told;
    EXPECT_THAT(status.error_message(), HasSubstr(told));
  };
  const std::string before = State();
  refused("tree.leaf_tokens is 9; allowed are 8, 12, 16",
          [](auto* r) { r->mutable_tree()->set_leaf_tokens(9); });
  refused("tree.fan is 1; allowed are 4, 8, 16", [](auto* r) { r->mutable_tree()->set_fan(1); });
  refused("tree.levels is 4294967295; allowed are 2, 3",
          [](auto* r) { r->mutable_tree()->set_levels(~0u); });
  refused("tree is given, and indexes are regression", [](auto* r) {
    r->add_indexes(v1::OpenSequenceRequest::INDEX_REGRESSION);
    r->mutable_tree();
  });
  refused("tree is given, and indexes are none", [](auto* r) {
    r->mutable_policy()->set_preset("dense");
    r->mutable_tree()->set_leaf_tokens(12);
  });
  refused("tree must be absent where resume_sealed_id is given", [](auto* r) {
    r->set_resume_sealed_id(1);
    r->mutable_tree();
  });
  EXPECT_EQ(State(), before);

  EXPECT_TRUE(open([](auto*) {}).ok());
  EXPECT_TRUE(open([](auto* r) { r->mutable_tree()->set_leaf_tokens(12); }).ok());
  EXPECT_TRUE(open([](auto* r) { r->mutable_policy()->set_preset("dense"); }).ok());
  v1::ListSequencesResponse listed;
  ASSERT_TRUE(stub_->ListSequences(Context().get(), {}, &listed).ok());
  ASSERT_EQ(listed.sequences_size(), 3);
  EXPECT_EQ(listed.sequences(0).tree().ShortDebugString(), "leaf_tokens: 8 fan: 8 levels: 3");
  EXPECT_EQ(listed.sequences(1).tree().ShortDebugString(), "leaf_tokens: 12 fan: 8 levels: 3");
  EXPECT_FALSE(listed.sequences(2).has_tree());
}

TEST_F(EndToEndTest, OneBadRowLeavesTheOthersTheirAnswer) {
  const uint64_t good = Open(), other = Open();
  std::vector<Layer> layers, ignored;
  ASSERT_TRUE(Upload(good, 10, &layers).ok());
  ASSERT_TRUE(Upload(other, 10, &ignored).ok());
  v1::DecodeRequest request = Step(good, 10, 2);
  request.mutable_rows(0)->set_query_tokens(1);
  request.add_rows()->CopyFrom(request.rows(0));
  request.mutable_rows(1)->set_sequence_id(12345678);
  const v1::DecodeResponse reply = Send(request);
  ASSERT_EQ(reply.rows_size(), 2);
  EXPECT_EQ(reply.rows(0).status().code(), 0);
  EXPECT_EQ(reply.rows(1).status().code(), StatusCode::NOT_FOUND);
  const auto* out = reinterpret_cast<const float*>(reply.out().data().data());
  const size_t row = kQueryHeads * kValueDim;
  ASSERT_EQ(reply.out().data().size(), 2 * row * sizeof(float));
  for (size_t i = 0; i < row; ++i) {
    EXPECT_TRUE(std::isfinite(out[i]));
    EXPECT_TRUE(std::isnan(out[row + i]));
  }
  const auto* lse = reinterpret_cast<const float*>(reply.lse().data().data());
  EXPECT_TRUE(std::isfinite(lse[0]));
  EXPECT_TRUE(std::isnan(lse[kQueryHeads]));
}

// A query of a few bytes a head may ask for values of many.
TEST_F(EndToEndTest, AReplyThatWouldBeTooLargeIsRefusedBeforehand) {
  v1::OpenSequenceRequest wide = Model();
  wide.mutable_model()->mutable_shape()->set_query_heads(128);
  wide.mutable_model()->mutable_shape()->set_head_dim(16);
  wide.mutable_model()->mutable_shape()->set_value_dim(512);
  v1::OpenSequenceResponse opened;
  ASSERT_TRUE(stub_->OpenSequence(Context().get(), wide, &opened).ok());
  for (const bool query_only : {true, false}) {
    v1::DecodeRequest request;  // 512 KiB in, 128 MiB out
    v1::DecodeRow* row = request.add_rows();
    row->set_sequence_id(opened.sequence_id());
    row->set_query_tokens(512);
    row->set_query_only(query_only);
    FillTensor(512, 128, 16, 1, request.mutable_q());
    if (!query_only) {
      FillTensor(512, kKvHeads, 16, 1, request.mutable_k());
      FillTensor(512, kKvHeads, 512, 1, request.mutable_v());
    }
    const auto [code, message] = Outcome(Send(request));
    EXPECT_EQ(code, StatusCode::RESOURCE_EXHAUSTED) << message;
    EXPECT_THAT(message, HasSubstr("max_message_bytes"));
  }
  EXPECT_THAT(State(), Not(HasSubstr("committed_tokens")));
}

TEST_F(EndToEndTest, BadChunksNameThemselvesAndChangeNothing) {
  const uint64_t sequence = Open();
  std::vector<Layer> layers;
  ASSERT_TRUE(Upload(sequence, 20, &layers, false).ok());
  struct Case {
    StatusCode code;
    const char* named;
    std::function<void(v1::AppendKvRequest*)> spoil;
  };
  constexpr auto kInvalid = StatusCode::INVALID_ARGUMENT;
  const std::vector<Case> cases = {
      {kInvalid, "k",
       [](auto* r) {
         const float nan = std::nanf("");
         std::memcpy(r->mutable_k()->mutable_data()->data(), &nan, 4);
       }},
      {kInvalid, "v",
       [](auto* r) {
         const float infinite = INFINITY;
         std::memcpy(r->mutable_v()->mutable_data()->data(), &infinite, 4);
       }},
      {kInvalid, "k", [](auto* r) { r->clear_k(); }},
      {kInvalid, "k", [](auto* r) { FillTensor(3, 1, kHeadDim, 1, r->mutable_k()); }},
      {kInvalid, "v", [](auto* r) { FillTensor(3, kKvHeads, kHeadDim, 1, r->mutable_v()); }},
      {kInvalid, "k",
       [](auto* r) { FillTensor(3, kKvHeads, kHeadDim, 1, r->mutable_k(), v1::DTYPE_BF16); }},
      {kInvalid, "layer", [](auto* r) { r->set_layer(kLayers); }},
      {kInvalid, "token_ids", [](auto* r) { r->add_token_ids(5); }},
      {StatusCode::FAILED_PRECONDITION, "20", [](auto* r) { r->set_first_position(21); }},
      {StatusCode::FAILED_PRECONDITION, "", [](auto* r) { r->set_first_position(~uint64_t{0}); }},
      {StatusCode::ALREADY_EXISTS, "", [](auto* r) { r->set_first_position(19); }},
      {StatusCode::NOT_FOUND, "", [](auto* r) { r->set_sequence_id(999999); }},
  };
  const std::string before = State();
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::AppendKvRequest request;
    request.set_sequence_id(sequence);
    request.set_layer(0);
    request.set_first_position(20);
    FillTensor(3, kKvHeads, kHeadDim, 1, request.mutable_k());
    FillTensor(3, kKvHeads, kValueDim, 1, request.mutable_v());
    cases[i].spoil(&request);
    const auto context = Context();
    v1::AppendKvResponse reply;
    const auto stream = stub_->AppendKv(context.get(), &reply);
    stream->Write(request);
    stream->WritesDone();
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), cases[i].code) << "case " << i << ": " << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("chunk 0")) << "case " << i;
    EXPECT_THAT(status.error_message(), HasSubstr(cases[i].named)) << "case " << i;
    EXPECT_EQ(State(), before) << "case " << i;
  }
}

}  // namespace
}  // namespace attnd::testing
