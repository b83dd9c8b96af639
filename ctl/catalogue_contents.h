// SPDX-License-Identifier: Apache-2.0
//
// CatalogueContents: all that a catalogue says at one moment, in memory.
#ifndef ATTND_CTL_CATALOGUE_CONTENTS_H_
#define ATTND_CTL_CATALOGUE_CONTENTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/catalogue/catalogue.h"
#include "storage/files/segment_file.h"

namespace attnd::ctl {

inline constexpr storage::ChainId kNoChain{};

// Constant: safe from any thread.
struct CatalogueContents {
  std::map<storage::ChainId, storage::SegmentRecord> segments;
  std::map<uint64_t, storage::SequenceRecord> sequences;

  // Takes no lock and writes nothing: safe beside a running server. NotFound if there is no
  // catalogue; errors otherwise as Catalogue's.
  static absl::StatusOr<CatalogueContents> Read(const std::string& folder);

  // NotFound.
  absl::StatusOr<storage::SequenceRecord> Find(uint64_t sealed_id) const;
  // The segments of a chain, first one first. DataLoss says where it breaks: a segment without a
  // record, or segments that do not follow one another.
  absl::StatusOr<std::vector<storage::SegmentRecord>> ChainOf(const storage::ChainId& last) const;
};

// A chain id in hexadecimal digits; "-" for none.
std::string ChainText(const storage::ChainId& chain);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_CATALOGUE_CONTENTS_H_
