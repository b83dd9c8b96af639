// SPDX-License-Identifier: Apache-2.0
#include "server/calls/handler.h"

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "server/calls/conversions.h"

namespace attnd::server {

absl::StatusOr<std::string> TenantOf(const grpc::CallbackServerContext& context) {
  const auto [first, last] = context.client_metadata().equal_range(kTenantKey);
  if (first == last) return std::string();
  if (std::next(first) != last) {
    return absl::InvalidArgumentError(absl::StrCat("metadata ", kTenantKey, " is there twice"));
  }
  const grpc::string_ref tenant = first->second;
  // The socket's permissions are what makes the name worth believing.
  if (!tenant.empty() && context.peer().rfind("unix:", 0) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", kTenantKey, " is accepted on a Unix socket only"));
  }
  if (tenant.size() > kTenantBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("metadata ", kTenantKey, " has ", tenant.size(),
                                                   " bytes; allowed are 0..", kTenantBytesMax));
  }
  return std::string(tenant.data(), tenant.size());
}

absl::Status AdmitStream(HandlerContext* handlers, const grpc::CallbackServerContext& context,
                         const std::shared_ptr<ManagedStream>& stream, std::string* tenant) {
  ATTND_ASSIGN_OR_RETURN(*tenant, TenantOf(context));
  absl::Status status = handlers->streams->Add(stream);
  if (absl::IsResourceExhausted(status)) handlers->metrics->OnRejected(Rejection::kStreams);
  if (absl::IsUnavailable(status)) handlers->metrics->OnRejected(Rejection::kShutdown);
  return status;
}

absl::Status ParseMessage(HandlerContext* handlers, grpc::ByteBuffer* bytes,
                          google::protobuf::Message* request) {
  absl::Status status = handlers->requests->Parse(bytes, request);
  if (absl::IsResourceExhausted(status)) handlers->metrics->OnRejected(Rejection::kMemory);
  return status;
}

absl::Status ClientGone() { return absl::CancelledError("the client is gone"); }
absl::Status ShuttingDown() { return absl::UnavailableError("the server is shutting down"); }

absl::StatusCode CodeOfEnd(const absl::Status& status, const grpc::CallbackServerContext& context) {
  return status.ok() && context.IsCancelled() ? absl::StatusCode::kCancelled : status.code();
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const absl::string_view message = CutMessage(status.message());
  return {static_cast<grpc::StatusCode>(status.code()), std::string(message)};
}

}  // namespace attnd::server
