// SPDX-License-Identifier: Apache-2.0
#include "engine/archive/private_paths.h"

#include <cstdint>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace attnd::engine {
namespace {

constexpr absl::string_view kSegments = "/segments/";
constexpr absl::string_view kSuffix = ".seg";

bool IsOfPath(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '/' || c == '.' || c == '_' ||
         c == '-';
}

// path: of something below the root, without the root.
std::string NameFor(absl::string_view path) {
  const size_t begin = path.rfind('/') + 1, end = path.find(kSuffix);
  uint64_t number = 0;
  if (absl::StartsWith(path, kSegments) && end != absl::string_view::npos && begin < end &&
      absl::SimpleHexAtoi(path.substr(begin, end - begin), &number)) {
    return absl::StrCat("segment file ", number);
  }
  return "the data folder";
}

}  // namespace

absl::Status LostPositions(uint64_t first, uint64_t tokens, const absl::Status& why) {
  return absl::DataLossError(absl::StrCat("the keys and values of positions ", first, "..",
                                          first + tokens - 1, " are lost: ", why.message()));
}

absl::Status WithoutPaths(const absl::Status& status, absl::string_view root) {
  absl::string_view rest = status.message();
  std::string told;
  for (size_t at = rest.find(root); at != absl::string_view::npos; at = rest.find(root)) {
    absl::StrAppend(&told, rest.substr(0, at));
    rest.remove_prefix(at + root.size());
    size_t end = 0;
    while (end < rest.size() && IsOfPath(rest[end])) ++end;
    absl::StrAppend(&told, NameFor(rest.substr(0, end)));
    rest.remove_prefix(end);
  }
  absl::StrAppend(&told, rest);
  return absl::Status(status.code(), told);
}

}  // namespace attnd::engine
