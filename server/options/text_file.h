// SPDX-License-Identifier: Apache-2.0
//
// Files in protobuf text format.
#ifndef ATTND_SERVER_OPTIONS_TEXT_FILE_H_
#define ATTND_SERVER_OPTIONS_TEXT_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "google/protobuf/message.h"

namespace attnd::server {

inline constexpr int kTextFileBytesMax = 1 << 20;

// Reads a file of at most kTextFileBytesMax. InvalidArgument begins with `what` and the path, and
// names the line and the column of what does not parse.
absl::Status ReadTextFile(const std::string& what, const std::string& path,
                          google::protobuf::Message* message);

}  // namespace attnd::server

#endif  // ATTND_SERVER_OPTIONS_TEXT_FILE_H_
