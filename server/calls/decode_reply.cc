// SPDX-License-Identifier: Apache-2.0
#include "server/calls/decode_reply.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <new>
#include <utility>

#include "common/checked_math.h"
#include "common/status.h"
#include "glog/logging.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "server/calls/conversions.h"
#include "server/calls/handler.h"
#include "server/calls/step_conversions.h"

namespace attnd::server {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

absl::Status NoMemory() {
  return absl::ResourceExhaustedError("the system refused memory for the reply");
}

void AppendVarint(uint64_t value, std::string* bytes) {
  std::array<uint8_t, 10> buffer;
  const uint8_t* const end = CodedOutputStream::WriteVarint64ToArray(value, buffer.data());
  bytes->append(reinterpret_cast<const char*>(buffer.data()), end - buffer.data());
}

void AppendDelimited(int field, uint64_t length, std::string* bytes) {
  AppendVarint(WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED), bytes);
  AppendVarint(length, bytes);
}

// Field `field` of a reply, a tensor, up to its elements, which take `data_bytes` and end it.
std::string TensorHead(int field, DType dtype, std::initializer_list<uint64_t> shape,
                       uint64_t data_bytes) {
  v1::Tensor tensor;
  tensor.set_dtype(ToProto(dtype));
  for (const uint64_t extent : shape) tensor.add_shape(static_cast<uint32_t>(extent));
  std::string inner = tensor.SerializeAsString();
  if (data_bytes > 0) AppendDelimited(v1::Tensor::kDataFieldNumber, data_bytes, &inner);
  std::string head;
  AppendDelimited(field, inner.size() + data_bytes, &head);
  return head + inner;
}

// The message's bytes, and `more` behind them.
grpc::Slice SliceOf(const v1::DecodeResponse& message, const std::string& more) {
  const size_t message_bytes = message.ByteSizeLong();
  grpc::Slice slice(message_bytes + more.size());
  auto* const data = const_cast<uint8_t*>(slice.begin());
  message.SerializeWithCachedSizesToArray(data);
  std::copy(more.begin(), more.end(), data + message_bytes);
  return slice;
}

}  // namespace

absl::StatusOr<WireData> WireData::Make(uint64_t bytes) {
  WireData result;
  if (bytes == 0) return result;
  result.data_.reset(static_cast<std::byte*>(::operator new(bytes, std::nothrow)));
  if (result.data_ == nullptr) return NoMemory();
  result.bytes_ = bytes;
  return result;
}

grpc::Slice WireData::Release() {
  const auto free = [](void* data) { ::operator delete(data); };
  std::byte* const data = data_.release();
  return {data, std::exchange(bytes_, 0), free, data};
}

void DecodeReply::Start(uint64_t step_id, DType output_dtype, const Parts& parts) {
  ClearTensors();
  parts_ = parts;
  output_dtype_ = output_dtype;
  front_.set_step_id(step_id);
  front_.clear_status();
  front_.mutable_rows()->Clear();
  front_.clear_round_trip();
}

absl::StatusOr<engine::AnswerBuffers> DecodeReply::Provide(const engine::AnswerExtents& extents) {
  CHECK(!has_tensors_ && lse_.data.size() == 0) << "a reply's memory is asked for twice";
  const auto out_bytes =
      CheckedProduct({extents.query_tokens, extents.query_heads, extents.value_dim, sizeof(float)});
  const auto lse_bytes = CheckedProduct({extents.query_tokens, extents.query_heads, sizeof(float)});
  if (!out_bytes.has_value() || !lse_bytes.has_value()) return NoMemory();
  extents_ = extents;
  engine::AnswerBuffers buffers;
  ATTND_ASSIGN_OR_RETURN(lse_.data, WireData::Make(*lse_bytes));
  buffers.lse = {reinterpret_cast<float*>(lse_.data.data()), extents.lse_floats()};
  if (output_dtype_ == DType::kFp32) {
    ATTND_ASSIGN_OR_RETURN(out_.data, WireData::Make(*out_bytes));
    buffers.out = {reinterpret_cast<float*>(out_.data.data()), extents.out_floats()};
  } else {
    converted_.resize(extents.out_floats());
    buffers.out = converted_;
  }
  return buffers;
}

