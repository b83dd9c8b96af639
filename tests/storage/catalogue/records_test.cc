// SPDX-License-Identifier: Apache-2.0
//
// Goal: a record is read as it was written, and one that says something impossible is refused with
// the name of its field. Method: random records there and back; messages put together byte by byte
// here, without protobuf, each with one field wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "storage/catalogue/catalogue.h"
#include "tests/storage/catalogue/catalogue_support.h"

namespace attnd::storage::test {
namespace {

using testing::HasSubstr;

// A message by the number of its fields; protobuf's encoding in a dozen lines.
class Message {
 public:
  Message& Number(uint32_t field, uint64_t value) {
    fields_[field] = Varint(uint64_t{field} << 3) + Varint(value);
    return *this;
  }
  Message& Bytes(uint32_t field, const std::string& bytes) {
    fields_[field] = Varint(uint64_t{field} << 3 | 2) + Varint(bytes.size()) + bytes;
    return *this;
  }
  Message& Without(uint32_t field) {
    fields_.erase(field);
    return *this;
  }
  std::string Encode() const {
    std::string all;
    for (const auto& [number, bytes] : fields_) all += bytes;
    return all;
  }

 private:
  static std::string Varint(uint64_t value) {
    std::string bytes;
    for (; value >= 128; value >>= 7) bytes.push_back(static_cast<char>(value | 128));
    bytes.push_back(static_cast<char>(value));
    return bytes;
  }
  std::map<uint32_t, std::string> fields_;
};

Message GoodSegment() {
  Message message;
  message.Bytes(1, std::string(32, 'c')).Bytes(2, std::string(32, 'p')).Bytes(3, "tenant");
  return message.Number(4, 7).Number(5, 8192).Number(6, 100).Number(7, 5).Number(8, 1700000000);
}

Message GoodSequence() {
  Message message;
  message.Number(1, 9).Bytes(2, "tenant").Bytes(3, std::string(32, 'c')).Number(4, 7);
  return message.Number(5, 8192).Number(6, 105).Number(7, 1700000000).Number(8, 1700000001);
}

struct Wrong {
  std::string message;  // part of what is said
  std::function<void(Message*)> change;
};

void SetNumber(std::vector<Wrong>* cases, uint32_t field, const std::string& name,
               const std::vector<uint64_t>& values) {
  for (const uint64_t value : values) {
    cases->push_back({name + " is ", [=](Message* message) { message->Number(field, value); }});
  }
}

void SetBytes(std::vector<Wrong>* cases, uint32_t field, const std::string& part,
              const std::vector<std::string>& values) {
  for (const std::string& value : values) {
    cases->push_back({part, [=](Message* message) { message->Bytes(field, value); }});
  }
}

constexpr uint64_t kAll = UINT64_MAX;
const std::vector<uint64_t> kBadNumbers = {0, kNumberMax + 1, kAll};
const std::vector<uint64_t> kBadTimes = {static_cast<uint64_t>(kUnixSMax) + 1, kAll,
                                         uint64_t{1} << 63};
const std::vector<uint64_t> kBadFileBytes = {0, 1, 4095, 4097, kFileBytesMax + kBlockBytes, kAll};
const std::vector<std::string> kBadIds = {"", std::string(31, 'x'), std::string(33, 'x')};
const std::vector<std::string> kBadTenants = {std::string(kTenantBytesMax + 1, 't')};

TEST(RecordsTest, RandomRecordsThereAndBack) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  for (uint64_t i = 0; i < 2000; ++i) {
    const SegmentRecord segment = RandomSegment(&random, ChainOf(i));
    const auto segment_again = DecodeSegment(EncodeSegment(segment));
    ASSERT_TRUE(segment_again.ok()) << segment_again.status();
    ASSERT_EQ(*segment_again, segment);
    const SequenceRecord sequence = RandomSequence(&random, i + 1);
    const auto sequence_again = DecodeSequence(EncodeSequence(sequence));
    ASSERT_TRUE(sequence_again.ok()) << sequence_again.status();
    ASSERT_EQ(*sequence_again, sequence);
  }
}

TEST(RecordsTest, MessagesPutTogetherByHandAreRead) {
  const auto segment = DecodeSegment(GoodSegment().Encode());
  ASSERT_TRUE(segment.ok()) << segment.status();
  SegmentRecord expected;
  expected.chain.fill('c');
  expected.parent.fill('p');
  expected.tenant = "tenant";
  expected.file = 7;
  expected.file_bytes = 8192;
  expected.first_position = 100;
  expected.tokens = 5;
  expected.used_unix_s = 1700000000;
  EXPECT_EQ(*segment, expected);
  EXPECT_EQ(EncodeSegment(expected), GoodSegment().Encode());
  const auto sequence = DecodeSequence(GoodSequence().Encode());
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_EQ(sequence->id, 9u);
  EXPECT_EQ(sequence->tokens, 105u);
  EXPECT_EQ(EncodeSequence(*sequence), GoodSequence().Encode());
}

TEST(RecordsTest, EveryFieldOfASegmentIsChecked) {
  std::vector<Wrong> cases;
  SetBytes(&cases, 1, "chain has ", kBadIds);
  SetBytes(&cases, 1, "chain is all zeros", {std::string(32, '\0')});
  SetBytes(&cases, 2, "parent has ", kBadIds);
  SetBytes(&cases, 2, "parent is the segment's own", {std::string(32, 'c')});
  SetBytes(&cases, 3, "tenant", kBadTenants);
  SetNumber(&cases, 4, "file", kBadNumbers);
  SetNumber(&cases, 5, "file_bytes", kBadFileBytes);
  SetNumber(&cases, 6, "first_position", {kPositionMax + 1, kAll});
  SetNumber(&cases, 7, "tokens", {0, uint64_t{1} << 32, (uint64_t{1} << 32) + 5, kAll});
  SetNumber(&cases, 8, "used_unix_s", kBadTimes);
  for (const Wrong& wrong : cases) {
    Message message = GoodSegment();
    wrong.change(&message);
    const auto status = DecodeSegment(message.Encode()).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << wrong.message << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(wrong.message));
  }
  for (const uint32_t field : {1, 2, 4, 5, 7}) {  // the others may be 0 or empty
    EXPECT_FALSE(DecodeSegment(GoodSegment().Without(field).Encode()).ok()) << field;
  }
}

