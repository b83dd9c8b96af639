// SPDX-License-Identifier: Apache-2.0
#include "server/options/command_line.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/byte_size.h"
#include "common/status.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

using Defaults = attnd::server::ServerOptions;
using attnd::ByteSize;

// Named as the fields of attnd.v1.ServerConfig, which documents them in full.
ABSL_FLAG(std::string, listen, "",
          "unix:PATH or HOST:PORT, comma separated or repeated; empty: unix:DATA_DIR/attnd.sock");
ABSL_FLAG(std::string, data_dir, Defaults().data_dir, "directory of this server alone");
ABSL_FLAG(std::string, metrics_listen, Defaults().metrics_listen,
          "HOST:PORT of the Prometheus endpoint /metrics; port 0 chooses one; empty: off");
ABSL_FLAG(ByteSize, memory_budget_bytes, ByteSize{Defaults().memory_budget_bytes},
          "bytes for sequences, their KV and indexes, building those, and answers under way; 0: "
          "half of the machine's memory");
ABSL_FLAG(uint32_t, step_threads, Defaults().step_threads,
          "threads that answer one step together; 0: all cores");
ABSL_FLAG(uint32_t, step_workers, Defaults().step_workers, "steps answered at the same time");
ABSL_FLAG(uint32_t, max_queued_steps, Defaults().max_queued_steps,
          "steps that may wait for a worker");
ABSL_FLAG(
    uint32_t, index_threads, Defaults().index_threads,
    "threads that segment a finished prompt; a quarter as many, 4 at most, write an upload; 0: all "
    "cores");
ABSL_FLAG(uint32_t, max_sequences, Defaults().max_sequences, "open sequences");
ABSL_FLAG(uint64_t, max_sequence_tokens, Defaults().max_sequence_tokens, "tokens of a sequence");
ABSL_FLAG(uint32_t, max_streams, Defaults().max_streams, "open Decode and AppendKv streams");
ABSL_FLAG(uint32_t, max_rows, Defaults().max_rows, "rows of a Decode message");
ABSL_FLAG(uint32_t, max_query_tokens, Defaults().max_query_tokens,
          "query tokens of a Decode message, all rows together");
ABSL_FLAG(ByteSize, max_message_bytes, ByteSize{Defaults().max_message_bytes},
          "largest message in either direction");
ABSL_FLAG(uint32_t, segment_tokens, Defaults().segment_tokens,
          "tokens of a segment of generated text, and of a prompt's first segments");
ABSL_FLAG(std::string, default_policy, "dense",
          "policy of sequences that choose none: NAME or NAME:key=value,key=value");
ABSL_FLAG(uint32_t, reply_timeout_s, Defaults().reply_timeout_s,
          "seconds that a client may leave a reply unread");
ABSL_FLAG(bool, allow_insecure_tcp, Defaults().allow_insecure_tcp,
          "allow TCP in listen, loopback too: it has no encryption and no authentication");
ABSL_FLAG(bool, allow_remote_metrics, Defaults().allow_remote_metrics,
          "allow metrics_listen beyond loopback: whoever reaches it reads the metrics");
ABSL_FLAG(uint32_t, max_connection_streams, Defaults().max_connection_streams,
          "streams and calls open on one connection");
ABSL_FLAG(ByteSize, grpc_memory_bytes, ByteSize{Defaults().grpc_memory_bytes},
          "bytes for messages that arrive and for calls; 0: a quarter of the machine's memory");
ABSL_FLAG(uint32_t, min_ping_interval_s, Defaults().min_ping_interval_s,
          "seconds that a client must leave between pings without data");
ABSL_FLAG(std::string, backend, Defaults().backend,
          "what answers steps: cpu; cuda; auto: a GPU, and the CPU what it cannot run");
ABSL_FLAG(ByteSize, device_memory_bytes, ByteSize{Defaults().device_memory_bytes},
          "bytes of GPU memory to take; 0: nine tenths, or what others leave");
