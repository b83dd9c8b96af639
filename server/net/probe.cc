// SPDX-License-Identifier: Apache-2.0
#include "server/net/probe.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/channel.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"

namespace attnd::server {
namespace {

// grpc.health.v1.HealthCheckResponse with status (field 1) SERVING (1). The distribution ships no
// generated code for these messages, and the request for the whole server is empty.
constexpr char kServing[] = "\x08\x01";

std::string ToText(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (!buffer.Dump(&slices).ok()) return text;
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

}  // namespace

absl::Status Probe(const std::string& address, std::chrono::milliseconds timeout) {
  grpc::GenericStub stub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  const grpc::ByteBuffer request(nullptr, 0);
  grpc::CompletionQueue queue;
  const auto call =
      stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &queue);
  call->StartCall();
  grpc::ByteBuffer reply;
  grpc::Status status;
  call->Finish(&reply, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (!status.ok()) {
    return absl::UnavailableError(absl::StrCat(address, ": ", status.error_message()));
  }
  if (ToText(reply) != kServing) return absl::UnavailableError(address + " is not serving");
  return absl::OkStatus();
}

}  // namespace attnd::server
