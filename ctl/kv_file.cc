// SPDX-License-Identifier: Apache-2.0
#include "ctl/kv_file.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/model_shape.h"
#include "common/status.h"
#include "google/protobuf/util/json_util.h"

namespace attnd::ctl {
namespace {

constexpr char kFormatKey[] = "attnd.format";
constexpr char kFormat[] = "1";
constexpr char kModelKey[] = "attnd.model";
constexpr char kPolicyKey[] = "attnd.policy";
constexpr char kTokenIds[] = "token_ids";
constexpr uint64_t kIdBytes = 8;
constexpr uint64_t kTokensMax = uint64_t{1} << 40;

std::string KeysName(uint32_t layer) { return absl::StrCat("layers.", layer, ".k"); }
std::string ValuesName(uint32_t layer) { return absl::StrCat("layers.", layer, ".v"); }

absl::Status Wrong(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("the file is no sequence of attnd's: ", what));
}

// Enumerations have the same numbers in the contract and in the engine.
static_assert(static_cast<int>(DType::kBf16) == v1::DTYPE_BF16);
static_assert(static_cast<int>(DType::kFp16) == v1::DTYPE_FP16);
static_assert(static_cast<int>(DType::kFp32) == v1::DTYPE_FP32);
static_assert(static_cast<int>(engine::Shard::Kind::kHeads) == v1::Shard::KIND_HEADS);
static_assert(static_cast<int>(engine::Shard::Kind::kContext) == v1::Shard::KIND_CONTEXT);

std::string DtypeName(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_BF16:
      return "BF16";
    case v1::DTYPE_FP16:
      return "F16";
    case v1::DTYPE_FP32:
      return "F32";
    default:
      return "";
  }
}

v1::Model ModelOf(const engine::OpenArgs& args) {
  v1::Model model;
  model.set_fingerprint(args.fingerprint);
  v1::ModelShape* const shape = model.mutable_shape();
  shape->set_layers(args.shape.layers);
  shape->set_query_heads(args.shape.query_heads);
  shape->set_kv_heads(args.shape.kv_heads);
  shape->set_head_dim(args.shape.head_dim);
  shape->set_value_dim(args.shape.value_dim);
  shape->set_dtype(static_cast<v1::DType>(args.shape.dtype));
  shape->set_softmax_scale(args.shape.softmax_scale);
  shape->set_latent(args.shape.latent);
  model.mutable_shard()->set_kind(static_cast<v1::Shard::Kind>(args.shard.kind));
  model.mutable_shard()->set_index(args.shard.index);
  model.mutable_shard()->set_count(args.shard.count);
  return model;
}

v1::Policy PolicyOf(const attention::Policy& from) {
  v1::Policy policy;
  policy.set_preset(from.preset);
  for (const auto& [name, value] : from.Parameters()) {
    (*policy.mutable_parameters())[name] = value;
  }
  return policy;
}

absl::StatusOr<std::string> JsonOf(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  if (status.ok()) return json;
  return absl::InternalError(absl::StrCat("no JSON: ", status.ToString()));
}

absl::Status FromMetadata(const SafetensorsHead& head, const char* key,
                          google::protobuf::Message* message) {
  const auto found = head.metadata.find(key);
  if (found == head.metadata.end()) return Wrong(absl::StrCat("its metadata lacks ", key));
  const auto status = google::protobuf::util::JsonStringToMessage(found->second, message);
  if (status.ok()) return absl::OkStatus();
  return Wrong(absl::StrCat(key, ": ", std::string(status.message())));
}

// Checks the shape before anything is multiplied by it; what is 0 gets its default.
absl::Status CheckShape(v1::ModelShape* from) {
  if (DtypeName(from->dtype()).empty()) return Wrong("its model has no known dtype");
  if (from->value_dim() == 0) from->set_value_dim(from->head_dim());
  ModelShape shape;
  shape.layers = from->layers();
  shape.query_heads = from->query_heads();
  shape.kv_heads = from->kv_heads();
  shape.head_dim = from->head_dim();
  shape.value_dim = from->value_dim();
  shape.dtype = static_cast<DType>(from->dtype());
  shape.latent = from->latent();
  shape.softmax_scale = from->softmax_scale() == 0 ? 1 : from->softmax_scale();
  const absl::Status valid = shape.Validate();
  return valid.ok() ? valid : Wrong(valid.message());
}

// Of a shape that was checked: no overflow.
void SetRowBytes(KvFile* file) {
  const v1::ModelShape& shape = file->model.shape();
  const uint64_t head_bytes =
      uint64_t{shape.kv_heads()} * DTypeBytes(static_cast<DType>(shape.dtype()));
  file->key_row_bytes = head_bytes * shape.head_dim();
  file->value_row_bytes = shape.latent() ? 0 : head_bytes * shape.value_dim();
}

absl::StatusOr<uint64_t> FindTensor(const SafetensorsHead& head, const std::string& name,
                                    const std::string& dtype, const std::vector<uint64_t>& shape) {
  const auto found = head.tensors.find(name);
  if (found == head.tensors.end()) return Wrong(absl::StrCat("there is no tensor ", name));
  if (found->second.dtype != dtype || found->second.shape != shape) {
    return Wrong(absl::StrCat("tensor ", name, " has another dtype or shape than its model gives"));
  }
  return found->second.begin;
}