ABSL_FLAG(ByteSize, device_page_memory_bytes, ByteSize{Defaults().device_page_memory_bytes},
          "of them, bytes for keys and values, a cache where these need more; 0: seven eighths");
ABSL_FLAG(
    bool, device_launch_ahead, Defaults().device_launch_ahead,
    "launch a layer on the GPU before its queries are there, where a pass expects it at once");
ABSL_FLAG(std::string, on_gpu_fault, Defaults().on_gpu_fault,
          "after a fault of the GPU: cpu: the CPU answers; exit: the server ends with status 75; "
          "auto: exit under MPS, else cpu");
ABSL_FLAG(std::string, io, Defaults().io,
          "how files are read and written: uring; threads; auto: io_uring where it is allowed");
ABSL_FLAG(ByteSize, page_memory_bytes, ByteSize{Defaults().page_memory_bytes},
          "bytes of the budget always kept for pages of segments on disk; 0: an eighth, 256 MiB at "
          "most");
ABSL_FLAG(uint32_t, page_readers, Defaults().page_readers, "threads that read pages from disk");
ABSL_FLAG(ByteSize, disk_read_bytes_per_s, ByteSize{Defaults().disk_read_bytes_per_s},
          "bytes of pages read from disk a second; 0: no limit");
ABSL_FLAG(uint32_t, disk_step_workers, Defaults().disk_step_workers,
          "steps that may wait for the disk at the same time");
ABSL_FLAG(ByteSize, retain_bytes, ByteSize{Defaults().retain_bytes},
          "bytes of sealed sequences to keep, the most recently used; 0: all");
ABSL_FLAG(uint64_t, retain_s, Defaults().retain_s,
          "seconds to keep a sealed sequence that nobody uses; 0: for ever");
ABSL_FLAG(std::string, policy_file, "",
          "files with named presets in protobuf text format, comma separated or repeated");
ABSL_FLAG(bool, page_prefetch, Defaults().page_prefetch,
          "read ahead what the next layer's last step read exactly");
ABSL_FLAG(double, audit_share, Defaults().audit_share,
          "share of the rows that are computed again, densely, in the background; 0: none");
ABSL_FLAG(double, audit_cpu_share, Defaults().audit_cpu_share,
          "what that may take of one core's time at most");
ABSL_FLAG(std::string, feature_maps, "",
          "files of feature maps for topk-completion, comma separated or repeated");
ABSL_FLAG(std::string, label_channels, "",
          "files of label channels for double-sparsity and asynctls, comma separated or repeated");
ABSL_FLAG(bool, allow_client_memory, Defaults().allow_client_memory,
          "let clients of this user share memory with the server: a second socket, PATH.memory");
ABSL_FLAG(ByteSize, client_memory_bytes, ByteSize{Defaults().client_memory_bytes},
          "bytes of all memory that clients share");
ABSL_FLAG(ByteSize, client_device_memory_bytes, ByteSize{Defaults().client_device_memory_bytes},
          "bytes of GPU memory that clients on the server's GPU share; 0: none");
ABSL_FLAG(uint32_t, max_memory_regions, Defaults().max_memory_regions,
          "regions of shared memory, of all clients");
ABSL_FLAG(uint32_t, max_memory_clients, Defaults().max_memory_clients, "clients that share memory");
ABSL_FLAG(uint32_t, max_memory_passes, Defaults().max_memory_passes,
          "passes over shared memory at once, each with a thread of its own");
ABSL_FLAG(std::string, config, "", "file with these options in protobuf text format");
ABSL_FLAG(std::string, probe, "",
          "ask the server at this address for its health and exit: 0 if it serves");

