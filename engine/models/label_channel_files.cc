// SPDX-License-Identifier: Apache-2.0
#include "engine/models/label_channel_files.h"

#include <span>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "attention/segment/index_set.h"
#include "common/status.h"
#include "engine/models/safetensors_file.h"

namespace attnd::engine {
namespace {

constexpr char kTensor[] = "channels";

absl::StatusOr<uint32_t> ReadHeadDim(const SafetensorsFile& file) {
  ATTND_ASSIGN_OR_RETURN(const std::string text, file.Metadata("head_dim"));
  uint32_t head_dim = 0;
  if (absl::SimpleAtoi(text, &head_dim) && head_dim >= 1 && head_dim <= kHeadDimMax) {
    return head_dim;
  }
  return WrongPart("metadata head_dim",
                   absl::StrCat("is \"", text.substr(0, 64), "\"; allowed are 1..", kHeadDimMax));
}

absl::Status CheckExtent(const char* what, uint64_t extent, uint64_t max) {
  if (extent >= 1 && extent <= max) return absl::OkStatus();
  return WrongPart(kTensor, absl::StrCat("has ", extent, " ", what, "; allowed are 1..", max));
}

// One head's, ascending and below head_dim.
absl::Status CheckChannels(std::span<const int64_t> channels, uint32_t head_dim) {
  int64_t before = -1;
  for (const int64_t channel : channels) {
    if (channel <= before || channel >= int64_t{head_dim}) {
      return WrongPart(kTensor, absl::StrCat("has ", channel, " behind ", before,
                                             "; allowed are ascending channels from 0 on, below "
                                             "head_dim ",
                                             head_dim));
    }
    before = channel;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> ReadChannels(const SafetensorsFile& file,
                                                  ModelLabelChannels* model) {
  ATTND_ASSIGN_OR_RETURN(const auto shape, file.Shape(kTensor, 3));
  ATTND_RETURN_IF_ERROR(CheckExtent("layers", shape[0], kLayersMax));
  ATTND_RETURN_IF_ERROR(CheckExtent("KV heads", shape[1], kHeadsMax));
  ATTND_RETURN_IF_ERROR(CheckExtent("channels a head", shape[2], model->head_dim));
  model->layers = static_cast<uint32_t>(shape[0]);
  model->kv_heads = static_cast<uint32_t>(shape[1]);
  model->channels = static_cast<uint32_t>(shape[2]);
  std::vector<int64_t> values;
  ATTND_RETURN_IF_ERROR(file.Read(kTensor, "I64", shape, &values));
  for (size_t head = 0; head < values.size() / model->channels; ++head) {
    const auto of_head = std::span(values).subspan(head * model->channels, model->channels);
    ATTND_RETURN_IF_ERROR(CheckChannels(of_head, model->head_dim));
  }
  return values;
}

}  // namespace

absl::Status ModelLabelChannels::CheckShape(const ModelShape& shape) const {
  const uint32_t wanted = attention::LabelChannels(shape);
  if (shape.layers == layers && shape.kv_heads == kv_heads && shape.head_dim == head_dim &&
      wanted == channels) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the server's label channels are of ", layers, " layers, ", kv_heads,
      " KV heads and head_dim ", head_dim, ", ", channels, " a head; the model has ", shape.layers,
      ", ", shape.kv_heads, " and ", shape.head_dim, ", and labels of ", wanted, " channels"));
}

absl::StatusOr<LabelChannelFile> DecodeLabelChannels(absl::string_view bytes) {
  ATTND_ASSIGN_OR_RETURN(const SafetensorsFile content,
                         SafetensorsFile::Decode(bytes, kLabelChannelFormat));
  LabelChannelFile file;
  ATTND_ASSIGN_OR_RETURN(file.fingerprint, content.Metadata("fingerprint"));
  auto model = std::make_shared<ModelLabelChannels>();
  ATTND_ASSIGN_OR_RETURN(model->head_dim, ReadHeadDim(content));
  ATTND_ASSIGN_OR_RETURN(const auto values, ReadChannels(content, model.get()));
  const absl::string_view raw(reinterpret_cast<const char*>(values.data()),
                              values.size() * sizeof(values[0]));
  ATTND_ASSIGN_OR_RETURN(model->identity, Sha256(raw));
  auto choice = std::make_shared<attention::LabelChoice>();
  choice->channels.assign(values.begin(), values.end());  // below kHeadDimMax, each of them
  model->choice = std::move(choice);
  file.model = std::move(model);
  return file;
}

absl::StatusOr<LabelChannelStore> LabelChannelStore::Load(const std::vector<std::string>& paths) {
  LabelChannelStore store;
  const auto take = [&](absl::string_view bytes) -> absl::Status {
    ATTND_ASSIGN_OR_RETURN(LabelChannelFile file, DecodeLabelChannels(bytes));
    if (store.models_.emplace(file.fingerprint, std::move(file.model)).second) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError("another file is of the same model");
  };
  ATTND_RETURN_IF_ERROR(ReadModelFiles("label_channels", paths, kLabelChannelFileBytesMax, take));
  return store;
}

std::shared_ptr<const ModelLabelChannels> LabelChannelStore::Of(
    absl::string_view fingerprint) const {
  const auto found = models_.find(fingerprint);
  return found == models_.end() ? nullptr : found->second;
}

}  // namespace attnd::engine
