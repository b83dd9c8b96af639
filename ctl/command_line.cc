// SPDX-License-Identifier: Apache-2.0
#include "ctl/command_line.h"

#include <getopt.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/byte_size.h"
#include "common/checked_math.h"
#include "common/status.h"

namespace attnd::ctl {
namespace {

constexpr uint64_t kMibPerSMax = 1u << 20;
constexpr size_t kManyArguments = 1u << 16;

// Letters that stand for options inside this file; getopt_long wants numbers.
enum Option : int {
  kDataDir = 'd',
  kServer = 's',
  kTenant = 't',
  kOut = 'o',
  kMibPerS = 'm',
  kSegments = 'S',
  kTokenIds = 'i',
  kAll = 'a',
  kNoSeal = 'n',
  kKeepOpen = 'k',
  kOrphans = 'O',
  kModel = 'M',
  kContext = 'c',
  kSequences = 'q',
  kGenerated = 'g',
  kDType = 'D',
  kIndex = 'x',
  kMemory = 'R',
  kPageMemory = 'P',
  kGpuMemory = 'G',
  kGpuPageMemory = 'H',
  kJson = 'j',
  kHelp = 'h',
};

constexpr std::array<option, 24> kOptions = {{
    {"data-dir", required_argument, nullptr, kDataDir},
    {"server", required_argument, nullptr, kServer},
    {"tenant", required_argument, nullptr, kTenant},
    {"out", required_argument, nullptr, kOut},
    {"mib-per-s", required_argument, nullptr, kMibPerS},
    {"segments", no_argument, nullptr, kSegments},
    {"token-ids", no_argument, nullptr, kTokenIds},
    {"all", no_argument, nullptr, kAll},
    {"no-seal", no_argument, nullptr, kNoSeal},
    {"keep-open", no_argument, nullptr, kKeepOpen},
    {"orphans", no_argument, nullptr, kOrphans},
    {"model", required_argument, nullptr, kModel},
    {"context", required_argument, nullptr, kContext},
    {"sequences", required_argument, nullptr, kSequences},
    {"generated", required_argument, nullptr, kGenerated},
    {"dtype", required_argument, nullptr, kDType},
    {"index", required_argument, nullptr, kIndex},
    {"memory", required_argument, nullptr, kMemory},
    {"page-memory", required_argument, nullptr, kPageMemory},
    {"gpu-memory", required_argument, nullptr, kGpuMemory},
    {"gpu-page-memory", required_argument, nullptr, kGpuPageMemory},
    {"json", no_argument, nullptr, kJson},
    {"help", no_argument, nullptr, kHelp},
    {nullptr, 0, nullptr, 0},
}};

struct Command {
  const char* name;
  const char* options;  // that it knows, besides kJson and kHelp
  size_t arguments_min;
  size_t arguments_max;
  bool ids;  // whether its arguments are ids
};

constexpr std::array<Command, 11> kCommands = {{
    {"list", "dstS", 0, 0, false},
    {"inspect", "di", 1, 1, false},
    {"verify", "dam", 0, kManyArguments, true},
    {"rebuild-catalogue", "dO", 0, 0, false},
    {"new-secret", "d", 0, 0, false},
    {"export", "do", 1, 1, true},
    {"seal", "st", 1, 1, true},
    {"drop", "st", 1, 1, true},
    {"import", "stnk", 1, 1, false},
    {"size", "MicqgDxRPGH", 0, 0, false},
    {"help", "", 0, 0, false},
}};

absl::Status Wrong(absl::string_view what) { return absl::InvalidArgumentError(what); }

const char* NameOf(int letter) {
  const auto found = std::find_if(kOptions.begin(), kOptions.end(),
                                  [&](const option& known) { return known.val == letter; });
  return found == kOptions.end() ? "" : found->name;
}

absl::Status TakeBytes(int letter, const std::string& value, uint64_t* bytes) {
  ByteSize size;
  std::string error;
  if (!AbslParseFlag(value, &size, &error) || size.bytes == 0) {
    return Wrong(absl::StrCat("--", NameOf(letter), " is '", value, "'; ",
                              error.empty() ? "allowed are bytes from 1 on" : error));
  }
  *bytes = size.bytes;
  return absl::OkStatus();
}

// A number of tokens or sequences; k means 1,024 of them.
absl::Status TakeCount(int letter, const std::string& value, uint64_t* count) {
  absl::string_view digits = value;
  const uint64_t unit = absl::ConsumeSuffix(&digits, "k") ? 1024 : 1;
  const bool only_digits =
      !digits.empty() && digits.find_first_not_of("0123456789") == absl::string_view::npos;
  uint64_t number = 0;
  const bool taken = only_digits && absl::SimpleAtoi(digits, &number);
  const auto product = CheckedProduct({number, unit});
  if (!taken || !product.has_value() || *product == 0) {
    return Wrong(absl::StrCat("--", NameOf(letter), " is '", value,
                              "'; allowed are numbers from 1 on; 128k is 131072"));
  }
  *count = *product;
  return absl::OkStatus();
}

// Those of `size`.
absl::Status TakeSizeOption(int letter, const std::string& value, CommandLine* line) {
  switch (letter) {
    case kModel:
      if (value.empty()) return Wrong("--model is empty");
      line->model = value;
      return absl::OkStatus();
    case kDType:
      line->dtype = value;
      return absl::OkStatus();
    case kIndex:
      line->index = value;
      return absl::OkStatus();
    case kContext:
      return TakeCount(letter, value, &line->context);
    case kGenerated:
      return TakeCount(letter, value, &line->generated);
    case kSequences:
      return TakeCount(letter, value, &line->sequences);
    case kMemory:
      return TakeBytes(letter, value, &line->memory_bytes);
    case kPageMemory:
      return TakeBytes(letter, value, &line->page_memory_bytes);
    case kGpuMemory:
      return TakeBytes(letter, value, &line->gpu_memory_bytes);
    default:
      return TakeBytes(letter, value, &line->gpu_page_memory_bytes);
  }
}

absl::Status TakeOption(int letter, const std::string& value, CommandLine* line) {
  switch (letter) {
    case kModel:
    case kContext:
    case kSequences:
    case kGenerated:
    case kDType:
    case kIndex:
    case kMemory:
    case kPageMemory:
    case kGpuMemory:
    case kGpuPageMemory:
      return TakeSizeOption(letter, value, line);
    case kDataDir:
      if (value.empty()) return Wrong("--data-dir is empty");
      line->data_dir = std::filesystem::absolute(value).lexically_normal().string();
      break;
    case kServer:
      if (value.empty()) return Wrong("--server is empty");
      line->server = value;
      break;
    case kTenant:
      line->tenant = value;
      break;
    case kOut:
      line->out = value;
      break;
    case kMibPerS:
      if (!absl::SimpleAtoi(value, &line->mib_per_s) || line->mib_per_s < 1 ||
          line->mib_per_s > kMibPerSMax) {
        return Wrong(absl::StrCat("--mib-per-s is '", value, "'; allowed are 1..", kMibPerSMax));
      }
      break;
    case kSegments:
      line->segments = true;
      break;
    case kTokenIds:
      line->token_ids = true;
      break;
    case kAll:
      line->all = true;
      break;
    case kNoSeal:
      line->no_seal = true;
      break;
    case kKeepOpen:
      line->keep_open = true;
      break;
    case kOrphans:
      line->orphans = true;
      break;
    case kJson:
      line->json = true;
      break;
    default:
      line->command = "help";
  }
  return absl::OkStatus();
}

// Options into `line`; what is none of them, and which were given.
struct Parsed {
  std::vector<std::string> words;
  std::string given;
};

absl::StatusOr<Parsed> TakeOptions(std::vector<std::string> arguments, CommandLine* line) {
  arguments.insert(arguments.begin(), "attnctl");
  std::vector<char*> pointers;
  pointers.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  const auto count = static_cast<int>(arguments.size());
  Parsed parsed;
  optind = 0;  // from the beginning, whatever was parsed before
  opterr = 0;
  while (true) {
    const int letter = getopt_long(count, pointers.data(), ":", kOptions.data(), nullptr);
    if (letter == -1) break;
    const std::string argument = pointers[static_cast<size_t>(optind) - 1];
    if (letter == '?') return Wrong(absl::StrCat("'", argument, "' is no option"));
    if (letter == ':') return Wrong(absl::StrCat("'", argument, "' wants a value"));
    parsed.given.push_back(static_cast<char>(letter));
    ATTND_RETURN_IF_ERROR(TakeOption(letter, optarg == nullptr ? "" : optarg, line));
  }
  for (int i = optind; i < count; ++i) parsed.words.emplace_back(pointers[static_cast<size_t>(i)]);
  return parsed;
}

absl::Status TakeIds(CommandLine* line) {
  for (const std::string& argument : line->arguments) {
    uint64_t id = 0;
    if (!absl::SimpleAtoi(argument, &id) || id == 0) {
      return Wrong(absl::StrCat("'", argument, "' is no id; ids are numbers from 1 on"));
    }
    line->ids.push_back(id);
  }
  return absl::OkStatus();
}

// What the table cannot say.
absl::Status CheckTogether(const CommandLine& line) {
  const std::string& command = line.command;
  const bool takes_server = command == "seal" || command == "drop" || command == "import";
  const bool takes_folder = command == "verify" || command == "rebuild-catalogue" ||
                            command == "new-secret" || command == "export";
  if (takes_server && line.server.empty()) return Wrong(command + " wants --server");
  if (takes_folder && line.data_dir.empty()) return Wrong(command + " wants --data-dir");
  if (command == "list" && line.server.empty() == line.data_dir.empty()) {
    return Wrong("list wants either --data-dir or --server");
  }
  if (!line.server.empty() && line.segments) return Wrong("--segments wants --data-dir");
  if (command == "export" && line.out.empty()) return Wrong("export wants --out");
  if (command == "verify" && line.all && !line.ids.empty()) {
    return Wrong("verify wants either --all or ids");
  }
  if (command == "size") {
    if (line.model.empty()) return Wrong("size wants --model");
    if (line.context == 0) return Wrong("size wants --context");
    if (line.sequences == 0) return Wrong("size wants --sequences");
  }
  if (line.no_seal && line.keep_open) return Wrong("--keep-open does not go with --no-seal");
  uint64_t id = 0;
  if (command == "inspect" && line.data_dir.empty() && absl::SimpleAtoi(line.arguments[0], &id)) {
    return Wrong("inspect of an id wants --data-dir");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments) {
  CommandLine line;
  ATTND_ASSIGN_OR_RETURN(const Parsed parsed, TakeOptions(arguments, &line));
  if (line.command == "help") return line;
  if (parsed.words.empty()) return Wrong("a command is missing");
  line.command = parsed.words[0];
  line.arguments.assign(parsed.words.begin() + 1, parsed.words.end());
  const auto command = std::find_if(kCommands.begin(), kCommands.end(), [&](const Command& known) {
    return line.command == known.name;
  });
  if (command == kCommands.end()) {
    return Wrong(absl::StrCat("'", line.command, "' is no command"));
  }
  for (const char letter : parsed.given) {
    if (letter == kJson || absl::string_view(command->options).find(letter) != std::string::npos) {
      continue;
    }
    return Wrong(absl::StrCat(line.command, " does not know --", NameOf(letter)));
  }
  if (line.arguments.size() < command->arguments_min ||
      line.arguments.size() > command->arguments_max) {
    return Wrong(absl::StrCat(line.command, " has ", line.arguments.size(), " arguments"));
  }
  if (command->ids) ATTND_RETURN_IF_ERROR(TakeIds(&line));
  ATTND_RETURN_IF_ERROR(CheckTogether(line));
  return line;
}

std::string UsageText() {
  return R"(attnctl: looks after what attnd keeps on disk.

On a data folder (reads only, and may run beside the server, unless it says otherwise):
  attnctl list --data-dir DIR [--tenant T] [--segments]
      sealed sequences; with --segments the segments that they are made of
  attnctl inspect ID --data-dir DIR [--token-ids]
  attnctl inspect FILE [--token-ids]
      a sealed sequence with all its files, or one segment file: header and metadata
  attnctl verify [--all | ID...] --data-dir DIR [--mib-per-s N]
      reads every byte of those sequences' files, or of all, from the disk; names what is damaged or
      missing, and who needs it
  attnctl rebuild-catalogue --data-dir DIR [--orphans]
      writes: makes catalogue/ again from the files; the server must be stopped. The old one stays
      as catalogue.old-N; files that cannot be taken go to quarantine/. With --orphans what servers
      moved to orphans/ comes back first
  attnctl new-secret --data-dir DIR
      writes: makes the secret that is missing or damaged; the server must be stopped. Sealed
      sequences answer as before; prompts that were sealed before are no longer recognised. A good
      secret is left alone
  attnctl export ID --data-dir DIR --out FILE.safetensors
      keys, values and token ids of a sealed sequence

On nothing:
  attnctl size --model config.json --context N --sequences N [--generated N] [--token-ids]
      [--dtype bf16|fp16|fp32] [--index NAME] [--memory BYTES] [--page-memory BYTES]
      [--gpu-memory BYTES] [--gpu-page-memory BYTES]
      what so many sequences of a model take and where that lies, what a step reads of one, how long
      indexing takes on this machine, and what does not fit (exit status 1). Numbers of tokens may
      end with k: 128k is 131072; BYTES with KiB, MiB, GiB, TiB. The model's file is a Hugging Face
      config.json. --context: tokens of each prompt, --generated: of each answer; --token-ids:
      prompts come with ids; --index: tree, if not given; --memory, --page-memory, --gpu-memory,
      --gpu-page-memory: as the server's memory_budget_bytes, page_memory_bytes,
      device_memory_bytes, device_page_memory_bytes. Without --gpu-memory the CPU answers

On a running server (ADDRESS: unix:PATH or HOST:PORT; without --tenant the tenant ""):
  attnctl list --server ADDRESS [--tenant T]
      open and sealed sequences
  attnctl seal SEQUENCE_ID --server ADDRESS [--tenant T]
  attnctl drop SEALED_ID --server ADDRESS [--tenant T]
  attnctl import FILE.safetensors --server ADDRESS [--tenant T] [--no-seal | --keep-open]
      uploads what export wrote, seals it and closes it again; --keep-open: leaves it open as well;
      --no-seal: leaves it open only

  --json: one JSON document in place of text; ids of open sequences are texts in it. Progress goes to
  stderr if that is a terminal.

Exit status: 0 all is well; 1 something was found to be wrong, or the command failed; 2 wrong usage.
)";
}

}  // namespace attnd::ctl
