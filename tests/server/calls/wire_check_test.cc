// SPDX-License-Identifier: Apache-2.0
//
// Goal: messages are counted before they are parsed, and what is refused names its field. Method:
// bytes written by hand, in one slice and cut into pieces.
#include "server/calls/wire_check.h"

#include <map>
#include <string>
#include <vector>

#include "attnd/v1/attnd.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/calls/heap_trimmer.h"
#include "server/calls/request_parser.h"
#include "server/options/policy_catalog.h"

namespace attnd::server {
namespace {

using ::testing::HasSubstr;

// The bytes in slices of `piece` bytes.
grpc::ByteBuffer Buffer(const std::string& bytes, size_t piece = 1 << 20) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += piece) slices.emplace_back(bytes.substr(at, piece));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string Times(const std::string& bytes, uint64_t count) {
  std::string result;
  for (uint64_t i = 0; i < count; ++i) result += bytes;
  return result;
}

class WireCheckTest : public ::testing::Test {
 protected:
  WireCheckTest() {
    options_.max_rows = 4;
    options_.max_query_tokens = 300;
    options_.max_sequence_tokens = 300;
  }
  // The same answer for whole bytes and for pieces.
  absl::Status Check(const google::protobuf::Descriptor* type, const std::string& bytes) const {
    const WireCheck check(type, options_);
    const absl::Status status = check.Check(Buffer(bytes));
    for (const size_t piece : {1u, 3u}) EXPECT_EQ(check.Check(Buffer(bytes, piece)), status);
    return status;
  }
  absl::Status Decode(const std::string& bytes) const {
    return Check(v1::DecodeRequest::descriptor(), bytes);
  }
  absl::Status Append(const std::string& bytes) const {
    return Check(v1::AppendKvRequest::descriptor(), bytes);
  }
  static void ExpectNames(const absl::Status& status, const char* field) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
    EXPECT_THAT(std::string(status.message()), HasSubstr("allowed are"));
  }
  static constexpr uint64_t kParametersMax = 4 * kPolicyParametersMax;  // in 4 rows
  ServerOptions options_;
};

const std::string kEmptyRow("\x22\x00", 2);

TEST_F(WireCheckTest, RowsHaveALimit) {
  EXPECT_TRUE(Decode(Times(kEmptyRow, 4)).ok());
  ExpectNames(Decode(Times(kEmptyRow, 5)), "rows has more than 4");
}

