// SPDX-License-Identifier: Apache-2.0
//
// Goal: an operator's mistake is named before anything starts. Method: tables of wrong options,
// addresses, files and command lines, with the word that the message must contain.
#include "server/options/options.h"

#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "common/byte_size.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/options/command_line.h"

namespace attnd::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

TEST(ServerOptions, DefaultsAreValid) {
  const ServerOptions options;
  EXPECT_TRUE(options.Validate().ok()) << options.Validate();
  EXPECT_EQ(options.default_policy.preset, "dense");
  ASSERT_EQ(options.ListenAddresses().size(), 1u);
  EXPECT_EQ(options.ListenAddresses()[0].ToString(), "unix:attnd-data/attnd.sock");
}

TEST(ServerOptions, WrongOnesNameTheField) {
  struct Case {
    const char* named;
    std::function<void(ServerOptions*)> spoil;
  };
  const std::vector<Case> cases = {
      {"listen", [](auto* o) { o->listen = {"unix:"}; }},
      {"listen", [](auto* o) { o->listen = {"unix:" + std::string(108, 'x')}; }},
      {"listen", [](auto* o) { o->listen = {"unix:/tmp/"}; }},
      {"listen", [](auto* o) { o->listen = {"localhost"}; }},
      {"allow-insecure-tcp", [](auto* o) { o->listen = {"127.0.0.1:4000"}; }},
      {"allow-insecure-tcp", [](auto* o) { o->listen = {"localhost:4000"}; }},
      {"allow-insecure-tcp",
       [](auto* o) {
         o->listen = {"unix:/tmp/a", "[::1]:4000"};
       }},
      {"listen", [](auto* o) { o->listen = {"127.0.0.1:65536"}; }},
      {"listen", [](auto* o) { o->listen = {"127.0.0.1:-1"}; }},
      {"listen", [](auto* o) { o->listen = {"::1:80"}; }},
      {"listen", [](auto* o) { o->listen.assign(9, "127.0.0.1:0"); }},
      {"allow-insecure-tcp", [](auto* o) { o->listen = {"0.0.0.0:4000"}; }},
      {"allow-insecure-tcp", [](auto* o) { o->listen = {"[::]:4000"}; }},
      {"allow-insecure-tcp", [](auto* o) { o->listen = {"127.evil.example:4000"}; }},
      {"data_dir", [](auto* o) { o->data_dir.clear(); }},
      {"data_dir", [](auto* o) { o->data_dir = std::string(200, 'x'); }},
      {"metrics_listen", [](auto* o) { o->metrics_listen = "9464"; }},
      {"allow-remote-metrics", [](auto* o) { o->metrics_listen = "0.0.0.0:9464"; }},
      {"allow-remote-metrics", [](auto* o) { o->metrics_listen = "[::]:9464"; }},
      {"memory_budget_bytes", [](auto* o) { o->memory_budget_bytes = 1; }},
      {"step_threads", [](auto* o) { o->step_threads = 1025; }},
      {"step_workers", [](auto* o) { o->step_workers = 0; }},
      {"step_workers", [](auto* o) { o->step_workers = 257; }},
      {"max_queued_steps", [](auto* o) { o->max_queued_steps = 0; }},
      {"max_queued_steps", [](auto* o) { o->max_queued_steps = 65537; }},
      {"index_threads", [](auto* o) { o->index_threads = 1025; }},
      {"max_sequences", [](auto* o) { o->max_sequences = 0; }},
      {"audit_share", [](auto* o) { o->audit_share = 1.01; }},
      {"audit_share", [](auto* o) { o->audit_share = -0.1; }},
      {"audit_cpu_share", [](auto* o) { o->audit_cpu_share = 0; }},
      {"max_sequence_tokens", [](auto* o) { o->max_sequence_tokens = 0; }},
      {"max_streams", [](auto* o) { o->max_streams = 0; }},
      {"max_rows", [](auto* o) { o->max_rows = 0; }},
      {"max_query_tokens", [](auto* o) { o->max_query_tokens = 0; }},
      {"max_message_bytes", [](auto* o) { o->max_message_bytes = 1; }},
      {"max_message_bytes", [](auto* o) { o->max_message_bytes = uint64_t{1} << 31; }},
      {"segment_tokens", [](auto* o) { o->segment_tokens = 511; }},
      {"segment_tokens", [](auto* o) { o->segment_tokens = 65537; }},
      {"reply_timeout_s", [](auto* o) { o->reply_timeout_s = 0; }},
      {"max_connection_streams", [](auto* o) { o->max_connection_streams = 0; }},
      {"max_connection_streams", [](auto* o) { o->max_connection_streams = 65537; }},
      {"grpc_memory_bytes", [](auto* o) { o->grpc_memory_bytes = 1; }},
      {"grpc_memory_bytes", [](auto* o) { o->grpc_memory_bytes = 2 * o->max_message_bytes; }},
      {"backend", [](auto* o) { o->backend = "gpu"; }},
      {"device_memory_bytes", [](auto* o) { o->device_memory_bytes = 1; }},
      {"device_page_memory_bytes", [](auto* o) { o->device_page_memory_bytes = 65535; }},
      {"on_gpu_fault", [](auto* o) { o->on_gpu_fault = "restart"; }},
      {"min_ping_interval_s", [](auto* o) { o->min_ping_interval_s = 0; }},
      {"min_ping_interval_s", [](auto* o) { o->min_ping_interval_s = 3601; }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    ServerOptions options;
    cases[i].spoil(&options);
    const absl::Status status = options.Validate();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << "case " << i;
    EXPECT_THAT(std::string(status.message()), HasSubstr(cases[i].named)) << "case " << i;
  }
}

TEST(ServerOptions, InsecureTcpMustBeAskedFor) {
  ServerOptions options;
  options.listen = {"0.0.0.0:4000"};
  options.allow_insecure_tcp = true;
  EXPECT_TRUE(options.Validate().ok());
  options.listen = {"127.1.2.3:0", "localhost:1", "[::1]:2", "unix:/tmp/a.sock"};
  EXPECT_TRUE(options.Validate().ok()) << options.Validate();
  options.allow_insecure_tcp = false;
  options.listen = {"unix:/tmp/a.sock"};
  EXPECT_TRUE(options.Validate().ok()) << options.Validate();
}

TEST(ServerOptions, RemoteMetricsMustBeAskedFor) {
  ServerOptions options;
  options.metrics_listen = "0.0.0.0:9464";
  options.allow_remote_metrics = true;
  EXPECT_TRUE(options.Validate().ok()) << options.Validate();
  options.allow_remote_metrics = false;
  options.metrics_listen = "127.0.0.1:9464";
  EXPECT_TRUE(options.Validate().ok()) << options.Validate();
}

TEST(ByteSizes, NumbersAndUnits) {
  const std::vector<std::pair<const char*, uint64_t>> cases = {
      {"0", 0},
      {"12884901888", uint64_t{12} << 30},
      {"64KiB", uint64_t{64} << 10},
      {"512MiB", uint64_t{512} << 20},
      {"12GiB", uint64_t{12} << 30},
      {"1TiB", uint64_t{1} << 40},
  };
  for (const auto& [text, bytes] : cases) {
    ByteSize size;
    std::string error;
    EXPECT_TRUE(AbslParseFlag(text, &size, &error)) << text << ": " << error;
    EXPECT_EQ(size.bytes, bytes) << text;
  }
  for (const char* const text : {"", "GiB", "-1", "1.5GiB", "12GB", "12 GiB", "12gib", "+1",
                                 "16777216TiB", "18446744073709551616", "1MiBMiB", "5MiBKiB"}) {
    ByteSize size;
    std::string error;
    EXPECT_FALSE(AbslParseFlag(text, &size, &error)) << text;
    EXPECT_THAT(error, HasSubstr("GiB"));
  }
  EXPECT_EQ(AbslUnparseFlag(ByteSize{uint64_t{1} << 30}), "1073741824");
}

TEST(ListenAddress, KeepsWhatItParsed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"unix:a.sock", "unix:a.sock"},
      {"unix:/run/a.sock", "unix:/run/a.sock"},
      {"unix:///run/a.sock", "unix:/run/a.sock"},
      {"127.0.0.1:80", "127.0.0.1:80"},
      {"[::1]:80", "[::1]:80"},
  };
  for (const auto& [text, expected] : cases) {
    const auto address = ParseListenAddress("listen", text);
    ASSERT_TRUE(address.ok()) << address.status();
    EXPECT_EQ(address->ToString(), expected);
  }
}

