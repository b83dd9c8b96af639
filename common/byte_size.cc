// SPDX-License-Identifier: Apache-2.0
#include "common/byte_size.h"

#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace attnd {

bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error) {
  constexpr std::pair<absl::string_view, int> kUnits[] = {
      {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  int shift = 0;
  for (const auto& [unit, bits] : kUnits) {
    if (absl::ConsumeSuffix(&text, unit)) {
      shift = bits;
      break;
    }
  }
  uint64_t number = 0;
  const bool digits =
      !text.empty() && text.find_first_not_of("0123456789") == absl::string_view::npos;
  if (!digits || !absl::SimpleAtoi(text, &number) ||
      number > std::numeric_limits<uint64_t>::max() >> shift) {
    *error = "allowed are bytes, or a whole number of KiB, MiB, GiB or TiB (12GiB)";
    return false;
  }
  size->bytes = number << shift;
  return true;
}

std::string AbslUnparseFlag(ByteSize size) { return absl::StrCat(size.bytes); }

}  // namespace attnd
