// SPDX-License-Identifier: Apache-2.0
#include "common/safetensors.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/status.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"

namespace attnd {
namespace {

static_assert(std::endian::native == std::endian::little);

using google::protobuf::ListValue;
using google::protobuf::Struct;
using JsonValue = google::protobuf::Value;

constexpr char kMetadataName[] = "__metadata__";
constexpr int kDimensionsMax = 8;

absl::Status Wrong(absl::string_view name, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("safetensors: ", name, ": ", what));
}

// Nothing for a dtype that is not known here.
std::optional<uint64_t> ElementBytes(absl::string_view dtype) {
  if (dtype == "BF16" || dtype == "F16") return 2;
  if (dtype == "F32") return 4;
  if (dtype == "I64") return 8;
  return std::nullopt;
}

JsonValue Number(uint64_t number) {
  JsonValue value;
  value.set_number_value(static_cast<double>(number));
  return value;
}

Struct EncodeTensor(const TensorEntry& entry) {
  Struct tensor;
  auto& fields = *tensor.mutable_fields();
  fields["dtype"].set_string_value(entry.dtype);
  ListValue* const shape = fields["shape"].mutable_list_value();
  for (const uint64_t extent : entry.shape) *shape->add_values() = Number(extent);
  ListValue* const offsets = fields["data_offsets"].mutable_list_value();
  *offsets->add_values() = Number(entry.begin);
  *offsets->add_values() = Number(entry.end);
  return tensor;
}

absl::StatusOr<std::vector<uint64_t>> DecodeNumbers(const std::string& name, const Struct& tensor,
                                                    const char* field, int count_max) {
  const auto found = tensor.fields().find(field);
  if (found == tensor.fields().end() || !found->second.has_list_value() ||
      found->second.list_value().values_size() > count_max) {
    return Wrong(name, absl::StrCat(field, " is no list of up to ", count_max, " numbers"));
  }
  std::vector<uint64_t> numbers;
  for (const JsonValue& value : found->second.list_value().values()) {
    const double number = value.has_number_value() ? value.number_value() : -1;
    if (!(number >= 0 && number <= static_cast<double>(kTensorBytesMax)) ||
        number != std::floor(number)) {
      return Wrong(name,
                   absl::StrCat(field, " has an entry that is no number of 0..", kTensorBytesMax));
    }
    numbers.push_back(static_cast<uint64_t>(number));
  }
  return numbers;
}

absl::StatusOr<TensorEntry> DecodeTensor(const std::string& name, const Struct& tensor,
                                         uint64_t data_bytes) {
  TensorEntry entry;
  const auto dtype = tensor.fields().find("dtype");
  if (dtype != tensor.fields().end()) entry.dtype = dtype->second.string_value();
  if (entry.dtype.empty()) return Wrong(name, "dtype is missing");
  ATTND_ASSIGN_OR_RETURN(entry.shape, DecodeNumbers(name, tensor, "shape", kDimensionsMax));
  ATTND_ASSIGN_OR_RETURN(const auto offsets, DecodeNumbers(name, tensor, "data_offsets", 2));
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes) {
    return Wrong(name, absl::StrCat("data_offsets are not within the file's ", data_bytes,
                                    " bytes of data"));
  }
  entry.begin = offsets[0];
  entry.end = offsets[1];
  std::optional<uint64_t> bytes = ElementBytes(entry.dtype);
  if (!bytes.has_value()) return entry;
  for (const uint64_t extent : entry.shape) {
    if (bytes.has_value()) bytes = CheckedProduct({*bytes, extent});
  }
  if (bytes != entry.bytes()) {
    return Wrong(name, absl::StrCat("its shape and dtype do not make ", entry.bytes(), " bytes"));
  }
  return entry;
}

}  // namespace

absl::StatusOr<std::string> EncodeHead(const SafetensorsHead& head) {
  Struct message;
  auto& fields = *message.mutable_fields();
  for (const auto& [name, text] : head.metadata) {
    auto* metadata = fields[kMetadataName].mutable_struct_value()->mutable_fields();
    (*metadata)[name].set_string_value(text);
  }
  for (const auto& [name, entry] : head.tensors) {
    *fields[name].mutable_struct_value() = EncodeTensor(entry);
  }
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json);
  if (!status.ok()) return absl::InternalError(absl::StrCat("no JSON: ", status.ToString()));
  json.resize((json.size() + 7) / 8 * 8, ' ');
  const uint64_t length = json.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + json;
}

absl::StatusOr<uint64_t> DecodeHeadLength(absl::string_view first_bytes, uint64_t file_bytes) {
  uint64_t length = 0;
  if (first_bytes.size() < sizeof(length)) {
    return Wrong("head", "the file is shorter than 8 bytes");
  }
  std::memcpy(&length, first_bytes.data(), sizeof(length));
  if (length > kHeadBytesMax || length + kHeadLengthBytes > file_bytes) {
    return Wrong("head", absl::StrCat("its length is ", length, "; allowed are 0..", kHeadBytesMax,
                                      " within the file"));
  }
  return length;
}

absl::StatusOr<SafetensorsHead> DecodeHead(absl::string_view json, uint64_t data_bytes) {
  Struct message;
  const auto status =
      google::protobuf::util::JsonStringToMessage({json.data(), json.size()}, &message);
  if (!status.ok()) return Wrong("head", "it is no JSON object");
  SafetensorsHead head;
  for (const auto& [name, value] : message.fields()) {
    if (!value.has_struct_value()) return Wrong(name, "it is no object");
    if (name != kMetadataName) {
      ATTND_ASSIGN_OR_RETURN(head.tensors[name],
                             DecodeTensor(name, value.struct_value(), data_bytes));
      continue;
    }
    for (const auto& [key, text] : value.struct_value().fields()) {
      if (!text.has_string_value()) return Wrong(name, "its values must be texts");
      head.metadata[key] = text.string_value();
    }
  }
  return head;
}

}  // namespace attnd
