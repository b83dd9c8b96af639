// SPDX-License-Identifier: Apache-2.0
#include "engine/models/feature_map_files.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/models/safetensors_file.h"

namespace attnd::engine {
namespace {

using attention::FeatureMapParts;
using attention::FeatureMapSide;

absl::Status ReadSide(const SafetensorsFile& tensors, const std::string& side, uint64_t heads,
                      const FeatureMapParts& sizes, FeatureMapSide* out) {
  const uint64_t width = sizes.width, inner = sizes.inner, dim = sizes.head_dim;
  const auto read = [&](const char* part, std::vector<uint64_t> extents,
                        std::vector<float>* values) {
    std::vector<uint64_t> shape = {sizes.layers, heads};
    shape.insert(shape.end(), extents.begin(), extents.end());
    return tensors.Read(absl::StrCat(side, ".", part), "F32", shape, values);
  };
  ATTND_RETURN_IF_ERROR(read("stem.weight", {width, dim}, &out->stem_weight));
  ATTND_RETURN_IF_ERROR(read("stem.bias", {width}, &out->stem_bias));
  ATTND_RETURN_IF_ERROR(read("inner.weight", {inner, width}, &out->inner_weight));
  ATTND_RETURN_IF_ERROR(read("inner.bias", {inner}, &out->inner_bias));
  ATTND_RETURN_IF_ERROR(read("outer.weight", {width, inner}, &out->outer_weight));
  ATTND_RETURN_IF_ERROR(read("outer.bias", {width}, &out->outer_bias));
  ATTND_RETURN_IF_ERROR(read("alpha", {}, &out->alpha));
  ATTND_RETURN_IF_ERROR(read("output.weight", {dim, width}, &out->output_weight));
  return read("output.bias", {dim}, &out->output_bias);
}

// An extent that FeatureMaps::Make checks further.
uint32_t Narrow(uint64_t extent) {
  return extent > UINT32_MAX ? UINT32_MAX : static_cast<uint32_t>(extent);
}

absl::StatusOr<FeatureMapParts> DecodeParts(const SafetensorsFile& tensors) {
  FeatureMapParts parts;
  ATTND_ASSIGN_OR_RETURN(const auto stem, tensors.Shape("query.stem.weight", 4));
  ATTND_ASSIGN_OR_RETURN(const auto inner, tensors.Shape("query.inner.weight", 4));
  ATTND_ASSIGN_OR_RETURN(const auto keys, tensors.Shape("key.stem.weight", 4));
  parts.layers = Narrow(stem[0]);
  parts.query_heads = Narrow(stem[1]);
  parts.kv_heads = Narrow(keys[1]);
  parts.width = Narrow(stem[2]);
  parts.inner = Narrow(inner[2]);
  parts.head_dim = Narrow(stem[3]);
  ATTND_RETURN_IF_ERROR(ReadSide(tensors, "query", parts.query_heads, parts, &parts.query));
  ATTND_RETURN_IF_ERROR(ReadSide(tensors, "key", parts.kv_heads, parts, &parts.key));
  std::vector<int64_t> completed;
  ATTND_RETURN_IF_ERROR(
      tensors.Read("completed", "I64", {parts.layers, parts.query_heads}, &completed));
  for (const int64_t head : completed) {
    if (head != 0 && head != 1) return WrongPart("completed", "has entries other than 0 and 1");
    parts.completed.push_back(head != 0 ? 1 : 0);
  }
  return parts;
}

}  // namespace

absl::StatusOr<FeatureMapFile> DecodeFeatureMaps(absl::string_view bytes) {
  ATTND_ASSIGN_OR_RETURN(const SafetensorsFile content,
                         SafetensorsFile::Decode(bytes, kFeatureMapFormat));
  FeatureMapFile file;
  ATTND_ASSIGN_OR_RETURN(file.fingerprint, content.Metadata("fingerprint"));
  ATTND_ASSIGN_OR_RETURN(const std::string prefill, content.Metadata("prefill_tokens"));
  uint64_t prefill_tokens = 0;
  if (!absl::SimpleAtoi(prefill, &prefill_tokens) || prefill_tokens == 0) {
    return WrongPart("metadata prefill_tokens", "is no number above 0");
  }
  ATTND_ASSIGN_OR_RETURN(FeatureMapParts parts, DecodeParts(content));
  ATTND_ASSIGN_OR_RETURN(const std::string scale, content.Metadata("softmax_scale"));
  if (!absl::SimpleAtof(scale, &parts.softmax_scale) || !(parts.softmax_scale > 0)) {
    return WrongPart("metadata softmax_scale", "is no number above 0");
  }
  ATTND_ASSIGN_OR_RETURN(parts.identity, Sha256(bytes));
  ATTND_ASSIGN_OR_RETURN(file.maps, attention::FeatureMaps::Make(std::move(parts)));
  return file;
}

absl::StatusOr<FeatureMapStore> FeatureMapStore::Load(const std::vector<std::string>& paths) {
  FeatureMapStore store;
  const auto take = [&](absl::string_view bytes) -> absl::Status {
    ATTND_ASSIGN_OR_RETURN(FeatureMapFile file, DecodeFeatureMaps(bytes));
    if (store.maps_.emplace(file.fingerprint, std::move(file.maps)).second) return absl::OkStatus();
    return absl::InvalidArgumentError("another file is of the same model");
  };
  ATTND_RETURN_IF_ERROR(ReadModelFiles("feature_maps", paths, kFeatureMapFileBytesMax, take));
  return store;
}

absl::StatusOr<std::shared_ptr<const attention::FeatureMaps>> FeatureMapStore::Of(
    absl::string_view fingerprint) const {
  const auto found = maps_.find(fingerprint);
  if (found != maps_.end()) return found->second;
  return absl::FailedPreconditionError(
      "indexes have a summary, and the server has no feature maps for the model: start it with "
      "--feature-maps, a file made for model.fingerprint");
}

}  // namespace attnd::engine
