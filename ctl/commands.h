// SPDX-License-Identifier: Apache-2.0
//
// attnctl's commands: from a command line to a report.
#ifndef ATTND_CTL_COMMANDS_H_
#define ATTND_CTL_COMMANDS_H_

#include "absl/status/statusor.h"
#include "ctl/command_line.h"
#include "ctl/report.h"

namespace attnd::ctl {

struct Outcome {
  Value report;
  bool wrong = false;  // the command did its work, and found something
};

// Any command but "help". Errors: whatever the command met.
absl::StatusOr<Outcome> RunCommand(const CommandLine& line);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_COMMANDS_H_
