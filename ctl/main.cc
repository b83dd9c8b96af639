// SPDX-License-Identifier: Apache-2.0
//
// attnctl: parse, run, print.
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ctl/command_line.h"
#include "ctl/commands.h"
#include "ctl/report.h"
#include "google/protobuf/stubs/logging.h"

namespace attnd::ctl {
namespace {

enum ExitStatus { kFine = 0, kFailed = 1, kWrongUsage = 2 };

// False if nobody could be told.
bool Print(const Value& report, bool json) {
  const auto text = json ? report.Json() : report.Text();
  if (!text.ok()) return false;
  return std::fputs(text->c_str(), stdout) >= 0 && std::fflush(stdout) == 0;
}

int Main(const std::vector<std::string>& arguments) {
  const auto line = ParseCommandLine(arguments);
  if (!line.ok()) {
    const std::string message(line.status().message());
    std::fprintf(stderr, "attnctl: %s\n`attnctl --help` says how it is used\n", message.c_str());
    return kWrongUsage;
  }
  if (line->command == "help") {
    return std::fputs(UsageText().c_str(), stdout) >= 0 ? kFine : kFailed;
  }
  const auto outcome = RunCommand(*line);
  if (outcome.ok()) {
    return Print(outcome->report, line->json) && !outcome->wrong ? kFine : kFailed;
  }
  const absl::Status& status = outcome.status();
  const std::string message(status.message());
  std::fprintf(stderr, "attnctl: %s\n", message.c_str());
  if (line->json) {
    Value error = Value::Object();
    error.Set("code", absl::StatusCodeToString(status.code())).Set("message", message);
    Print(Value::Object().Set("error", std::move(error)), true);
  }
  return kFailed;
}

}  // namespace
}  // namespace attnd::ctl

int main(int argc, char** argv) {
  // What a file has wrong is said by the command.
  google::protobuf::SetLogHandler(nullptr);
  return attnd::ctl::Main(std::vector<std::string>(argv + 1, argv + argc));
}
