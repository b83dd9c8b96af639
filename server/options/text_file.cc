// SPDX-License-Identifier: Apache-2.0
#include "server/options/text_file.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/io/zero_copy_stream_impl.h"
#include "google/protobuf/text_format.h"

namespace attnd::server {
namespace {

// The first error.
class ErrorText : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    if (!text.empty()) return;
    text = absl::StrCat("line ", line + 1, ", column ", column + 1, ": ", message);
  }
  std::string text;
};

}  // namespace

absl::Status ReadTextFile(const std::string& what, const std::string& path,
                          google::protobuf::Message* message) {
  const auto invalid = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(what, " ", path, ": ", why));
  };
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return invalid(std::strerror(errno));
  google::protobuf::io::FileInputStream stream(fd);
  stream.SetCloseOnDelete(true);
  google::protobuf::io::LimitingInputStream limited(&stream, kTextFileBytesMax + 1);
  ErrorText errors;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  const bool parsed = parser.Parse(&limited, message);
  if (limited.ByteCount() > kTextFileBytesMax) {
    return invalid(absl::StrCat("has more than ", kTextFileBytesMax, " bytes"));
  }
  if (stream.GetErrno() != 0) return invalid(std::strerror(stream.GetErrno()));
  return parsed ? absl::OkStatus() : invalid(errors.text);
}

}  // namespace attnd::server
