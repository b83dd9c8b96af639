// SPDX-License-Identifier: Apache-2.0
//
// Files of feature maps (docs/POLICIES.md, "Retrieval with completion"): safetensors in F32, with
// tensors `query.*` and `key.*` ([layers, heads of a layer] and then as FeatureMapSide says),
// `completed` (I64, [layers, query_heads], 0 or 1), and metadata `format` (kFeatureMapFormat),
// `fingerprint` of the model, `softmax_scale` and `prefill_tokens`.
#ifndef ATTND_ENGINE_MODELS_FEATURE_MAP_FILES_H_
#define ATTND_ENGINE_MODELS_FEATURE_MAP_FILES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/completion/feature_maps.h"

namespace attnd::engine {

inline constexpr char kFeatureMapFormat[] = "attnd.feature_maps.1";
inline constexpr uint64_t kFeatureMapFileBytesMax = uint64_t{1} << 32;

struct FeatureMapFile {
  std::string fingerprint;                             // of the model
  std::shared_ptr<const attention::FeatureMaps> maps;  // identity: SHA-256 of the file
};

// bytes: a whole file. InvalidArgument names the tensor or the metadata, and what is allowed.
absl::StatusOr<FeatureMapFile> DecodeFeatureMaps(absl::string_view bytes);

// The maps of a server's models. Constant: safe from any thread.
class FeatureMapStore {
 public:
  // Reads at most kModelFilesMax files. InvalidArgument, naming the file, if a file cannot be read
  // or decoded, or if two files are of one model.
  static absl::StatusOr<FeatureMapStore> Load(const std::vector<std::string>& paths);

  // The maps of a model. FailedPrecondition if there are none.
  absl::StatusOr<std::shared_ptr<const attention::FeatureMaps>> Of(
      absl::string_view fingerprint) const;

 private:
  std::map<std::string, std::shared_ptr<const attention::FeatureMaps>, std::less<>> maps_;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_MODELS_FEATURE_MAP_FILES_H_
