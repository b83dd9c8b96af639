// SPDX-License-Identifier: Apache-2.0
//
// ServerOptions: everything an operator can choose, in one struct with one Validate(). No gRPC
// here.
#ifndef ATTND_SERVER_OPTIONS_OPTIONS_H_
#define ATTND_SERVER_OPTIONS_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/policy/policy.h"
#include "attnd/v1/config.pb.h"
#include "engine/options.h"
#include "server/options/policy_catalog.h"

namespace attnd::server {

inline constexpr size_t kListenMax = 8;
inline constexpr size_t kSocketPathBytesMax = 107;  // sun_path less its final zero
// What the second socket's path has behind the first one's.
inline constexpr char kMemorySocketSuffix[] = ".memory";

// Where the server listens: unix:PATH or HOST:PORT.
struct ListenAddress {
  std::string path;  // empty for TCP
  std::string host;  // without brackets
  uint16_t port = 0;

  bool is_unix() const { return !path.empty(); }
  // True for localhost, 127.0.0.0/8 and ::1.
  bool is_loopback() const;
  // The form that gRPC takes.
  std::string ToString() const;
};

// InvalidArgument names what is wrong. `field` is the option's name, for the message.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view field, absl::string_view text);
// HOST:PORT; the host may be in brackets.
absl::StatusOr<ListenAddress> ParseHostPort(absl::string_view field, absl::string_view text);

// Fields and ranges as in proto/attnd/v1/config.proto. A plain value; the defaults are what `attnd
// --help` prints.
struct ServerOptions {
  std::vector<std::string> listen;  // empty: unix:DATA_DIR/attnd.sock
  std::string data_dir = "attnd-data";
  std::string metrics_listen;
  uint64_t memory_budget_bytes = 0;
  uint32_t step_threads = 0;
  uint32_t step_workers = 4;
  uint32_t max_queued_steps = 1024;
  uint32_t max_memory_passes = 64;
  uint32_t index_threads = 0;
  uint32_t max_sequences = 4096;
  uint64_t max_sequence_tokens = uint64_t{4} << 20;
  uint32_t max_streams = 2048;
  uint32_t max_rows = 1024;
  uint32_t max_query_tokens = 4096;
  uint64_t max_message_bytes = uint64_t{64} << 20;
  uint32_t segment_tokens = 8192;
  attention::Policy default_policy;  // dense
  uint32_t reply_timeout_s = 30;
  bool allow_insecure_tcp = false;
  bool allow_remote_metrics = false;
  bool allow_client_memory = false;
  uint32_t max_connection_streams = 4096;
  uint64_t grpc_memory_bytes = 0;
  uint32_t min_ping_interval_s = 10;
  std::string backend = "auto";
  uint64_t device_memory_bytes = 0;
  uint64_t device_page_memory_bytes = 0;
  std::string on_gpu_fault = "auto";
  bool device_launch_ahead = true;
  std::string io = "auto";
  uint64_t page_memory_bytes = 0;
  uint32_t page_readers = 4;
  uint64_t disk_read_bytes_per_s = 0;
  uint32_t disk_step_workers = 8;
  bool page_prefetch = false;
  uint64_t retain_bytes = 0;
  uint64_t retain_s = 0;
  std::vector<std::string> policy_file;
  double audit_share = 0.01;
  double audit_cpu_share = engine::AuditOptions().cpu_share;
  std::vector<std::string> feature_maps;    // files
  std::vector<std::string> label_channels;  // files
  uint64_t client_memory_bytes = uint64_t{1} << 30;
  uint64_t client_device_memory_bytes = uint64_t{256} << 20;
  uint32_t max_memory_regions = 1024;
  uint32_t max_memory_clients = 64;

  // What requests may name: the built-in presets and, from ApplyConfig on, those of policy_file.
  PolicyCatalog policies;

  ServerOptions();

  // Checks every field; InvalidArgument names the first wrong one and what is allowed.
  absl::Status Validate() const;

  // The addresses of `listen`, or the default. Only after Validate().
  std::vector<ListenAddress> ListenAddresses() const;
  // Where clients register memory: beside the first Unix socket. Only after Validate(), with
  // allow_client_memory.
  std::string MemorySocketPath() const;
  std::chrono::seconds reply_timeout() const { return std::chrono::seconds(reply_timeout_s); }
};

// Overwrites the fields that `config` has, and reads its policy files. Fails if one of them, or the
// default policy, does not parse.
absl::Status ApplyConfig(const v1::ServerConfig& config, ServerOptions* options);

// Reads a file in protobuf text format. Errors name the file, the line and the column.
absl::StatusOr<v1::ServerConfig> ReadConfigFile(const std::string& path);

// "NAME" or "NAME:key=value,key=value".
absl::StatusOr<v1::Policy> ParsePolicyText(absl::string_view text);

// What the process finds on the machine, once, at its start; for options whose 0 means "as much as
// there is", too.
struct Machine {
  uint32_t cores = 1;         // that this process may run on
  uint64_t memory_bytes = 0;  // the least of the machine's and of its control groups'
  std::string mps_control;    // MpsControlPipe (mps.h): empty if the process runs without MPS

  static Machine Detect();
};

// grpc_memory_bytes, 0 resolved.
uint64_t GrpcMemoryBytes(const ServerOptions& options, const Machine& machine);

// The engine's share of the options, zeros resolved.
engine::EngineOptions ToEngineOptions(const ServerOptions& options, const Machine& machine);
// Where sealed sequences lie: in data_dir. No part of ToEngineOptions, as an engine works without.
engine::ArchiveOptions ToArchiveOptions(const ServerOptions& options);

}  // namespace attnd::server

#endif  // ATTND_SERVER_OPTIONS_OPTIONS_H_
