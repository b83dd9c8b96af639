// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/page_trace_file.h"

#include <fstream>

#include "absl/strings/str_cat.h"

namespace attnd::bench {
namespace {

constexpr uint64_t kMagic = 0x3152545044544e41;  // "ANTDPTR1"

// What a file starts with; the ranks follow.
struct Header {
  uint64_t magic = kMagic;
  uint32_t tokens = 0;
  uint32_t layers = 0;
  uint32_t layer_pages = 0;
  uint32_t clusters = 0;
};

// Of the three sizes, or more than any trace may have.
uint64_t Ranks(const Header& header) {
  const uint64_t steps = uint64_t{header.tokens} * header.layers;
  if (steps > kTraceRanksMax) return kTraceRanksMax + 1;
  return steps * header.layer_pages;
}

}  // namespace

absl::Status WritePageTrace(const std::string& path, const PageTrace& trace) {
  std::ofstream file(path, std::ios::binary);
  const Header header{kMagic, trace.tokens, trace.layers, trace.layer_pages, trace.clusters};
  file.write(reinterpret_cast<const char*>(&header), sizeof(header));
  file.write(reinterpret_cast<const char*>(trace.ranks.data()),
             static_cast<std::streamsize>(trace.ranks.size() * sizeof(PageRank)));
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat(path, " cannot be written"));
  return absl::OkStatus();
}

absl::StatusOr<PageTrace> ReadPageTrace(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::UnavailableError(absl::StrCat(path, " cannot be read"));
  Header header;
  file.read(reinterpret_cast<char*>(&header), sizeof(header));
  if (!file || header.magic != kMagic) {
    return absl::DataLossError(absl::StrCat(path, " is no page trace"));
  }
  const uint64_t ranks = Ranks(header);
  if (ranks == 0 || ranks > kTraceRanksMax) {
    return absl::DataLossError(
        absl::StrCat(path, " claims ", ranks, " ranks, not within 1 .. ", kTraceRanksMax));
  }
  PageTrace trace{header.tokens, header.layers, header.layer_pages, header.clusters, {}};
  trace.ranks.resize(ranks);
  file.read(reinterpret_cast<char*>(trace.ranks.data()),
            static_cast<std::streamsize>(ranks * sizeof(PageRank)));
  if (!file) return absl::DataLossError(absl::StrCat(path, " ends early"));
  return trace;
}

}  // namespace attnd::bench