// Values that a latent model's file holds nevertheless would be lost.
absl::Status CheckNoValues(const SafetensorsHead& head, uint32_t layer) {
  if (head.tensors.count(ValuesName(layer)) == 0) return absl::OkStatus();
  return Wrong(absl::StrCat("there is a tensor ", ValuesName(layer), ", but its model is latent"));
}

}  // namespace

absl::StatusOr<KvFile> PlanKvFile(const engine::OpenArgs& args, uint64_t tokens, bool has_ids) {
  KvFile file;
  file.model = ModelOf(args);
  file.policy = PolicyOf(args.policy.value());
  file.tokens = tokens;
  SetRowBytes(&file);
  // No overflow: a token has at most 2^10 layers of 2^23 bytes, and 8 for its id.
  if (tokens > kTokensMax || tokens > kTensorBytesMax / (file.token_bytes() + kIdBytes)) {
    return absl::InvalidArgumentError(absl::StrCat("a sequence of ", tokens, " tokens of ",
                                                   file.token_bytes(), " bytes; a file may have ",
                                                   kTensorBytesMax, " bytes"));
  }
  for (uint32_t layer = 0; layer < args.shape.layers; ++layer) {
    file.keys.push_back(file.data_bytes);
    file.data_bytes += tokens * file.key_row_bytes;
    if (args.shape.latent) continue;
    file.values.push_back(file.data_bytes);
    file.data_bytes += tokens * file.value_row_bytes;
  }
  if (has_ids) {
    file.token_ids = file.data_bytes;
    file.data_bytes += tokens * kIdBytes;
  }
  return file;
}

absl::StatusOr<SafetensorsHead> HeadOf(const KvFile& file) {
  const v1::ModelShape& shape = file.model.shape();
  const std::string dtype = DtypeName(shape.dtype());
  SafetensorsHead head;
  head.metadata.emplace(kFormatKey, kFormat);
  ATTND_ASSIGN_OR_RETURN(head.metadata[kModelKey], JsonOf(file.model));
  ATTND_ASSIGN_OR_RETURN(head.metadata[kPolicyKey], JsonOf(file.policy));
  for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
    const uint64_t keys = file.keys[layer];
    head.tensors[KeysName(layer)] = {dtype,
                                     {file.tokens, shape.kv_heads(), shape.head_dim()},
                                     keys,
                                     keys + file.tokens * file.key_row_bytes};
    if (shape.latent()) continue;
    const uint64_t values = file.values[layer];
    head.tensors[ValuesName(layer)] = {dtype,
                                       {file.tokens, shape.kv_heads(), shape.value_dim()},
                                       values,
                                       values + file.tokens * file.value_row_bytes};
  }
  if (file.token_ids.has_value()) {
    head.tensors[kTokenIds] = {
        "I64", {file.tokens}, *file.token_ids, *file.token_ids + file.tokens * kIdBytes};
  }
  return head;
}

absl::StatusOr<KvFile> ParseKvFile(const SafetensorsHead& head) {
  const auto format = head.metadata.find(kFormatKey);
  if (format == head.metadata.end() || format->second != kFormat) {
    return Wrong(absl::StrCat("its metadata does not say ", kFormatKey, " ", kFormat));
  }
  KvFile file;
  ATTND_RETURN_IF_ERROR(FromMetadata(head, kModelKey, &file.model));
  ATTND_RETURN_IF_ERROR(FromMetadata(head, kPolicyKey, &file.policy));
  ATTND_RETURN_IF_ERROR(CheckShape(file.model.mutable_shape()));
  SetRowBytes(&file);
  const v1::ModelShape& shape = file.model.shape();
  const auto first = head.tensors.find(KeysName(0));
  if (first != head.tensors.end() && !first->second.shape.empty()) {
    file.tokens = first->second.shape[0];
  }
  if (file.tokens == 0) return Wrong("it holds no tokens");
  for (uint32_t layer = 0; layer < shape.layers(); ++layer) {
    ATTND_ASSIGN_OR_RETURN(const uint64_t keys,
                           FindTensor(head, KeysName(layer), DtypeName(shape.dtype()),
                                      {file.tokens, shape.kv_heads(), shape.head_dim()}));
    file.keys.push_back(keys);
    if (shape.latent()) {
      ATTND_RETURN_IF_ERROR(CheckNoValues(head, layer));
      continue;
    }
    ATTND_ASSIGN_OR_RETURN(const uint64_t values,
                           FindTensor(head, ValuesName(layer), DtypeName(shape.dtype()),
                                      {file.tokens, shape.kv_heads(), shape.value_dim()}));
    file.values.push_back(values);
  }
  if (head.tensors.count(kTokenIds) != 0) {
    ATTND_ASSIGN_OR_RETURN(file.token_ids, FindTensor(head, kTokenIds, "I64", {file.tokens}));
  }
  for (const auto& [name, entry] : head.tensors) {
    file.data_bytes = std::max(file.data_bytes, entry.end);
  }
  return file;
}

}  // namespace attnd::ctl
