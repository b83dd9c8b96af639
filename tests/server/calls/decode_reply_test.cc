// SPDX-License-Identifier: Apache-2.0
//
// Goal: a reply's bytes are those that protobuf would have written of the whole message, whatever
// its tensors' type and size, and a reply leaves nothing for the next one. Method: answers of known
// numbers, written where the reply says; the bytes are compared with the serialisation of a message
// that is filled field by field.
#include "server/calls/decode_reply.h"

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "grpcpp/support/byte_buffer.h"
#include "gtest/gtest.h"
#include "server/calls/conversions.h"
#include "server/calls/step_conversions.h"

namespace attnd::server {
namespace {

constexpr uint64_t kQueueUs = 12, kEngineUs = 345678;

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// Two rows, of which the second was refused.
engine::DecodeResult TwoRows(uint64_t value_dim) {
  engine::DecodeResult result;
  result.rows.resize(2);
  result.rows[0].stats.exact_tokens = 5;
  result.rows[0].stats.covered_mass = 0.5f;
  result.rows[0].stats.kv_head_errors = {0.25f, 0.5f};
  result.rows[0].stats.stages.score = 1500;
  result.rows[0].stats.hbm_tokens = 6;
  result.rows[0].stats.host_tokens = 5;
  result.rows[1].status = absl::NotFoundError("sequence_id");
  result.value_dim = value_dim;
  return result;
}

// Different numbers, exact in every type; the last is a NaN, as of a refused row.
float Number(size_t i, size_t count) {
  return i + 1 == count ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(i % 64) - 8;
}

v1::Tensor TensorOf(DType dtype, const std::vector<uint64_t>& shape, size_t elements) {
  v1::Tensor tensor;
  tensor.set_dtype(ToProto(dtype));
  for (const uint64_t extent : shape) tensor.add_shape(static_cast<uint32_t>(extent));
  std::vector<float> numbers(elements);
  for (size_t i = 0; i < elements; ++i) numbers[i] = Number(i, elements);
  tensor.mutable_data()->resize(elements * DTypeBytes(dtype));
  FromFloat(dtype, numbers.data(), elements,
            reinterpret_cast<std::byte*>(tensor.mutable_data()->data()));
  return tensor;
}

// What protobuf writes of the reply.
std::string Expected(uint64_t step_id, DType dtype, const engine::AnswerExtents& extents) {
  v1::DecodeResponse message;
  message.set_step_id(step_id);
  ToProto(TwoRows(extents.value_dim), ReplyRows::kAll, &message);
  *message.mutable_out() = TensorOf(
      dtype, {extents.query_tokens, extents.query_heads, extents.value_dim}, extents.out_floats());
  *message.mutable_lse() =
      TensorOf(DType::kFp32, {extents.query_tokens, extents.query_heads}, extents.lse_floats());
  message.set_queue_us(kQueueUs);
  message.set_engine_us(kEngineUs);
  return message.SerializeAsString();
}

// Answers with Number(); nothing is serialised yet.
void Answer(uint64_t step_id, DType dtype, const engine::AnswerExtents& extents,
            DecodeReply* reply) {
  reply->Start(step_id, dtype);
  const auto buffers = reply->Provide(extents);
  ASSERT_TRUE(buffers.ok()) << buffers.status();
  ASSERT_EQ(buffers->out.size(), extents.out_floats());
  ASSERT_EQ(buffers->lse.size(), extents.lse_floats());
  for (const std::span<float> part : {buffers->out, buffers->lse}) {
    for (size_t i = 0; i < part.size(); ++i) part[i] = Number(i, part.size());
  }
  ASSERT_TRUE(reply->Finish(TwoRows(extents.value_dim)).ok());
}

std::string Serialized(DecodeReply* reply) {
  grpc::ByteBuffer bytes;
  const uint64_t size = reply->ByteSize();
  reply->Serialize(kQueueUs, kEngineUs, &bytes);
  EXPECT_LE(bytes.Length(), size + DecodeReply::kTimesBytesMax);
  return BytesOf(bytes);
}

TEST(DecodeReply, HasTheBytesOfTheWholeMessage) {
  DecodeReply reply;  // one for all, so that nothing of one may stay for the next
  uint64_t step_id = 0;
  for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    for (const engine::AnswerExtents extents : std::vector<engine::AnswerExtents>{
             {1, 1, 1}, {3, 2, 16}, {2, 128, 512}, {4, 8, 0}, {1, 1, 2}}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " " << extents.query_tokens << " x "
                                      << extents.query_heads << " x " << extents.value_dim);
      Answer(step_id, dtype, extents, &reply);
      EXPECT_EQ(Serialized(&reply), Expected(step_id, dtype, extents));
      step_id += 100;
    }
  }
}

