// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/health.h"

#include <string>
#include <vector>

#include "client/cpp/rpc_status.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"

namespace attnd::client {
namespace {

// HealthCheckRequest: field 1, the service's name.
grpc::ByteBuffer Request(absl::string_view service) {
  std::string bytes = "\x0a";
  bytes.push_back(static_cast<char>(service.size()));
  bytes.append(service.data(), service.size());
  const grpc::Slice slice(bytes);
  return {&slice, 1};
}

// HealthCheckResponse: field 1, the status; SERVING is 1.
bool IsServing(const grpc::ByteBuffer& reply) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (!reply.Dump(&slices).ok()) return false;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes == "\x08\x01";
}

}  // namespace

absl::Status CheckHealth(const std::shared_ptr<grpc::Channel>& channel, absl::string_view service,
                         std::chrono::milliseconds timeout) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  context.set_wait_for_ready(true);
  grpc::CompletionQueue queue;
  const auto call =
      stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", Request(service), &queue);
  call->StartCall();
  grpc::ByteBuffer reply;
  grpc::Status status;
  call->Finish(&reply, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (!status.ok()) return FromGrpc(status);
  return IsServing(reply) ? absl::OkStatus() : absl::UnavailableError("health is NOT_SERVING");
}

}  // namespace attnd::client