absl::Status DecodeReply::Finish(const engine::DecodeResult& result) {
  CHECK_EQ(result.value_dim, extents_.value_dim) << "the answer is not of the size provided for";
  CHECK_EQ(lse_.data.size(), extents_.lse_floats() * sizeof(float));
  if (output_dtype_ != DType::kFp32) {
    ATTND_ASSIGN_OR_RETURN(out_.data,
                           WireData::Make(extents_.out_floats() * DTypeBytes(output_dtype_)));
    FromFloat(output_dtype_, converted_.data(), extents_.out_floats(), out_.data.data());
  }
  ToProto(result, parts_.rows, &front_);
  const auto [tokens, heads, value_dim] = extents_;
  out_.head = TensorHead(v1::DecodeResponse::kOutFieldNumber, output_dtype_,
                         {tokens, heads, value_dim}, out_.data.size());
  if (parts_.lse) {
    lse_.head = TensorHead(v1::DecodeResponse::kLseFieldNumber, DType::kFp32, {tokens, heads},
                           lse_.data.size());
  } else {
    lse_ = Field();
  }
  has_tensors_ = true;
  return absl::OkStatus();
}

void DecodeReply::Refuse(uint64_t step_id, const absl::Status& status) {
  ClearTensors();
  front_.Clear();
  front_.set_step_id(step_id);
  ToProto(status, front_.mutable_status());
}

void DecodeReply::FinishPrefills(uint64_t step_id,
                                 std::span<const absl::StatusOr<engine::PrefillResult>> prefills) {
  ClearTensors();
  front_.Clear();
  front_.set_step_id(step_id);
  for (const absl::StatusOr<engine::PrefillResult>& prefill : prefills) {
    v1::RowResult* const row = front_.add_rows();
    ToProto(prefill.status(), row->mutable_status());
    if (prefill.ok()) ToProto(*prefill, row->mutable_prefill());
  }
}

void DecodeReply::FinishMemoryPass(uint64_t step_id, const engine::DecodeResult& result,
                                   ReplyRows rows) {
  ClearTensors();
  front_.Clear();
  front_.set_step_id(step_id);
  ToProto(result, rows, &front_);
}

void DecodeReply::FinishRoundTrip(uint64_t step_id, const v1::RoundTrip& measured) {
  ClearTensors();
  front_.Clear();
  front_.set_step_id(step_id);
  *front_.mutable_round_trip() = measured;
}

uint64_t DecodeReply::ByteSize() const {
  uint64_t bytes = front_.ByteSizeLong();
  if (!has_tensors_) return bytes;
  for (const Field* field : {&out_, &lse_}) bytes += field->head.size() + field->data.size();
  return bytes;
}

void DecodeReply::Serialize(uint64_t queue_us, uint64_t engine_us, grpc::ByteBuffer* bytes) {
  std::array<grpc::Slice, 5> slices;
  size_t count = 0;
  slices[count++] = SliceOf(front_, out_.head);
  sent_bytes_ = out_.data.size() + lse_.data.size();
  if (has_tensors_) {
    if (out_.data.size() > 0) slices[count++] = out_.data.Release();
    if (parts_.lse) {
      slices[count++] = grpc::Slice(lse_.head);
      slices[count++] = lse_.data.Release();
    }
  }
  v1::DecodeResponse times;
  times.set_queue_us(queue_us);
  times.set_engine_us(engine_us);
  slices[count++] = SliceOf(times, std::string());
  *bytes = grpc::ByteBuffer(slices.data(), count);
  ClearTensors();
}

bool DecodeReply::ReleaseLarge(HeapTrimmer* trimmer) {
  trimmer->OnReleased(std::exchange(sent_bytes_, 0));
  const size_t kept =
      converted_.capacity() * sizeof(float) + (KeepsMuch(front_) ? front_.SpaceUsedLong() : 0);
  if (kept <= kKeptMessageBytesMax) return false;
  front_ = v1::DecodeResponse();
  converted_ = std::vector<float>();
  trimmer->OnReleased(kept);
  return true;
}

void DecodeReply::ClearTensors() {
  out_ = Field();
  lse_ = Field();
  has_tensors_ = false;
  extents_ = {};
}

}  // namespace attnd::server
