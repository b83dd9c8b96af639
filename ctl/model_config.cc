// SPDX-License-Identifier: Apache-2.0
#include "ctl/model_config.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"

namespace attnd::ctl {
namespace {

using google::protobuf::Struct;
using JsonValue = google::protobuf::Value;

absl::Status WrongConfig(absl::string_view what) { return absl::InvalidArgumentError(what); }

// Null if there is no such entry, or its value is null.
const JsonValue* Find(const Struct& entries, const char* field) {
  const auto found = entries.fields().find(field);
  if (found == entries.fields().end() || found->second.has_null_value()) return nullptr;
  return &found->second;
}

std::string Found(const JsonValue& value) {
  if (value.has_number_value()) return absl::StrCat(value.number_value());
  if (value.has_string_value()) return absl::StrCat("\"", value.string_value(), "\"");
  if (value.has_bool_value()) return value.bool_value() ? "true" : "false";
  return value.has_list_value() ? "a list" : "an object";
}

// Nothing if the field is missing.
absl::StatusOr<std::optional<uint32_t>> NumberIf(const Struct& entries, const char* field) {
  const JsonValue* value = Find(entries, field);
  if (value == nullptr) return std::nullopt;
  constexpr uint32_t kMax = std::numeric_limits<int32_t>::max();
  const double number = value->has_number_value() ? value->number_value() : 0;
  if (!(number >= 1 && number <= kMax) || number != std::floor(number)) {
    return WrongConfig(
        absl::StrCat(field, " is ", Found(*value), "; allowed are whole numbers 1..", kMax));
  }
  return static_cast<uint32_t>(number);
}

absl::StatusOr<uint32_t> NumberOf(const Struct& entries, const char* field) {
  ATTND_ASSIGN_OR_RETURN(const std::optional<uint32_t> number, NumberIf(entries, field));
  if (number.has_value()) return *number;
  return WrongConfig(absl::StrCat(field, " is missing; a whole number is needed"));
}

// What the field `dtype`, or torch_dtype in older files, says.
absl::StatusOr<DType> ConfigDType(const Struct& entries) {
  constexpr std::pair<const char*, DType> kNames[] = {
      {"bfloat16", DType::kBf16}, {"float16", DType::kFp16}, {"float32", DType::kFp32}};
  for (const char* field : {"dtype", "torch_dtype"}) {
    const JsonValue* value = Find(entries, field);
    if (value == nullptr) continue;
    for (const auto& [name, dtype] : kNames) {
      if (value->string_value() == name) return dtype;
    }
    return WrongConfig(absl::StrCat(field, " is ", Found(*value),
                                    "; allowed are bfloat16, float16 and float32, or --dtype "
                                    "says what keys and values are sent in"));
  }
  return DType::kBf16;
}

// Sizes of attention with KV heads.
absl::Status SetGrouped(const Struct& entries, ModelShape* shape) {
  ATTND_ASSIGN_OR_RETURN(const auto kv_heads, NumberIf(entries, "num_key_value_heads"));
  ATTND_ASSIGN_OR_RETURN(const auto head_dim, NumberIf(entries, "head_dim"));
  shape->kv_heads = kv_heads.value_or(shape->query_heads);
  if (head_dim.has_value()) {
    shape->head_dim = *head_dim;
  } else {
    ATTND_ASSIGN_OR_RETURN(const uint32_t hidden, NumberOf(entries, "hidden_size"));
    shape->head_dim = hidden / shape->query_heads;
  }
  shape->value_dim = shape->head_dim;
  shape->softmax_scale = 1 / std::sqrt(static_cast<float>(shape->head_dim));
  return absl::OkStatus();
}

// Sizes of attention over latent vectors of `rank` elements.
absl::Status SetLatent(const Struct& entries, uint32_t rank, ModelShape* shape) {
  ATTND_ASSIGN_OR_RETURN(const uint32_t rotary, NumberOf(entries, "qk_rope_head_dim"));
  ATTND_ASSIGN_OR_RETURN(const auto plain, NumberIf(entries, "qk_nope_head_dim"));
  shape->latent = true;
  shape->kv_heads = 1;
  shape->head_dim = rank + rotary;
  shape->value_dim = rank;
  shape->softmax_scale =
      1 / std::sqrt(static_cast<float>(plain.value_or(rank)) + static_cast<float>(rotary));
  return absl::OkStatus();
}

// The entries of the language model: of models of several kinds they lie in text_config.
const Struct& TextEntries(const Struct& entries) {
  const JsonValue* text = Find(entries, "text_config");
  const bool nested =
      text != nullptr && text->has_struct_value() && Find(entries, "num_hidden_layers") == nullptr;
  return nested ? text->struct_value() : entries;
}

absl::StatusOr<ModelConfig> ConfigOf(const Struct& entries, std::optional<DType> dtype) {
  ModelConfig config;
  if (const JsonValue* type = Find(entries, "model_type"); type != nullptr) {
    config.model_type = type->string_value();
  }
  ModelShape& shape = config.shape;
  ATTND_ASSIGN_OR_RETURN(shape.layers, NumberOf(entries, "num_hidden_layers"));
  ATTND_ASSIGN_OR_RETURN(shape.query_heads, NumberOf(entries, "num_attention_heads"));
  ATTND_ASSIGN_OR_RETURN(const auto rank, NumberIf(entries, "kv_lora_rank"));
  ATTND_RETURN_IF_ERROR(rank.has_value() ? SetLatent(entries, *rank, &shape)
                                         : SetGrouped(entries, &shape));
  if (dtype.has_value()) {
    shape.dtype = *dtype;
  } else {
    ATTND_ASSIGN_OR_RETURN(shape.dtype, ConfigDType(entries));
  }
  ATTND_RETURN_IF_ERROR(shape.Validate());
  return config;
}

}  // namespace

std::optional<DType> DTypeOf(absl::string_view name) {
  for (const DType dtype : {DType::kBf16, DType::kFp16, DType::kFp32}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return std::nullopt;
}

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view json, std::optional<DType> dtype) {
  Struct entries;
  const auto parsed = google::protobuf::util::JsonStringToMessage(std::string(json), &entries);
  if (!parsed.ok()) {
    return WrongConfig(absl::StrCat("is no JSON object: ", std::string(parsed.message())));
  }
  return ConfigOf(TextEntries(entries), dtype);
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& path, std::optional<DType> dtype) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kModelConfigBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.eof() && !file.good())
    return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kModelConfigBytesMax) {
    return WrongConfig(absl::StrCat(path, " has more than ", kModelConfigBytesMax,
                                    " bytes; a config.json of a model is smaller"));
  }
  absl::StatusOr<ModelConfig> config = ParseModelConfig(text, dtype);
  if (config.ok()) return config;
  return absl::Status(config.status().code(), absl::StrCat(path, ": ", config.status().message()));
}

}  // namespace attnd::ctl
