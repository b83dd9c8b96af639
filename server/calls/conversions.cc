// SPDX-License-Identifier: Apache-2.0
#include "server/calls/conversions.h"

#include <optional>
#include <string>

#include "common/checked_math.h"
#include "common/status.h"

namespace attnd::server {

absl::StatusOr<DType> FromProto(v1::DType dtype, absl::string_view field) {
  switch (dtype) {
    case v1::DTYPE_BF16:
      return DType::kBf16;
    case v1::DTYPE_FP16:
      return DType::kFp16;
    case v1::DTYPE_FP32:
      return DType::kFp32;
    default:
      return Invalid(field, " is ", static_cast<int>(dtype),
                     "; allowed are DTYPE_BF16, DTYPE_FP16 and DTYPE_FP32");
  }
}

namespace {

// All but the data, which the shape wants to have `data_bytes`.
absl::StatusOr<Tensor3> ConvertShape(const v1::Tensor& tensor, absl::string_view field,
                                     uint64_t* data_bytes) {
  Tensor3 result;
  ATTND_ASSIGN_OR_RETURN(result.view.dtype,
                         FromProto(tensor.dtype(), std::string(field) + ".dtype"));
  if (tensor.shape_size() != 3) {
    return Invalid(field, ".shape has ", tensor.shape_size(), " extents; allowed are 3");
  }
  result.tokens = tensor.shape(0);
  result.heads = tensor.shape(1);
  result.dim = tensor.shape(2);
  const auto elements = CheckedProduct({result.tokens, result.heads, result.dim});
  const auto bytes =
      elements ? CheckedProduct({*elements, DTypeBytes(result.view.dtype)}) : std::nullopt;
  if (!elements || !bytes || *bytes == 0) {
    return Invalid(field, ".shape is [", result.tokens, ", ", result.heads, ", ", result.dim,
                   "]: its product is 0 or too large");
  }
  *data_bytes = *bytes;
  result.view.elements = *elements;
  return result;
}

}  // namespace

absl::StatusOr<Tensor3> FromProto(const v1::Tensor& tensor, absl::string_view field) {
  uint64_t bytes = 0;
  ATTND_ASSIGN_OR_RETURN(Tensor3 result, ConvertShape(tensor, field, &bytes));
  if (tensor.data().size() != bytes) {
    return Invalid(field, ".data has ", tensor.data().size(), " bytes; the shape makes it ", bytes);
  }
  result.view.data = reinterpret_cast<const std::byte*>(tensor.data().data());
  return result;
}

absl::StatusOr<Tensor3> WithoutDataFromProto(const v1::Tensor& tensor, absl::string_view field) {
  uint64_t bytes = 0;
  ATTND_ASSIGN_OR_RETURN(const Tensor3 result, ConvertShape(tensor, field, &bytes));
  if (!tensor.data().empty()) {
    return Invalid(field, ".data has ", tensor.data().size(),
                   " bytes; over memory the data lies in the region");
  }
  return result;
}

v1::DType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return v1::DTYPE_BF16;
    case DType::kFp16:
      return v1::DTYPE_FP16;
    case DType::kFp32:
      return v1::DTYPE_FP32;
  }
  return v1::DTYPE_UNSPECIFIED;
}

void ToProto(const attention::Policy& policy, v1::Policy* out) {
  out->set_preset(policy.preset);
  for (const auto& [key, value] : policy.Parameters()) (*out->mutable_parameters())[key] = value;
}

void ToProto(const absl::Status& status, v1::Status* out) {
  out->set_code(static_cast<int32_t>(status.code()));
  const absl::string_view message = CutMessage(status.message());
  out->set_message(message.data(), message.size());
}

bool IsAbsent(const v1::Policy& policy) {
  return policy.preset().empty() && policy.parameters().empty();
}

absl::string_view CutMessage(absl::string_view message) {
  if (message.size() <= kStatusMessageBytesMax) return message;
  size_t length = kStatusMessageBytesMax;
  const auto continues = [&](size_t i) {
    return (static_cast<unsigned char>(message[i]) & 0xC0u) == 0x80u;
  };
  while (length > 0 && continues(length)) --length;
  return message.substr(0, length);
}

}  // namespace attnd::server