TEST(RecordsTest, EveryFieldOfASequenceIsChecked) {
  std::vector<Wrong> cases;
  SetNumber(&cases, 1, "id", kBadNumbers);
  SetBytes(&cases, 2, "tenant", kBadTenants);
  SetBytes(&cases, 3, "last has ", kBadIds);
  SetNumber(&cases, 4, "tail_file", kBadNumbers);
  SetNumber(&cases, 5, "tail_file_bytes", kBadFileBytes);
  SetNumber(&cases, 6, "tokens", {kPositionMax + 1, kAll});
  SetNumber(&cases, 7, "sealed_unix_s", kBadTimes);
  SetNumber(&cases, 8, "used_unix_s", kBadTimes);
  for (const Wrong& wrong : cases) {
    Message message = GoodSequence();
    wrong.change(&message);
    const auto status = DecodeSequence(message.Encode()).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << wrong.message << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(wrong.message));
  }
  for (const uint32_t field : {1, 3, 4, 5}) {
    EXPECT_FALSE(DecodeSequence(GoodSequence().Without(field).Encode()).ok()) << field;
  }
}

TEST(RecordsTest, WhatIsNoRecordIsRefused) {
  const std::string good = GoodSegment().Encode();
  const std::string bad[] = {"",
                             "x",
                             good + good.substr(0, 3),
                             good.substr(0, good.size() - 1),
                             std::string(kRecordBytesMax + 1, '\0'),
                             GoodSegment().Number(9, 1).Encode(),   // a field of another format
                             GoodSegment().Bytes(4, "7").Encode(),  // of another type
                             GoodSequence().Encode()};
  for (const std::string& bytes : bad) {
    const auto status = DecodeSegment(bytes).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  }
  EXPECT_TRUE(absl::IsDataLoss(DecodeSequence(good).status()));
  EXPECT_TRUE(absl::IsDataLoss(DecodeSequence("").status()));
}

}  // namespace
}  // namespace attnd::storage::test