TEST(PolicyText, NameAndParameters) {
  const auto policy = ParsePolicyText("error-target:tolerance=0.1,floor=0.02");
  ASSERT_TRUE(policy.ok());
  EXPECT_EQ(policy->preset(), "error-target");
  EXPECT_EQ(policy->parameters().at("tolerance"), "0.1");
  EXPECT_EQ(policy->parameters().at("floor"), "0.02");
  EXPECT_FALSE(ParsePolicyText("dense:x").ok());
  EXPECT_FALSE(ParsePolicyText("dense:=1").ok());
}

class ConfigFile : public ::testing::Test {
 protected:
  ConfigFile() : path_(::testing::TempDir() + "/attnd-config-" + std::to_string(getpid())) {}
  ~ConfigFile() override { std::remove(path_.c_str()); }
  absl::StatusOr<v1::ServerConfig> Read(const std::string& text) {
    std::ofstream(path_) << text;
    return ReadConfigFile(path_);
  }
  const std::string path_;
};

TEST_F(ConfigFile, SetsWhatItNames) {
  const auto config = Read(
      "listen: 'unix:/tmp/a' listen: '127.0.0.1:1' max_rows: 7 memory_budget_bytes: 0\n"
      "default_policy { preset: 'streaming' parameters { key: 'sink' value: '8' } }\n"
      "allow_insecure_tcp: true audit_share: 0.25 label_channels: '/c' label_channels: '/d'");
  ASSERT_TRUE(config.ok()) << config.status();
  ServerOptions options;
  ASSERT_TRUE(ApplyConfig(*config, &options).ok());
  EXPECT_THAT(options.listen, ElementsAre("unix:/tmp/a", "127.0.0.1:1"));
  EXPECT_EQ(options.max_rows, 7u);
  EXPECT_EQ(options.max_streams, ServerOptions().max_streams);
  EXPECT_EQ(options.default_policy.preset, "streaming");
  EXPECT_EQ(options.default_policy.sink, 8u);
  EXPECT_TRUE(options.allow_insecure_tcp);
  EXPECT_EQ(options.audit_share, 0.25);
  EXPECT_EQ(options.audit_cpu_share, ServerOptions().audit_cpu_share);
  EXPECT_THAT(ToEngineOptions(options, Machine()).label_channels, ElementsAre("/c", "/d"));
}

