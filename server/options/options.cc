// SPDX-License-Identifier: Apache-2.0
#include "server/options/options.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/status.h"
#include "gpu/cuda_backend.h"
#include "server/options/cgroup.h"
#include "server/options/mps.h"
#include "server/options/text_file.h"

namespace attnd::server {
namespace {

constexpr uint32_t kThreadsMax = 1024;
constexpr uint64_t kMemoryBudgetBytesMin = uint64_t{16} << 20;
constexpr uint64_t kMessageBytesMin = uint64_t{64} << 10;
constexpr uint64_t kMessageBytesMax = uint64_t{1} << 30;  // protobuf and gRPC count in int
constexpr uint64_t kSequenceTokensMax = uint64_t{1} << 32;

// What gRPC holds at the least: a message that arrives while another is taken, and the calls.
constexpr uint64_t kGrpcMessagesMin = 2;
constexpr uint64_t kGrpcCallBytesMin = uint64_t{16} << 20;
constexpr uint64_t kGrpcMessagesDefault = 8;
constexpr uint64_t kGrpcBytesDefaultMin = uint64_t{256} << 20;

absl::Status CheckRange(const char* field, uint64_t value, uint64_t min, uint64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, "; allowed are ", min, "..", max));
}

absl::Status CheckListen(const ServerOptions& options) {
  if (options.listen.size() > kListenMax) {
    return absl::InvalidArgumentError(absl::StrCat("listen has ", options.listen.size(),
                                                   " addresses; allowed are 1..", kListenMax));
  }
  for (const std::string& text : options.listen) {
    ATTND_ASSIGN_OR_RETURN(const ListenAddress address, ParseListenAddress("listen", text));
    if (!address.is_unix() && !options.allow_insecure_tcp) {
      return absl::InvalidArgumentError(absl::StrCat(
          "listen: ", text, " is TCP, which has no encryption and no authentication here: ",
          address.is_loopback() ? "every user and container of this machine that reaches loopback"
                                : "everybody who reaches it",
          " could read, change and close all sequences of the tenant \"\"; use unix:PATH, or say "
          "--allow-insecure-tcp"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckGrpc(const ServerOptions& options) {
  ATTND_RETURN_IF_ERROR(
      CheckRange("max_connection_streams", options.max_connection_streams, 1, 65536));
  if (options.grpc_memory_bytes != 0) {
    const uint64_t min = kGrpcMessagesMin * options.max_message_bytes + kGrpcCallBytesMin;
    ATTND_RETURN_IF_ERROR(
        CheckRange("grpc_memory_bytes", options.grpc_memory_bytes, min, uint64_t{1} << 50));
  }
  return CheckRange("min_ping_interval_s", options.min_ping_interval_s, 1, 3600);
}

absl::Status CheckBackend(const ServerOptions& options) {
  if (options.backend != "auto" && options.backend != "cpu" && options.backend != "cuda") {
    return absl::InvalidArgumentError(absl::StrCat("backend is '", options.backend.substr(0, 64),
                                                   "'; allowed are auto, cpu, cuda"));
  }
  if (options.on_gpu_fault != "auto" && options.on_gpu_fault != "cpu" &&
      options.on_gpu_fault != "exit") {
    return absl::InvalidArgumentError(absl::StrCat(
        "on_gpu_fault is '", options.on_gpu_fault.substr(0, 64), "'; allowed are auto, cpu, exit"));
  }
  constexpr uint64_t kBytesMax = uint64_t{1} << 50;
  if (options.device_page_memory_bytes != 0) {
    ATTND_RETURN_IF_ERROR(CheckRange("device_page_memory_bytes", options.device_page_memory_bytes,
                                     uint64_t{1} << 16, kBytesMax));
  }
  if (options.device_memory_bytes == 0) return absl::OkStatus();
  return CheckRange("device_memory_bytes", options.device_memory_bytes, gpu::kDeviceMemoryBytesMin,
                    kBytesMax);
}

engine::AuditOptions ToAuditOptions(const ServerOptions& options) {
  engine::AuditOptions result;
  result.share = options.audit_share;
  result.cpu_share = options.audit_cpu_share;
  return result;
}

absl::Status CheckIo(const ServerOptions& options) {
  if (options.io == "auto" || options.io == "uring" || options.io == "threads") {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("io is '", options.io.substr(0, 64), "'; allowed are auto, uring, threads"));
}

absl::Status CheckPaths(const ServerOptions& options) {
  if (options.data_dir.empty()) return absl::InvalidArgumentError("data_dir is empty");
  if (options.listen.empty()) {
    ATTND_RETURN_IF_ERROR(
        ParseListenAddress("data_dir", absl::StrCat("unix:", options.data_dir, "/attnd.sock"))
            .status());
  }
  if (!options.metrics_listen.empty()) {
    ATTND_ASSIGN_OR_RETURN(const ListenAddress address,
                           ParseHostPort("metrics_listen", options.metrics_listen));
    if (!address.is_loopback() && !options.allow_remote_metrics) {
      return absl::InvalidArgumentError(
          absl::StrCat("metrics_listen: ", options.metrics_listen,
                       " is beyond loopback, and everybody who reaches it could read the metrics; "
                       "use loopback, or say --allow-remote-metrics"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckClientMemory(const ServerOptions& options) {
  ATTND_RETURN_IF_ERROR(CheckRange("client_memory_bytes", options.client_memory_bytes,
                                   uint64_t{1} << 12, uint64_t{1} << 50));
  ATTND_RETURN_IF_ERROR(CheckRange("client_device_memory_bytes", options.client_device_memory_bytes,
                                   0, uint64_t{1} << 50));
  ATTND_RETURN_IF_ERROR(CheckRange("max_memory_regions", options.max_memory_regions, 1, 1u << 20));
  ATTND_RETURN_IF_ERROR(CheckRange("max_memory_clients", options.max_memory_clients, 1, 4096));
  ATTND_RETURN_IF_ERROR(CheckRange("max_memory_passes", options.max_memory_passes, 1, 1024));
  if (!options.allow_client_memory) return absl::OkStatus();
  const std::string path = options.MemorySocketPath();
  if (path.empty()) {
    return absl::InvalidArgumentError(
        "allow_client_memory: listen has no Unix socket, beside which clients could register "
        "memory");
  }
  if (path.size() > kSocketPathBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("allow_client_memory: the path ", path, " has ",
                                                   path.size(), " bytes; allowed are 1..",
                                                   kSocketPathBytesMax));
  }
  return absl::OkStatus();
}

}  // namespace

std::string ServerOptions::MemorySocketPath() const {
  for (const ListenAddress& address : ListenAddresses()) {
    if (address.is_unix()) return address.path + kMemorySocketSuffix;
  }
  return "";
}

bool ListenAddress::is_loopback() const {
  return is_unix() || host == "localhost" || host == "::1" ||
         (absl::StartsWith(host, "127.") &&
          host.find_first_not_of("0123456789.") == std::string::npos);
}

std::string ListenAddress::ToString() const {
  if (is_unix()) return absl::StrCat("unix:", path);
  const bool v6 = absl::StrContains(host, ":");
  return absl::StrCat(v6 ? "[" : "", host, v6 ? "]:" : ":", port);
}

absl::StatusOr<ListenAddress> ParseHostPort(absl::string_view field, absl::string_view text) {
  const size_t colon = text.rfind(':');
  uint32_t port = 0;
  ListenAddress address;
  if (colon != absl::string_view::npos && colon > 0 &&
      absl::SimpleAtoi(text.substr(colon + 1), &port) && port <= 65535) {
    absl::string_view host = text.substr(0, colon);
    const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
    if (bracketed) host = host.substr(1, host.size() - 2);
    if (bracketed || host.find(':') == absl::string_view::npos) {
      address.host = std::string(host);
      address.port = static_cast<uint16_t>(port);
      return address;
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": '", text, "' is not HOST:PORT with a port of 0..65535"));
}

absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view field, absl::string_view text) {
  constexpr absl::string_view kUnix = "unix:";
  if (!absl::StartsWith(text, kUnix)) return ParseHostPort(field, text);
  ListenAddress address;
  address.path = std::string(text.substr(kUnix.size()));
  if (absl::StartsWith(address.path, "//")) address.path.erase(0, 2);  // unix:///absolute
  if (address.path.empty() || address.path.size() > kSocketPathBytesMax ||
      address.path.back() == '/') {
    return absl::InvalidArgumentError(absl::StrCat(field, ": '", text,
                                                   "' is not unix:PATH with a path of 1..",
                                                   kSocketPathBytesMax, " bytes"));
  }
  return address;
}

ServerOptions::ServerOptions() {
  // The preset of no parameters always parses.
  if (auto dense = attention::ParsePolicy("dense"); dense.ok()) default_policy = *std::move(dense);
}

absl::Status ServerOptions::Validate() const {
  ATTND_RETURN_IF_ERROR(CheckListen(*this));
  ATTND_RETURN_IF_ERROR(CheckPaths(*this));
  if (memory_budget_bytes != 0) {
    ATTND_RETURN_IF_ERROR(CheckRange("memory_budget_bytes", memory_budget_bytes,
                                     kMemoryBudgetBytesMin, uint64_t{1} << 50));
  }
  ATTND_RETURN_IF_ERROR(CheckRange("step_threads", step_threads, 0, kThreadsMax));
  ATTND_RETURN_IF_ERROR(CheckRange("step_workers", step_workers, 1, 256));
  ATTND_RETURN_IF_ERROR(CheckRange("max_queued_steps", max_queued_steps, 1, 65536));
  ATTND_RETURN_IF_ERROR(CheckRange("index_threads", index_threads, 0, kThreadsMax));
  ATTND_RETURN_IF_ERROR(CheckRange("max_sequences", max_sequences, 1, 1u << 20));
  ATTND_RETURN_IF_ERROR(
      CheckRange("max_sequence_tokens", max_sequence_tokens, 1, kSequenceTokensMax));
  ATTND_RETURN_IF_ERROR(CheckRange("max_streams", max_streams, 1, 65536));
  ATTND_RETURN_IF_ERROR(CheckRange("max_rows", max_rows, 1, 65536));
  ATTND_RETURN_IF_ERROR(CheckRange("max_query_tokens", max_query_tokens, 1, 1u << 20));
  ATTND_RETURN_IF_ERROR(
      CheckRange("max_message_bytes", max_message_bytes, kMessageBytesMin, kMessageBytesMax));
  ATTND_RETURN_IF_ERROR(CheckRange("segment_tokens", segment_tokens, 512, 65536));
  if (page_memory_bytes != 0) {
    ATTND_RETURN_IF_ERROR(
        CheckRange("page_memory_bytes", page_memory_bytes, uint64_t{1} << 20, uint64_t{1} << 50));
  }
  ATTND_RETURN_IF_ERROR(CheckRange("page_readers", page_readers, 1, 64));
  ATTND_RETURN_IF_ERROR(
      CheckRange("disk_read_bytes_per_s", disk_read_bytes_per_s, 0, uint64_t{1} << 50));
  ATTND_RETURN_IF_ERROR(CheckRange("disk_step_workers", disk_step_workers, 1, 1024));
  ATTND_RETURN_IF_ERROR(CheckRange("reply_timeout_s", reply_timeout_s, 1, 3600));
  ATTND_RETURN_IF_ERROR(ToAuditOptions(*this).Validate());
  ATTND_RETURN_IF_ERROR(CheckBackend(*this));
  ATTND_RETURN_IF_ERROR(CheckIo(*this));
  ATTND_RETURN_IF_ERROR(CheckClientMemory(*this));
  return CheckGrpc(*this);
}

std::vector<ListenAddress> ServerOptions::ListenAddresses() const {
  std::vector<ListenAddress> addresses;
  for (const std::string& text : listen) {
    if (auto address = ParseListenAddress("listen", text); address.ok()) {
      addresses.push_back(*std::move(address));
    }
  }
  if (addresses.empty()) {
    ListenAddress address;
    address.path = data_dir + "/attnd.sock";
    addresses.push_back(address);
  }
  return addresses;
}

absl::Status ApplyConfig(const v1::ServerConfig& config, ServerOptions* options) {
  if (config.listen_size() > 0) {
    options->listen.assign(config.listen().begin(), config.listen().end());
  }
  if (config.policy_file_size() > 0) {
    options->policy_file.assign(config.policy_file().begin(), config.policy_file().end());
    ATTND_ASSIGN_OR_RETURN(options->policies, PolicyCatalog::Load(options->policy_file));
  }
  if (config.feature_maps_size() > 0) {
    options->feature_maps.assign(config.feature_maps().begin(), config.feature_maps().end());
  }
  if (config.label_channels_size() > 0) {
    options->label_channels.assign(config.label_channels().begin(), config.label_channels().end());
  }
  if (config.has_default_policy()) {
    ATTND_ASSIGN_OR_RETURN(options->default_policy,
                           options->policies.Parse(config.default_policy()));
  }
#define ATTND_APPLY(field) \
  if (config.has_##field()) options->field = config.field()
  ATTND_APPLY(data_dir);
  ATTND_APPLY(metrics_listen);
  ATTND_APPLY(memory_budget_bytes);
  ATTND_APPLY(step_threads);
  ATTND_APPLY(step_workers);
  ATTND_APPLY(max_queued_steps);
  ATTND_APPLY(index_threads);
  ATTND_APPLY(max_sequences);
  ATTND_APPLY(max_sequence_tokens);
  ATTND_APPLY(max_streams);
  ATTND_APPLY(max_rows);
  ATTND_APPLY(max_query_tokens);
  ATTND_APPLY(max_message_bytes);
  ATTND_APPLY(segment_tokens);
  ATTND_APPLY(reply_timeout_s);
  ATTND_APPLY(allow_insecure_tcp);
  ATTND_APPLY(allow_remote_metrics);
  ATTND_APPLY(max_connection_streams);
  ATTND_APPLY(grpc_memory_bytes);
  ATTND_APPLY(min_ping_interval_s);
  ATTND_APPLY(backend);
  ATTND_APPLY(device_memory_bytes);
  ATTND_APPLY(device_page_memory_bytes);
  ATTND_APPLY(on_gpu_fault);
  ATTND_APPLY(device_launch_ahead);
  ATTND_APPLY(io);
  ATTND_APPLY(page_memory_bytes);
  ATTND_APPLY(page_readers);
  ATTND_APPLY(disk_read_bytes_per_s);
  ATTND_APPLY(disk_step_workers);
  ATTND_APPLY(page_prefetch);
  ATTND_APPLY(retain_bytes);
  ATTND_APPLY(retain_s);
  ATTND_APPLY(audit_share);
  ATTND_APPLY(audit_cpu_share);
  ATTND_APPLY(allow_client_memory);
  ATTND_APPLY(client_memory_bytes);
  ATTND_APPLY(client_device_memory_bytes);
  ATTND_APPLY(max_memory_regions);
  ATTND_APPLY(max_memory_clients);
  ATTND_APPLY(max_memory_passes);
#undef ATTND_APPLY
  return absl::OkStatus();
}

absl::StatusOr<v1::ServerConfig> ReadConfigFile(const std::string& path) {
  v1::ServerConfig config;
  ATTND_RETURN_IF_ERROR(ReadTextFile("config", path, &config));
  return config;
}

absl::StatusOr<v1::Policy> ParsePolicyText(absl::string_view text) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits(':', 1));
  v1::Policy policy;
  policy.set_preset(parts.first);
  for (const auto entry : absl::StrSplit(parts.second, ',', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(entry, absl::MaxSplits('=', 1));
    if (pair.first.empty() || pair.second.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", text, "' is not NAME or NAME:key=value,key=value"));
    }
    (*policy.mutable_parameters())[pair.first] = pair.second;
  }
  return policy;
}

Machine Machine::Detect() {
  Machine machine;
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) {
    machine.cores = static_cast<uint32_t>(std::max(1, CPU_COUNT(&cpus)));
  }
  const uint64_t physical =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  std::ifstream membership("/proc/self/cgroup");
  const std::string text((std::istreambuf_iterator<char>(membership)), {});
  machine.memory_bytes = CgroupMemoryLimit(text, "/sys/fs/cgroup", physical);
  machine.mps_control = MpsControlPipe();
  return machine;
}

uint64_t GrpcMemoryBytes(const ServerOptions& options, const Machine& machine) {
  if (options.grpc_memory_bytes != 0) return options.grpc_memory_bytes;
  return std::max({machine.memory_bytes / 4, kGrpcMessagesDefault * options.max_message_bytes,
                   kGrpcBytesDefaultMin});
}

engine::EngineOptions ToEngineOptions(const ServerOptions& options, const Machine& machine) {
  engine::EngineOptions result;
  result.memory_budget_bytes =
      options.memory_budget_bytes != 0 ? options.memory_budget_bytes : machine.memory_bytes / 2;
  result.max_sequences = options.max_sequences;
  result.max_sequence_tokens = options.max_sequence_tokens;
  result.max_rows = options.max_rows;
  result.max_query_tokens = options.max_query_tokens;
  result.segment_tokens = options.segment_tokens;
  result.index_threads = options.index_threads != 0 ? options.index_threads : machine.cores;
  result.default_policy = options.default_policy;
  result.audit = ToAuditOptions(options);
  result.feature_maps = options.feature_maps;
  result.label_channels = options.label_channels;
  return result;
}

engine::ArchiveOptions ToArchiveOptions(const ServerOptions& options) {
  engine::ArchiveOptions result;
  result.data_dir = std::filesystem::absolute(options.data_dir);
  if (options.io == "uring") result.io = engine::ArchiveOptions::Io::kUring;
  if (options.io == "threads") result.io = engine::ArchiveOptions::Io::kThreads;
  result.page_memory_bytes = options.page_memory_bytes;
  result.page_readers = options.page_readers;
  result.read_bytes_per_s = options.disk_read_bytes_per_s;
  result.prefetch = options.page_prefetch;
  result.retention = {options.retain_bytes, options.retain_s};
  return result;
}

}  // namespace attnd::server
