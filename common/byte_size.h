// SPDX-License-Identifier: Apache-2.0
//
// ByteSize: a number of bytes on the command line, "12GiB" as well as "12884901888".
#ifndef ATTND_COMMON_BYTE_SIZE_H_
#define ATTND_COMMON_BYTE_SIZE_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace attnd {

struct ByteSize {
  uint64_t bytes = 0;
};

// For absl's flags. `error` says what is allowed.
bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error);
// The number alone.
std::string AbslUnparseFlag(ByteSize size);

}  // namespace attnd

#endif  // ATTND_COMMON_BYTE_SIZE_H_
