// SPDX-License-Identifier: Apache-2.0
#include "ctl/catalogue_contents.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::ctl {

using storage::ChainId;
using storage::SegmentRecord;
using storage::SequenceRecord;

absl::StatusOr<CatalogueContents> CatalogueContents::Read(const std::string& folder) {
  ATTND_ASSIGN_OR_RETURN(const auto catalogue,
                         storage::Catalogue::Open(folder, storage::Catalogue::Mode::kReadOnly));
  CatalogueContents contents;
  ATTND_RETURN_IF_ERROR(catalogue->ForEachSegment([&](const SegmentRecord& record) {
    contents.segments[record.chain] = record;
    return absl::OkStatus();
  }));
  ATTND_RETURN_IF_ERROR(catalogue->ForEachSequence([&](const SequenceRecord& record) {
    contents.sequences[record.id] = record;
    return absl::OkStatus();
  }));
  return contents;
}

absl::StatusOr<SequenceRecord> CatalogueContents::Find(uint64_t sealed_id) const {
  const auto found = sequences.find(sealed_id);
  if (found != sequences.end()) return found->second;
  return absl::NotFoundError(absl::StrCat("sealed sequence ", sealed_id, " is unknown"));
}

absl::StatusOr<std::vector<SegmentRecord>> CatalogueContents::ChainOf(const ChainId& last) const {
  std::vector<SegmentRecord> chain;
  for (ChainId name = last; name != kNoChain;) {
    const auto found = segments.find(name);
    if (found == segments.end()) {
      return absl::DataLossError(
          absl::StrCat("segment ", ChainText(name), " of it is not in the catalogue"));
    }
    const SegmentRecord& record = found->second;
    const bool in_order =
        chain.empty() || record.first_position + record.tokens == chain.back().first_position;
    // A segment without tokens could stand before itself.
    if (!in_order || record.tokens == 0 ||
        (record.parent == kNoChain) != (record.first_position == 0)) {
      return absl::DataLossError(
          absl::StrCat("segment ", ChainText(name), " does not stand before the one behind it"));
    }
    name = record.parent;
    chain.push_back(record);
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

std::string ChainText(const ChainId& chain) {
  if (chain == kNoChain) return "-";
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(chain.data()), chain.size()));
}

}  // namespace attnd::ctl
