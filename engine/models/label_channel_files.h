// SPDX-License-Identifier: Apache-2.0
//
// Files of label channels (docs/POLICIES.md, "Labels"): safetensors with a tensor `channels` (I64,
// [layers, kv_heads, channels], of each head ascending and below head_dim) and metadata `format`
// (kLabelChannelFormat), `fingerprint` of the model and `head_dim`.
#ifndef ATTND_ENGINE_MODELS_LABEL_CHANNEL_FILES_H_
#define ATTND_ENGINE_MODELS_LABEL_CHANNEL_FILES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/policy_state/label_choice.h"
#include "common/model_shape.h"

namespace attnd::engine {

inline constexpr char kLabelChannelFormat[] = "attnd.label_channels.1";
inline constexpr uint64_t kLabelChannelFileBytesMax = uint64_t{64} << 20;

// The channels of one model. Constant.
struct ModelLabelChannels {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t channels = 0;                                 // of each KV head
  std::shared_ptr<const attention::LabelChoice> choice;  // with channels, without magnitudes
  std::string identity;                                  // SHA-256 of the tensor

  // FailedPrecondition, naming both numbers, if the model has another number of layers or KV heads,
  // another head_dim, or labels of another number of channels (attention::LabelChannels).
  absl::Status CheckShape(const ModelShape& shape) const;
};

struct LabelChannelFile {
  std::string fingerprint;  // of the model
  std::shared_ptr<const ModelLabelChannels> model;
};

// bytes: a whole file. InvalidArgument names the tensor or the metadata, and what is allowed.
absl::StatusOr<LabelChannelFile> DecodeLabelChannels(absl::string_view bytes);

// The label channels of a server's models. Constant: safe from any thread.
class LabelChannelStore {
 public:
  // Reads at most kModelFilesMax files of at most kLabelChannelFileBytesMax bytes. InvalidArgument,
  // naming the file, if a file cannot be read or decoded, or if two files are of one model.
  static absl::StatusOr<LabelChannelStore> Load(const std::vector<std::string>& paths);

  // The channels of a model; null if there is no file of the model.
  std::shared_ptr<const ModelLabelChannels> Of(absl::string_view fingerprint) const;

 private:
  std::map<std::string, std::shared_ptr<const ModelLabelChannels>, std::less<>> models_;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_MODELS_LABEL_CHANNEL_FILES_H_