namespace attnd::server {
namespace {

using google::protobuf::FieldDescriptor;

constexpr const char* kFlagNames[] = {"listen",
                                      "data_dir",
                                      "metrics_listen",
                                      "memory_budget_bytes",
                                      "step_threads",
                                      "step_workers",
                                      "max_queued_steps",
                                      "index_threads",
                                      "max_sequences",
                                      "max_streams",
                                      "max_sequence_tokens",
                                      "max_rows",
                                      "max_query_tokens",
                                      "segment_tokens",
                                      "max_message_bytes",
                                      "default_policy",
                                      "reply_timeout_s",
                                      "allow_insecure_tcp",
                                      "allow_remote_metrics",
                                      "max_connection_streams",
                                      "grpc_memory_bytes",
                                      "min_ping_interval_s",
                                      "backend",
                                      "device_memory_bytes",
                                      "device_page_memory_bytes",
                                      "on_gpu_fault",
                                      "device_launch_ahead",
                                      "io",
                                      "page_memory_bytes",
                                      "page_readers",
                                      "disk_read_bytes_per_s",
                                      "disk_step_workers",
                                      "page_prefetch",
                                      "retain_bytes",
                                      "retain_s",
                                      "policy_file",
                                      "audit_share",
                                      "audit_cpu_share",
                                      "feature_maps",
                                      "label_channels",
                                      "allow_client_memory",
                                      "client_memory_bytes",
                                      "client_device_memory_bytes",
                                      "max_memory_regions",
                                      "max_memory_clients",
                                      "max_memory_passes"};

// Flags that may be repeated, as their fields are.
bool MayRepeat(const std::string& name) {
  return name == "listen" || name == "policy_file" || name == "feature_maps" ||
         name == "label_channels";
}

// Splits "--name=value"; the value is absent if there is no '='. Names come out with underscores.
struct Argument {
  std::string name;  // empty: not a flag
  std::string value;
  bool has_value = false;
};
Argument SplitArgument(const std::string& text) {
  Argument argument;
  if (text.size() < 2 || text[0] != '-') return argument;
  const size_t start = text[1] == '-' ? 2 : 1;
  const size_t equals = text.find('=');
  argument.has_value = equals != std::string::npos;
  argument.name = text.substr(start, argument.has_value ? equals - start : std::string::npos);
  std::replace(argument.name.begin(), argument.name.end(), '-', '_');
  if (argument.has_value) argument.value = text.substr(equals + 1);
  return argument;
}

// Whether the name is that of a flag with "no" before it, as absl allows for flags that are true or
// false.
bool IsNegated(const std::string& name) {
  return absl::FindCommandLineFlag(name) == nullptr && absl::StartsWith(name, "no") &&
         absl::FindCommandLineFlag(name.substr(2)) != nullptr;
}

std::string FlagText(const char* name) {
  const absl::CommandLineFlag* const flag = absl::FindCommandLineFlag(name);
  return flag == nullptr ? std::string() : flag->CurrentValue();
}

// Sets the field of the flag's name. Types were checked when the flag was parsed.
absl::Status SetField(const char* name, v1::ServerConfig* config) {
  const FieldDescriptor* const field = config->GetDescriptor()->FindFieldByName(name);
  const google::protobuf::Reflection* const reflection = config->GetReflection();
  const std::string text = FlagText(name);
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      reflection->SetUInt32(config, field, static_cast<uint32_t>(std::stoul(text)));
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_UINT64:
      reflection->SetUInt64(config, field, std::stoull(text));
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_BOOL:
      reflection->SetBool(config, field, text == "true");
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_DOUBLE:
      reflection->SetDouble(config, field, std::stod(text));
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_STRING:
      if (!field->is_repeated()) {
        reflection->SetString(config, field, text);
        return absl::OkStatus();
      }
      reflection->ClearField(config, field);
      for (const auto part : absl::StrSplit(text, ',', absl::SkipEmpty())) {
        reflection->AddString(config, field, std::string(part));
      }
      return absl::OkStatus();
    default: {  // default_policy, the one message
      ATTND_ASSIGN_OR_RETURN(*config->mutable_default_policy(), ParsePolicyText(text));
      return absl::OkStatus();
    }
  }
}

absl::StatusOr<ServerOptions> LoadOptions(const std::set<std::string>& given) {
  v1::ServerConfig config;
  if (const std::string path = absl::GetFlag(FLAGS_config); !path.empty()) {
    ATTND_ASSIGN_OR_RETURN(config, ReadConfigFile(path));
  }
  for (const char* const name : kFlagNames) {
    if (given.count(name) != 0) ATTND_RETURN_IF_ERROR(SetField(name, &config));
  }
  ServerOptions options;
  ATTND_RETURN_IF_ERROR(ApplyConfig(config, &options));
  ATTND_RETURN_IF_ERROR(options.Validate());
  return options;
}

}  // namespace