TEST_F(ConfigFile, MistakesNameLineAndColumn) {
  const auto config = Read("max_rows: 7\nmax_rowz: 8\n");
  ASSERT_FALSE(config.ok());
  EXPECT_THAT(std::string(config.status().message()), HasSubstr("line 2"));
  EXPECT_THAT(std::string(config.status().message()), HasSubstr("max_rowz"));
  EXPECT_FALSE(ReadConfigFile("/nowhere/attnd.config").ok());
}

TEST_F(ConfigFile, APolicyThatDoesNotExistIsRefused) {
  const auto config = Read("default_policy { preset: 'psychic' }");
  ASSERT_TRUE(config.ok());
  ServerOptions options;
  EXPECT_FALSE(ApplyConfig(*config, &options).ok());
}

TEST(Arguments, DashesUnderscoresAndRepeatedFlags) {
  const auto result = NormaliseArguments(
      {"attnd", "--data-dir", "/d-x_y", "--listen", "unix:/a-b", "--policy-file=/p", "--max-rows=3",
       "--listen=127.0.0.1:0", "--noallow-insecure-tcp", "--policy_file", "/q-r",
       "--label-channels=/c", "--label-channels=/d", "--feature-maps=/e", "--feature-maps=/f",
       "--nopage-prefetch"});
  EXPECT_THAT(result.arguments,
              ElementsAre("attnd", "--policy_file=/p,/q-r", "--listen=unix:/a-b,127.0.0.1:0",
                          "--label_channels=/c,/d", "--feature_maps=/e,/f", "--data_dir", "/d-x_y",
                          "--max_rows=3", "--noallow_insecure_tcp", "--nopage_prefetch"));
  EXPECT_THAT(result.given, UnorderedElementsAre("data_dir", "listen", "policy_file", "max_rows",
                                                 "allow_insecure_tcp", "label_channels",
                                                 "feature_maps", "page_prefetch"));
}

TEST(Arguments, NothingAfterTheDoubleDashIsAFlag) {
  const auto result = NormaliseArguments({"attnd", "--", "--data-dir"});
  EXPECT_THAT(result.arguments, ElementsAre("attnd", "--", "--data-dir"));
}

TEST(ServerOptions, GrpcMemoryFollowsTheMachineAndTheMessages) {
  Machine machine;
  machine.memory_bytes = uint64_t{16} << 30;
  ServerOptions options;
  EXPECT_EQ(GrpcMemoryBytes(options, machine), uint64_t{4} << 30);
  machine.memory_bytes = uint64_t{1} << 30;
  EXPECT_EQ(GrpcMemoryBytes(options, machine), uint64_t{512} << 20);
  options.max_message_bytes = uint64_t{1} << 20;
  EXPECT_EQ(GrpcMemoryBytes(options, machine), uint64_t{256} << 20);
  options.grpc_memory_bytes = uint64_t{20} << 20;
  EXPECT_EQ(GrpcMemoryBytes(options, machine), uint64_t{20} << 20);
  EXPECT_TRUE(options.Validate().ok()) << options.Validate();
}

TEST(EngineOptions, ZeroMeansTheMachine) {
  Machine machine;
  machine.cores = 6;
  machine.memory_bytes = 1000;
  ServerOptions options;
  EXPECT_EQ(ToEngineOptions(options, machine).memory_budget_bytes, 500u);
  EXPECT_EQ(ToEngineOptions(options, machine).index_threads, 6u);
  options.memory_budget_bytes = 77;
  options.index_threads = 2;
  EXPECT_EQ(ToEngineOptions(options, machine).memory_budget_bytes, 77u);
  EXPECT_EQ(ToEngineOptions(options, machine).index_threads, 2u);
}

TEST(EngineOptions, AuditsAreTheOperatorsChoice) {
  ServerOptions options;
  EXPECT_EQ(ToEngineOptions(options, Machine()).audit.share, 0.01);
  EXPECT_EQ(ToEngineOptions(options, Machine()).audit.cpu_share, 0.01);
  options.audit_share = 0;
  options.audit_cpu_share = 1;
  EXPECT_EQ(ToEngineOptions(options, Machine()).audit.share, 0);
  EXPECT_EQ(ToEngineOptions(options, Machine()).audit.cpu_share, 1);
}

}  // namespace
}  // namespace attnd::server