// In all rows together, packed and one by one.
TEST_F(WireCheckTest, TokenIdsHaveALimit) {
  v1::DecodeRequest request;
  for (int row = 0; row < 3; ++row) {
    auto* const ids = request.add_rows()->mutable_token_ids();
    for (int i = 0; i < 100; ++i) ids->Add(100'000);
  }
  EXPECT_TRUE(Decode(request.SerializeAsString()).ok());
  request.mutable_rows(1)->add_token_ids(1);
  ExpectNames(Decode(request.SerializeAsString()), "rows.token_ids has more than 300");
  const std::string one_by_one("\x30\x01", 2);
  EXPECT_TRUE(Append(Times(one_by_one, 300)).ok());
  ExpectNames(Append(Times(one_by_one, 301)), "token_ids has more than 300");
}

TEST_F(WireCheckTest, ShapesAndParametersHaveALimit) {
  const auto key = [](const std::string& bytes) {
    return std::string("\x22", 1) + static_cast<char>(bytes.size()) + bytes;
  };
  EXPECT_TRUE(Append(Times(key(std::string("\x10\x01", 2)), kEntriesMax)).ok());
  ExpectNames(Append(Times(key(std::string("\x10\x01", 2)), kEntriesMax + 1)), "k.shape");
  v1::DecodeRequest request;
  auto& parameters = *request.add_rows()->mutable_policy()->mutable_parameters();
  for (uint64_t i = 0; i < kParametersMax; ++i) parameters[std::to_string(i)];
  EXPECT_TRUE(Decode(request.SerializeAsString()).ok());
  parameters["one more"];
  ExpectNames(Decode(request.SerializeAsString()), "rows.policy.parameters");
}

// As many rows as there may be, each with as many parameters as a policy may have.
TEST_F(WireCheckTest, EveryRowMayHaveAWholePolicy) {
  options_.max_rows = 2048;
  v1::DecodeRequest request;
  for (uint32_t row = 0; row < options_.max_rows; ++row) {
    auto& parameters = *request.add_rows()->mutable_policy()->mutable_parameters();
    for (int i = 0; i < kPolicyParametersMax; ++i) parameters[std::to_string(i)];
  }
  const WireCheck check(v1::DecodeRequest::descriptor(), options_);
  EXPECT_TRUE(check.Check(Buffer(request.SerializeAsString())).ok());
}

// Fields of another number, and of another type than their own.
TEST_F(WireCheckTest, UnknownFieldsHaveALimit) {
  for (const std::string& field : {std::string("\xa0\x06\x00", 3), std::string("\x0d    ", 5)}) {
    EXPECT_TRUE(Decode(Times(field, kUnknownFieldsMax)).ok());
    ExpectNames(Decode(Times(field, kUnknownFieldsMax + 1)), "does not know");
  }
}

TEST_F(WireCheckTest, WhatIsNoMessageIsSaidToBeNone) {
  const std::vector<std::string> cases = {
      std::string("\x10\xff\xff\xff\xff\x0f\x00", 7),  // layer 2^32 - 1, then tag 0
      std::string("\x08", 1),                          // a varint is missing
      std::string("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 12),  // one of 11 bytes
      std::string("\x22\x05\x00", 3),              // rows longer than the message
      std::string("\x22\xff\xff\xff\xff\x0f", 6),  // much longer
      std::string("\x22\x02\x22\x05", 4),          // the inner one is cut
      std::string("\xa3\x06\xa4\x06", 4),          // a group
      std::string("\x0f", 1),                      // wire type 7
      std::string("\x25 ", 2),                     // four bytes are missing
      std::string("\x02\x00", 2),                  // field 0
      std::string("\x80\x80\x80\x80\x32\x00", 6),  // a tag of more than 32 bits
  };
  for (const std::string& bytes : cases) {
    EXPECT_EQ(Decode(bytes), NoMessage()) << ::testing::PrintToString(bytes);
  }
  EXPECT_TRUE(Decode("").ok());
}

// A new repeated field gets kEntriesMax unless it has a limit of its own: choose.
TEST_F(WireCheckTest, EveryRepeatedFieldIsKnownHere) {
  const std::map<std::string, uint64_t> expected = {
      {"OpenSequence.indexes", kEntriesMax}, {"OpenSequence.policy.parameters", kParametersMax},
      {"OpenSequence.token_ids", 300},       {"AppendKv.k.shape", kEntriesMax},
      {"AppendKv.v.shape", kEntriesMax},     {"AppendKv.observed_queries.shape", kEntriesMax},
      {"AppendKv.token_ids", 300},           {"Decode.rows", 4},
      {"Decode.rows.token_ids", 300},        {"Decode.rows.policy.parameters", kParametersMax},
      {"Decode.q.shape", kEntriesMax},       {"Decode.complete_prefills", 4},
      {"Decode.k.shape", kEntriesMax},       {"Decode.v.shape", kEntriesMax},
  };
  std::map<std::string, uint64_t> found;
  const auto* const service = v1::DecodeRequest::descriptor()->file()->FindServiceByName("Attnd");
  for (int i = 0; i < service->method_count(); ++i) {
    const WireCheck check(service->method(i)->input_type(), options_);
    for (const WireCheck::Limit& limit : check.limits()) {
      found[service->method(i)->name() + "." + limit.field] = limit.entries_max;
    }
  }
  EXPECT_EQ(found, expected);
}

TEST(FindField, TheLastOneCounts) {
  const auto bytes = Buffer(std::string("\x08\x05\x22\x02\x08\x09\x08\x07", 8));
  EXPECT_EQ(FindVarint(bytes, 1), 7u);
  EXPECT_EQ(FindVarint(bytes, 2), std::nullopt);
  EXPECT_TRUE(HasAnyField(bytes, {4}));
  EXPECT_TRUE(HasAnyField(bytes, {5, 1}));
  EXPECT_FALSE(HasAnyField(bytes, {5, 2}));
}

// A field of another type than a varint, behind one that is: the other's value is not its own.
TEST(FindField, OnlyVarintsAreOne) {
  EXPECT_EQ(FindVarint(Buffer(std::string("\x08\x05\x15    ", 7)), 2), std::nullopt);
  EXPECT_EQ(FindVarint(Buffer(std::string("\x10\x05\x12\x01x", 5)), 2), 5u);
}

// By what it is, not by what it says.
TEST(RequestParser, OnlyNoMessageIsNone) {
  EXPECT_TRUE(IsNoMessage(NoMessage()));
  EXPECT_FALSE(IsNoMessage(absl::InvalidArgumentError(NoMessage().message())));
  EXPECT_FALSE(IsNoMessage(absl::OkStatus()));
}

TEST(RequestParser, ParsesWhatIsFineAndLeavesNothingOfTheRest) {
  HeapTrimmer trimmer;
  const RequestParser parser(ServerOptions(), &trimmer);
  v1::DecodeRequest sent, request;
  sent.set_step_id(9);
  sent.add_rows()->set_sequence_id(3);
  grpc::ByteBuffer bytes = Buffer(sent.SerializeAsString());
  ASSERT_TRUE(parser.Parse(&bytes, &request).ok());
  EXPECT_EQ(request.SerializeAsString(), sent.SerializeAsString());
  request.Clear();
  bytes = Buffer(std::string("\x10\xff\xff\xff\xff\x0f\x00", 7));
  EXPECT_EQ(parser.Parse(&bytes, &request), NoMessage());
  EXPECT_EQ(request.ByteSizeLong(), 0u);
  v1::OpenSequenceRequest open;  // bytes that are no UTF-8, where text belongs
  bytes = Buffer(std::string("\x0a\x03\x0a\x01\xff", 5));
  EXPECT_EQ(parser.Parse(&bytes, &open), NoMessage());
}

}  // namespace
}  // namespace attnd::server
