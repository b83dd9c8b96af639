// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/page_trace_file.h"

#include <fstream>

#include "absl/strings/str_cat.h"

namespace attnd::bench {
namespace {

constexpr uint64_t kMagic = 0x3252545044544e41;  // "ANTDPTR2"

// What a file starts with; the ranks follow, then the early ranks of each moment.
struct Header {
  uint64_t magic = kMagic;
  uint32_t tokens = 0;
  uint32_t layers = 0;
  uint32_t layer_pages = 0;
  uint32_t clusters = 0;
  uint32_t page_bytes = 0;
  uint32_t padding = 0;
};
static_assert(sizeof(Header) == 32);
static_assert(sizeof(PageRank) == sizeof(EarlyRank));

// Of the three sizes, or more than any trace may have.
uint64_t Ranks(const Header& header) {
  const uint64_t steps = uint64_t{header.tokens} * header.layers;
  if (steps > kTraceRanksMax) return kTraceRanksMax + 1;
  return steps * header.layer_pages;
}

void WriteRanks(const std::vector<uint16_t>& ranks, std::ofstream* file) {
  file->write(reinterpret_cast<const char*>(ranks.data()),
              static_cast<std::streamsize>(ranks.size() * sizeof(ranks[0])));
}

void ReadRanks(uint64_t count, std::ifstream* file, std::vector<uint16_t>* ranks) {
  ranks->resize(count);
  file->read(reinterpret_cast<char*>(ranks->data()),
             static_cast<std::streamsize>(count * sizeof((*ranks)[0])));
}

}  // namespace

absl::Status WritePageTrace(const std::string& path, const PageTrace& trace) {
  std::ofstream file(path, std::ios::binary);
  const Header header{
      kMagic, trace.tokens, trace.layers, trace.layer_pages, trace.clusters, trace.page_bytes, 0};
  file.write(reinterpret_cast<const char*>(&header), sizeof(header));
  WriteRanks(trace.ranks, &file);
  for (const auto& early : trace.early) WriteRanks(early, &file);
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
  PageTrace trace{
      header.tokens, header.layers, header.layer_pages, header.clusters, header.page_bytes, {}, {}};
  ReadRanks(ranks, &file, &trace.ranks);
  for (auto& early : trace.early) ReadRanks(ranks, &file, &early);
  if (!file) return absl::DataLossError(absl::StrCat(path, " ends early"));
  return trace;
}

}  // namespace attnd::bench
