// SPDX-License-Identifier: Apache-2.0
#include "attention/segment/tree_sizes.h"

#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"

namespace attnd::attention {
namespace {

absl::Status CheckSize(const char* field, uint32_t size, std::span<const uint32_t> allowed) {
  std::vector<uint32_t> ascending(allowed.begin(), allowed.end());
  std::ranges::sort(ascending);
  if (std::ranges::binary_search(ascending, size)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tree.", field, " is ", size, "; allowed are ", absl::StrJoin(ascending, ", ")));
}

}  // namespace

absl::Status TreeSizes::Validate() const {
  ATTND_RETURN_IF_ERROR(CheckSize("leaf_tokens", leaf_tokens, kLeafTokens));
  ATTND_RETURN_IF_ERROR(CheckSize("fan", fan, kFans));
  return CheckSize("levels", levels, kLevels);
}

}  // namespace attnd::attention
