// SPDX-License-Identifier: Apache-2.0
//
// Chain ids: names of segments, made from their contents (docs/DESIGN.md, "Idea 2"). Two sequences
// whose tenant, model and tokens are the same up to a segment's end share that segment. Nobody
// without the data folder's secret can make or guess a name.
#ifndef ATTND_ENGINE_ARCHIVE_CHAIN_H_
#define ATTND_ENGINE_ARCHIVE_CHAIN_H_

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/types.h"
#include "storage/catalogue/data_folder.h"
#include "storage/files/segment_file.h"

namespace attnd::engine {

// The parent of a chain's first segment.
inline constexpr storage::ChainId kNoChain{};

// One segment of a chain.
struct ChainLink {
  storage::ChainId parent = kNoChain;  // name of the segment before it
  uint64_t first_position = 0;
  uint32_t unclustered = 0;
  std::span<const uint32_t> token_ids;  // of all tokens of the segment
};

// The chains of one tenant and model. Constant: safe from any thread.
class ChainNames {
 public:
  ChainNames(const storage::Secret& secret, absl::string_view tenant, const OpenArgs& args);

  // HMAC-SHA256 under the secret. Internal if OpenSSL fails.
  absl::StatusOr<storage::ChainId> NameOf(const ChainLink& link) const;
  // A name for a segment whose token ids are not all known: only its own sequence finds the
  // segment.
  static absl::StatusOr<storage::ChainId> RandomName();

 private:
  const storage::Secret secret_;
  const std::string owner_;  // tenant and model, encoded so that no other owner has the same bytes
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_CHAIN_H_
