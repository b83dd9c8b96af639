// SPDX-License-Identifier: Apache-2.0
#include "engine/feature_map_files.h"

#include <openssl/evp.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checked_math.h"
#include "common/safetensors.h"
#include "common/status.h"

namespace attnd::engine {
namespace {

static_assert(std::endian::native == std::endian::little);

using attention::FeatureMapParts;
using attention::FeatureMapSide;

absl::Status Wrong(absl::string_view name, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(name, " ", what));
}

absl::StatusOr<std::string> Sha256(absl::string_view bytes) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  if (EVP_Digest(bytes.data(), bytes.size(), digest, &size, EVP_sha256(), nullptr) != 1) {
    return absl::InternalError("OpenSSL's SHA-256 failed");
  }
  return std::string(reinterpret_cast<const char*>(digest), size);
}

// The tensors of one file.
class Tensors {
 public:
  Tensors(const SafetensorsHead& head, absl::string_view data) : head_(head), data_(data) {}

  // A tensor of that many extents.
  absl::StatusOr<std::vector<uint64_t>> Shape(const std::string& name, size_t extents) const {
    const auto found = head_.tensors.find(name);
    if (found == head_.tensors.end()) return Wrong(name, "is missing");
    if (found->second.shape.size() == extents) return found->second.shape;
    return Wrong(name, absl::StrCat("has the shape [", absl::StrJoin(found->second.shape, ", "),
                                    "]; allowed are ", extents, " extents"));
  }

  template <typename T>
  absl::Status Read(const std::string& name, absl::string_view dtype,
                    const std::vector<uint64_t>& shape, std::vector<T>* out) const {
    const auto found = head_.tensors.find(name);
    if (found == head_.tensors.end()) return Wrong(name, "is missing");
    const TensorEntry& entry = found->second;
    if (entry.dtype != dtype || entry.shape != shape) {
      return Wrong(name,
                   absl::StrCat("is ", entry.dtype, " [", absl::StrJoin(entry.shape, ", "),
                                "]; allowed is ", dtype, " [", absl::StrJoin(shape, ", "), "]"));
    }
    // DecodeHead has compared bytes and shape, and both with the file's size.
    out->resize(entry.bytes() / sizeof(T));
    std::memcpy(out->data(), data_.data() + entry.begin, entry.bytes());
    return absl::OkStatus();
  }

 private:
  const SafetensorsHead& head_;
  const absl::string_view data_;
};

absl::Status ReadSide(const Tensors& tensors, const std::string& side, uint64_t heads,
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

absl::StatusOr<FeatureMapParts> DecodeParts(const Tensors& tensors) {
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
    if (head != 0 && head != 1) return Wrong("completed", "has entries other than 0 and 1");
    parts.completed.push_back(head != 0 ? 1 : 0);
  }
  return parts;
}

absl::StatusOr<std::string> MetadataOf(const SafetensorsHead& head, const std::string& name) {
  const auto found = head.metadata.find(name);
  if (found != head.metadata.end() && !found->second.empty()) return found->second;
  return Wrong(absl::StrCat("metadata ", name), "is missing");
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::error_code error;
  const uint64_t bytes = std::filesystem::file_size(path, error);
  if (error) return absl::InvalidArgumentError(error.message());
  if (bytes > kFeatureMapFileBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the file has ", bytes, " bytes; allowed are ", kFeatureMapFileBytesMax));
  }
  std::string content(bytes, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(content.data(), static_cast<std::streamsize>(bytes))) {
    return absl::InvalidArgumentError("the file cannot be read");
  }
  return content;
}

}  // namespace

absl::StatusOr<FeatureMapFile> DecodeFeatureMaps(absl::string_view bytes) {
  ATTND_ASSIGN_OR_RETURN(const uint64_t length, DecodeHeadLength(bytes, bytes.size()));
  const absl::string_view data = bytes.substr(kHeadLengthBytes + length);
  ATTND_ASSIGN_OR_RETURN(const SafetensorsHead head,
                         DecodeHead(bytes.substr(kHeadLengthBytes, length), data.size()));
  ATTND_ASSIGN_OR_RETURN(const std::string format, MetadataOf(head, "format"));
  if (format != kFeatureMapFormat) {
    return Wrong("metadata format",
                 absl::StrCat("is \"", format.substr(0, 64), "\"; allowed is ", kFeatureMapFormat));
  }
  FeatureMapFile file;
  ATTND_ASSIGN_OR_RETURN(file.fingerprint, MetadataOf(head, "fingerprint"));
  ATTND_ASSIGN_OR_RETURN(const std::string prefill, MetadataOf(head, "prefill_tokens"));
  uint64_t prefill_tokens = 0;
  if (!absl::SimpleAtoi(prefill, &prefill_tokens) || prefill_tokens == 0) {
    return Wrong("metadata prefill_tokens", "is no number above 0");
  }
  ATTND_ASSIGN_OR_RETURN(FeatureMapParts parts, DecodeParts(Tensors(head, data)));
  ATTND_ASSIGN_OR_RETURN(const std::string scale, MetadataOf(head, "softmax_scale"));
  if (!absl::SimpleAtof(scale, &parts.softmax_scale) || !(parts.softmax_scale > 0)) {
    return Wrong("metadata softmax_scale", "is no number above 0");
  }
  ATTND_ASSIGN_OR_RETURN(parts.identity, Sha256(bytes));
  ATTND_ASSIGN_OR_RETURN(file.maps, attention::FeatureMaps::Make(std::move(parts)));
  return file;
}

absl::StatusOr<FeatureMapStore> FeatureMapStore::Load(const std::vector<std::string>& paths) {
  if (paths.size() > kFeatureMapFilesMax) {
    return absl::InvalidArgumentError(absl::StrCat("feature_maps has ", paths.size(),
                                                   " files; allowed are 0..", kFeatureMapFilesMax));
  }
  FeatureMapStore store;
  for (const std::string& path : paths) {
    const auto wrong = [&](absl::string_view what) {
      return absl::InvalidArgumentError(absl::StrCat("feature_maps ", path, ": ", what));
    };
    const auto bytes = ReadFile(path);
    if (!bytes.ok()) return wrong(bytes.status().message());
    auto file = DecodeFeatureMaps(*bytes);
    if (!file.ok()) return wrong(file.status().message());
    if (!store.maps_.emplace(file->fingerprint, file->maps).second) {
      return wrong("another file is of the same model");
    }
  }
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