NormalisedArguments NormaliseArguments(const std::vector<std::string>& arguments) {
  NormalisedArguments result;
  std::map<std::string, std::vector<std::string>> repeated;
  bool flags_ended = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const Argument argument = i == 0 || flags_ended ? Argument() : SplitArgument(arguments[i]);
    if (arguments[i] == "--") flags_ended = true;
    if (argument.name.empty()) {
      result.arguments.push_back(arguments[i]);
      continue;
    }
    const bool negated = IsNegated(argument.name);
    result.given.insert(negated ? argument.name.substr(2) : argument.name);
    if (MayRepeat(argument.name)) {
      if (!argument.has_value && i + 1 < arguments.size()) ++i;
      repeated[argument.name].push_back(argument.has_value ? argument.value : arguments[i]);
      continue;
    }
    result.arguments.push_back(argument.has_value
                                   ? absl::StrCat("--", argument.name, "=", argument.value)
                                   : absl::StrCat("--", argument.name));
  }
  for (const auto& [name, values] : repeated) {
    result.arguments.insert(result.arguments.begin() + 1,
                            absl::StrCat("--", name, "=", absl::StrJoin(values, ",")));
  }
  return result;
}

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments) {
  NormalisedArguments normalised = NormaliseArguments(arguments);
  CommandLine line;
  if (normalised.given.count("help") != 0) {
    line.command = Command::kHelp;
    return line;
  }
  if (normalised.given.count("version") != 0) {
    line.command = Command::kVersion;
    return line;
  }
  std::vector<char*> pointers;
  pointers.reserve(normalised.arguments.size());
  for (std::string& argument : normalised.arguments) pointers.push_back(argument.data());
  const std::vector<char*> rest =
      absl::ParseCommandLine(static_cast<int>(pointers.size()), pointers.data());
  if (rest.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("'", rest[1], "' is not a flag"));
  }
  line.probe_address = absl::GetFlag(FLAGS_probe);
  if (!line.probe_address.empty()) {
    line.command = Command::kProbe;
    return line;
  }
  ATTND_ASSIGN_OR_RETURN(line.options, LoadOptions(normalised.given));
  return line;
}

std::string HelpText() {
  std::string text =
      "attnd: answers attention from a clustered KV cache over gRPC.\n\n"
      "  attnd --listen unix:PATH --data-dir DIR [flags]\n"
      "  attnd --probe ADDRESS\n  attnd --version\n\n"
      "Flags (dashes or underscores; fields of the same name in the file of --config; bytes also "
      "as\n"
      "64KiB, 512MiB, 12GiB, 1TiB):\n";
  const auto append = [&text](const char* name) {
    const absl::CommandLineFlag* const flag = absl::FindCommandLineFlag(name);
    std::string dashed = name;
    std::replace(dashed.begin(), dashed.end(), '_', '-');
    absl::StrAppend(&text, "  --", dashed, "\n      ", flag->Help());
    if (!flag->DefaultValue().empty()) absl::StrAppend(&text, " [", flag->DefaultValue(), "]");
    absl::StrAppend(&text, "\n");
  };
  for (const char* const name : kFlagNames) append(name);
  append("config");
  append("probe");
  return text;
}

}  // namespace attnd::server