TEST(DecodeReply, ARefusalHasNothingOfTheAnswer) {
  DecodeReply reply;
  for (const bool finished : {false, true}) {
    if (finished) {
      Answer(1, DType::kBf16, {3, 2, 16}, &reply);
    } else {
      reply.Start(1, DType::kFp32);
      ASSERT_TRUE(reply.Provide({3, 2, 16}).ok());
    }
    reply.Refuse(7, absl::ResourceExhaustedError("max_message_bytes"));
    v1::DecodeResponse message;
    message.set_step_id(7);
    message.mutable_status()->set_code(8);
    message.mutable_status()->set_message("max_message_bytes");
    message.set_queue_us(kQueueUs);
    message.set_engine_us(kEngineUs);
    EXPECT_EQ(Serialized(&reply), message.SerializeAsString());
    Answer(9, DType::kFp32, {3, 2, 16}, &reply);
    EXPECT_EQ(Serialized(&reply), Expected(9, DType::kFp32, {3, 2, 16}));
  }
}

// gRPC may send the bytes when the reply has long been started anew, or is gone.
TEST(DecodeReply, BytesThatWereHandedOverStay) {
  grpc::ByteBuffer first;
  {
    DecodeReply reply;
    Answer(1, DType::kFp32, {3, 2, 16}, &reply);
    reply.Serialize(kQueueUs, kEngineUs, &first);
    Answer(2, DType::kFp32, {3, 2, 16}, &reply);
  }
  EXPECT_EQ(BytesOf(first), Expected(1, DType::kFp32, {3, 2, 16}));
}

TEST(DecodeReply, SizesThatOverflowAreRefused) {
  constexpr uint64_t kHuge = uint64_t{1} << 40;
  DecodeReply reply;
  for (const engine::AnswerExtents extents : std::vector<engine::AnswerExtents>{
           {kHuge, kHuge, 1}, {kHuge, 2, kHuge}, {kHuge, 1 << 22, 0}}) {
    reply.Start(1, DType::kFp32);
    EXPECT_EQ(reply.Provide(extents).status().code(), absl::StatusCode::kResourceExhausted);
  }
}

TEST(DecodeReply, KeepsLittleMemory) {
  HeapTrimmer trimmer;
  DecodeReply reply;
  Answer(1, DType::kBf16, {1, 2, 16}, &reply);
  Serialized(&reply);
  EXPECT_FALSE(reply.ReleaseLarge(&trimmer));
  Answer(2, DType::kBf16, {1024, 8, 16}, &reply);  // 512 KiB of floats
  Serialized(&reply);
  EXPECT_TRUE(reply.ReleaseLarge(&trimmer));
  EXPECT_FALSE(reply.ReleaseLarge(&trimmer));
  Answer(3, DType::kBf16, {1, 2, 16}, &reply);
  EXPECT_EQ(Serialized(&reply), Expected(3, DType::kBf16, {1, 2, 16}));
}

TEST(DecodeReplyDeathTest, MemoryIsAskedForOnce) {
  DecodeReply reply;
  reply.Start(1, DType::kFp32);
  ASSERT_TRUE(reply.Provide({1, 1, 16}).ok());
  EXPECT_DEATH(static_cast<void>(reply.Provide({1, 1, 16})), "asked for twice");
}

TEST(DecodeReplyDeathTest, TheAnswerIsOfTheSizeProvidedFor) {
  DecodeReply reply;
  reply.Start(1, DType::kFp32);
  ASSERT_TRUE(reply.Provide({1, 1, 16}).ok());
  EXPECT_DEATH(static_cast<void>(reply.Finish(TwoRows(32))), "size provided for");
}

}  // namespace
}  // namespace attnd::server
