// SPDX-License-Identifier: Apache-2.0
#include "tests/server/test_server.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "attention/cpu/cpu_backend.h"
#include "common/dtype.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"

namespace attnd::testing {
namespace {

[[noreturn]] void Die(const absl::Status& status) {
  std::fprintf(stderr, "test server: %s\n", status.ToString().c_str());
  std::abort();
}

}  // namespace

server::ServerOptions TestOptions(const std::string& directory) {
  server::ServerOptions options;
  options.listen = {"unix:" + directory + "/run/attnd.sock"};
  options.data_dir = directory + "/data";
  options.memory_budget_bytes = uint64_t{64} << 20;
  options.step_threads = 2;
  options.index_threads = 2;
  options.segment_tokens = 512;
  options.reply_timeout_s = 1;
  return options;
}

std::unique_ptr<engine::Engine> MakeTestEngine(const server::ServerOptions& options, bool on_disk,
                                               engine::Lease::Clock lease_clock) {
  engine::EngineOptions engine_options = server::ToEngineOptions(options, server::Machine());
  if (on_disk) engine_options.archive = server::ToArchiveOptions(options);
  engine_options.lease_clock = std::move(lease_clock);
  auto engine = engine::Engine::Create(
      engine_options, attention::MakeCpuBackend({.threads = options.step_threads}), nullptr);
  if (!engine.ok()) Die(engine.status());
  return *std::move(engine);
}

TempDir::TempDir() {
  std::string pattern = std::filesystem::temp_directory_path().string() + "/attnd-test-XXXXXX";
  path_ = mkdtemp(pattern.data());
}

TempDir::~TempDir() { std::filesystem::remove_all(path_); }

TestServer::TestServer(const server::ServerOptions& options, engine::Engine* engine,
                       const std::string& mps_control) {
  server::Machine machine;
  machine.cores = 2;
  machine.memory_bytes = uint64_t{1} << 30;
  machine.mps_control = mps_control;
  auto server = server::Server::Start(options, machine, engine, &metrics_);
  if (!server.ok()) Die(server.status());
  server_ = *std::move(server);
}

TestServer::~TestServer() = default;

std::unique_ptr<v1::Attnd::Stub> TestServer::NewStub() const {
  return v1::Attnd::NewStub(NewChannel(address()));
}

double TestServer::Metric(const std::string& key) const {
  for (const prometheus::MetricFamily& family : metrics_.Collect()) {
    for (const prometheus::ClientMetric& metric : family.metric) {
      std::string name = family.name;
      for (const auto& label : metric.label) name += "{" + label.name + "=" + label.value + "}";
      if (name != key) continue;
      return family.type == prometheus::MetricType::Histogram
                 ? static_cast<double>(metric.histogram.sample_count)
                 : metric.counter.value + metric.gauge.value;
    }
  }
  return -1;
}

std::shared_ptr<grpc::Channel> NewChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

void FillTensor(uint32_t tokens, uint32_t heads, uint32_t dim, float value, v1::Tensor* tensor,
                v1::DType dtype) {
  const DType type = dtype == v1::DTYPE_FP32   ? DType::kFp32
                     : dtype == v1::DTYPE_BF16 ? DType::kBf16
                                               : DType::kFp16;
  const std::vector<float> values(size_t{tokens} * heads * dim, value);
  tensor->Clear();
  tensor->set_dtype(dtype);
  for (const uint32_t extent : {tokens, heads, dim}) tensor->add_shape(extent);
  std::string* data = tensor->mutable_data();
  data->resize(values.size() * DTypeBytes(type));
  FromFloat(type, values.data(), values.size(), reinterpret_cast<std::byte*>(data->data()));
}

v1::DecodeRequest SmallStep(uint64_t sequence_id, uint64_t position, float value) {
  v1::DecodeRequest request;
  request.set_step_id(position + 1);
  v1::DecodeRow* row = request.add_rows();
  row->set_sequence_id(sequence_id);
  row->set_position(position);
  row->set_query_tokens(1);
  FillTensor(1, 2, 16, value, request.mutable_q());
  FillTensor(1, 1, 16, value, request.mutable_k());
  FillTensor(1, 1, 16, value, request.mutable_v());
  return request;
}

v1::OpenSequenceRequest SmallModel() {
  v1::OpenSequenceRequest request;
  v1::ModelShape* shape = request.mutable_model()->mutable_shape();
  shape->set_layers(1);
  shape->set_query_heads(2);
  shape->set_kv_heads(1);
  shape->set_head_dim(16);
  shape->set_dtype(v1::DTYPE_FP32);
  return request;
}

}  // namespace attnd::testing
