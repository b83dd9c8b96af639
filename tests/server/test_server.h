// SPDX-License-Identifier: Apache-2.0
//
// TestServer: a whole server in the test's process, on a Unix socket in a temporary directory, with
// stubs to talk to it.
#ifndef ATTND_TESTS_SERVER_TEST_SERVER_H_
#define ATTND_TESTS_SERVER_TEST_SERVER_H_

#include <memory>
#include <string>

#include "attnd/v1/attnd.grpc.pb.h"
#include "engine/engine.h"
#include "grpcpp/channel.h"
#include "server/metrics/metrics.h"
#include "server/options/options.h"
#include "server/server.h"

namespace attnd::testing {

// Options with a socket below `directory` and the limits that tests want.
server::ServerOptions TestOptions(const std::string& directory);

// The engine that the server's options ask for; without its archive in data_dir unless `on_disk`.
// lease_clock: as EngineOptions'.
std::unique_ptr<engine::Engine> MakeTestEngine(const server::ServerOptions& options,
                                               bool on_disk = false,
                                               engine::Lease::Clock lease_clock = nullptr);

// A directory that dies with this.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Owns the server; the engine belongs to the caller. A failure to start ends the test program.
class TestServer {
 public:
  // mps_control: as Machine's.
  TestServer(const server::ServerOptions& options, engine::Engine* engine,
             const std::string& mps_control = "");
  ~TestServer();

  server::Server& server() { return *server_; }
  server::Metrics& metrics() { return metrics_; }
  const std::string& address() const { return server_->addresses()[0]; }
  // A stub with a connection of its own.
  std::unique_ptr<v1::Attnd::Stub> NewStub() const;
  // The value of a counter or gauge, a histogram's count; labels as "{name=value}" after the name.
  double Metric(const std::string& key) const;

 private:
  server::Metrics metrics_;
  std::unique_ptr<server::Server> server_;
};

std::shared_ptr<grpc::Channel> NewChannel(const std::string& address);

// [tokens, heads, dim] of dtype, all elements the same.
void FillTensor(uint32_t tokens, uint32_t heads, uint32_t dim, float value, v1::Tensor* tensor,
                v1::DType dtype = v1::DTYPE_FP32);

// A message of one row and one token, 2 query heads and 1 KV head of 16 elements.
v1::DecodeRequest SmallStep(uint64_t sequence_id = 1, uint64_t position = 0, float value = 1.0f);
// One sequence for such messages: 1 layer, fp32.
v1::OpenSequenceRequest SmallModel();

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVER_TEST_SERVER_H_
