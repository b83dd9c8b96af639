// SPDX-License-Identifier: Apache-2.0
//
// The command line of attnd: flags over an optional configuration file over defaults.
#ifndef ATTND_SERVER_OPTIONS_COMMAND_LINE_H_
#define ATTND_SERVER_OPTIONS_COMMAND_LINE_H_

#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/options/options.h"

namespace attnd::server {

enum class Command { kServe, kProbe, kHelp, kVersion };

struct CommandLine {
  Command command = Command::kServe;
  std::string probe_address;  // of kProbe
  ServerOptions options;      // of kServe; Validate() passed
};

// Arguments as the flag library wants them, and which flags were given.
struct NormalisedArguments {
  std::vector<std::string> arguments;  // the program's name included
  std::set<std::string> given;         // names with underscores, without a "no" in front
};

// Names may be written with dashes or underscores; `--listen` and `--policy_file` may be repeated.
NormalisedArguments NormaliseArguments(const std::vector<std::string>& arguments);

// Parses the flags of this process: call it once. A flag that does not exist or whose value has the
// wrong type ends the process with a message and exit status 1, as the flag library does.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments);

// The text of `attnd --help`.
std::string HelpText();

}  // namespace attnd::server

#endif  // ATTND_SERVER_OPTIONS_COMMAND_LINE_H_
