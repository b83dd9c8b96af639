// SPDX-License-Identifier: Apache-2.0
//
// KvFile: what lies where in a safetensors file that holds one sequence.
//
//   layers.N.k   [tokens, kv_heads, head_dim]    in the model's dtype, in token order
//   layers.N.v   [tokens, kv_heads, value_dim]; none if the model is latent
//   token_ids    [tokens] I64; -1: not known. Missing: none is.
//   __metadata__ attnd.format "1"; attnd.model and attnd.policy: attnd.v1.Model and Policy as JSON
//
// It names no tenant: whoever imports it owns it. Pure functions: no I/O.
#ifndef ATTND_CTL_KV_FILE_H_
#define ATTND_CTL_KV_FILE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "attnd/v1/types.pb.h"
#include "common/safetensors.h"
#include "engine/types.h"

namespace attnd::ctl {

struct KvFile {
  v1::Model model;
  v1::Policy policy;
  uint64_t tokens = 0;
  // Where each layer's tensors begin, behind the head; no values if the model is latent.
  std::vector<uint64_t> keys;
  std::vector<uint64_t> values;
  std::optional<uint64_t> token_ids;
  uint64_t key_row_bytes = 0;    // of one token, all KV heads
  uint64_t value_row_bytes = 0;  // 0 if the model is latent
  uint64_t data_bytes = 0;       // all that is behind the head

  uint64_t token_bytes() const {
    return model.shape().layers() * (key_row_bytes + value_row_bytes);
  }
};

// The file that shall hold a sequence, and its head; args has a policy. InvalidArgument if it would
// be too large.
absl::StatusOr<KvFile> PlanKvFile(const engine::OpenArgs& args, uint64_t tokens, bool has_ids);
// Internal if a text of the model's cannot be JSON.
absl::StatusOr<SafetensorsHead> HeadOf(const KvFile& file);

// What a file's head says. InvalidArgument names what is missing or wrong; the model's shape, its
// tensors and their dtypes agree in what is returned.
absl::StatusOr<KvFile> ParseKvFile(const SafetensorsHead& head);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_KV_FILE_H_
