// SPDX-License-Identifier: Apache-2.0
//
// The command line of attnctl: a command, its arguments, and the options that it knows.
#ifndef ATTND_CTL_COMMAND_LINE_H_
#define ATTND_CTL_COMMAND_LINE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace attnd::ctl {

struct CommandLine {
  std::string command;                 // one of UsageText's, or "help"
  std::vector<std::string> arguments;  // as many as the command takes
  std::vector<uint64_t> ids;           // those of them that are ids
  std::string data_dir;                // absolute; empty: not given
  std::string server;                  // the same
  std::optional<std::string> tenant;
  std::string out;
  uint64_t mib_per_s = 0;  // 0: no limit
  std::string model;       // path of a config.json
  std::string dtype;       // "bf16", "fp16", "fp32"; empty: as the model's file says
  std::string index;       // the name of an index; empty: the default
  uint64_t context = 0;    // tokens; 0: not given
  uint64_t generated = 0;  // tokens
  uint64_t sequences = 0;  // 0: not given
  uint64_t memory_bytes = 0;
  uint64_t page_memory_bytes = 0;
  uint64_t gpu_memory_bytes = 0;
  uint64_t gpu_page_memory_bytes = 0;
  bool segments = false;
  bool token_ids = false;
  bool all = false;
  bool no_seal = false;
  bool keep_open = false;
  bool orphans = false;
  bool json = false;
};

// arguments: without the program's name. InvalidArgument says what is wrong with the usage: an
// unknown command or option, one that the command does not know, one that is missing or has a wrong
// value, too many or too few arguments. Uses getopt_long: one thread at a time.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments);

std::string UsageText();

}  // namespace attnd::ctl

#endif  // ATTND_CTL_COMMAND_LINE_H_
