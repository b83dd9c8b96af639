// SPDX-License-Identifier: Apache-2.0
//
// ModelConfig: what a Hugging Face config.json says of a model's attention.
#ifndef ATTND_CTL_MODEL_CONFIG_H_
#define ATTND_CTL_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/dtype.h"
#include "common/model_shape.h"

namespace attnd::ctl {

struct ModelConfig {
  std::string model_type;  // as the file says; may be empty
  ModelShape shape;        // valid; of the whole model as one shard
};

// A larger file is no config.json.
inline constexpr uint64_t kModelConfigBytesMax = uint64_t{1} << 20;

// Reads the text of a config.json: of a model with KV heads (Llama, Mistral, Qwen3), or with
// kv_lora_rank (DeepSeek-V3), whose KV head is the latent vector with the rotated part of the key.
// The entries may lie in text_config. dtype: in place of what the text says, which is bf16 if it
// says nothing. InvalidArgument names the field, what it is and what is allowed.
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view json, std::optional<DType> dtype);

// The same of a file; errors begin with its path. NotFound, or InvalidArgument for a file beyond
// kModelConfigBytesMax.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& path, std::optional<DType> dtype);

// "bf16", "fp16", "fp32"; nothing for other texts.
std::optional<DType> DTypeOf(absl::string_view name);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_MODEL_CONFIG_H_
