// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/client.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attnd/v1/attnd.grpc.pb.h"
#include "client/cpp/chunker.h"
#include "client/cpp/decode_session.h"
#include "client/cpp/health.h"
#include "client/cpp/memory_client.h"
#include "client/cpp/memory_session_impl.h"
#include "client/cpp/rpc_status.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"

namespace attnd {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr char kTenantKey[] = "attnd-tenant";
constexpr size_t kTenantBytesMax = 256;
constexpr uint64_t kMessageBytesMax = uint64_t{1} << 30;
constexpr milliseconds kFirstPause{20};  // between attempts; doubles
constexpr milliseconds kHealthPause{20};

class ClientImpl final : public Client {
 public:
  ClientImpl(const ClientOptions& options, std::shared_ptr<grpc::Channel> channel)
      : options_(options), channel_(std::move(channel)), stub_(v1::Attnd::NewStub(channel_)) {}

  absl::Status WaitHealthy(milliseconds timeout) override;
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo() override;
  absl::StatusOr<std::vector<v1::SequenceInfo>> ListSequences() override;
  absl::StatusOr<v1::OpenSequenceResponse> OpenSequence(
      const v1::OpenSequenceRequest& request) override {
    const bool reads = request.resume_sealed_id() != 0 || request.token_ids_size() > 0;
    return Call(&v1::Attnd::Stub::OpenSequence, request,
                reads ? options_.disk_timeout : options_.timeout);
  }
  absl::StatusOr<v1::TruncateSequenceResponse> TruncateSequence(
      const v1::TruncateSequenceRequest& request) override {
    return Once(&v1::Attnd::Stub::TruncateSequence, request);
  }
  absl::StatusOr<v1::ForkSequenceResponse> ForkSequence(
      const v1::ForkSequenceRequest& request) override {
    return Once(&v1::Attnd::Stub::ForkSequence, request);
  }
  absl::Status CloseSequence(uint64_t sequence_id) override {
    v1::CloseSequenceRequest request;
    request.set_sequence_id(sequence_id);
    return Once(&v1::Attnd::Stub::CloseSequence, request).status();
  }
  absl::StatusOr<v1::RenewLeaseResponse> RenewLease(uint64_t sequence_id) override {
    v1::RenewLeaseRequest request;
    request.set_sequence_id(sequence_id);
    return Repeated(&v1::Attnd::Stub::RenewLease, request);
  }
  absl::StatusOr<v1::SealSequenceResponse> SealSequence(uint64_t sequence_id) override {
    v1::SealSequenceRequest request;
    request.set_sequence_id(sequence_id);
    return Call(&v1::Attnd::Stub::SealSequence, request, options_.disk_timeout);
  }
  absl::Status DropSealed(uint64_t sealed_id) override {
    v1::DropSealedRequest request;
    request.set_sealed_id(sealed_id);
    return Once(&v1::Attnd::Stub::DropSealed, request).status();
  }
  absl::StatusOr<std::vector<v1::SealedSequence>> ListSealed() override;
  absl::StatusOr<v1::AppendKvResponse> AppendKv(uint64_t sequence_id, const v1::ModelShape& shape,
                                                std::span<const KvBlock> blocks,
                                                std::span<const uint32_t> token_ids,
                                                const AppendOptions& options) override;
  std::unique_ptr<DecodeSession> StartDecode() override {
    return client::MakeDecodeSession(
        stub_.get(), [this] { return NewStreamContext(); }, options_.attempts);
  }
  absl::StatusOr<std::unique_ptr<MemorySession>> StartMemoryDecode(
      const MemorySessionOptions& options) override;

 private:
  template <typename Request, typename Reply>
  using Method = grpc::Status (v1::Attnd::Stub::*)(grpc::ClientContext*, const Request&, Reply*);

  void AddTenant(grpc::ClientContext* context) const {
    if (!options_.tenant.empty()) context->AddMetadata(kTenantKey, options_.tenant);
  }

  std::unique_ptr<grpc::ClientContext> NewStreamContext() const {
    auto context = std::make_unique<grpc::ClientContext>();
    AddTenant(context.get());
    return context;
  }

  template <typename Request, typename Reply>
  absl::StatusOr<Reply> Call(Method<Request, Reply> method, const Request& request,
                             milliseconds timeout) {
    grpc::ClientContext context;
    AddTenant(&context);
    context.set_deadline(std::chrono::system_clock::now() + timeout);
    Reply reply;
    absl::Status status = client::FromGrpc((stub_.get()->*method)(&context, request, &reply));
    if (!status.ok()) return status;
    return reply;
  }
  template <typename Request, typename Reply>
  absl::StatusOr<Reply> Once(Method<Request, Reply> method, const Request& request) {
    return Call(method, request, options_.timeout);
  }
  // For calls without effect only.
  template <typename Request, typename Reply>
  absl::StatusOr<Reply> Repeated(Method<Request, Reply> method, const Request& request);

  const ClientOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Attnd::Stub> stub_;
};

template <typename Request, typename Reply>
absl::StatusOr<Reply> ClientImpl::Repeated(Method<Request, Reply> method, const Request& request) {
  const auto limit = steady_clock::now() + options_.timeout;
  milliseconds pause = kFirstPause;
  for (int attempt = 1;; ++attempt, pause *= 2) {
    const auto left = std::chrono::duration_cast<milliseconds>(limit - steady_clock::now());
    auto reply = Call(method, request, left);
    const bool again = absl::IsUnavailable(reply.status()) && attempt < options_.attempts &&
                       steady_clock::now() + pause < limit;
    if (!again) return reply;
    std::this_thread::sleep_for(pause);
  }
}

absl::Status ClientImpl::WaitHealthy(milliseconds timeout) {
  const auto limit = steady_clock::now() + timeout;
  while (true) {
    const auto left = std::chrono::duration_cast<milliseconds>(limit - steady_clock::now());
    absl::Status status = client::CheckHealth(channel_, v1::Attnd::service_full_name(), left);
    if (status.ok()) return status;
    if (steady_clock::now() + kHealthPause >= limit) {
      return absl::DeadlineExceededError(absl::StrCat(options_.target, " is not serving after ",
                                                      timeout.count(), " ms: ", status.message()));
    }
    std::this_thread::sleep_for(kHealthPause);
  }
}

absl::StatusOr<v1::GetServerInfoResponse> ClientImpl::GetServerInfo() {
  return Repeated(&v1::Attnd::Stub::GetServerInfo, v1::GetServerInfoRequest());
}

absl::StatusOr<std::vector<v1::SequenceInfo>> ClientImpl::ListSequences() {
  std::vector<v1::SequenceInfo> sequences;
  v1::ListSequencesRequest request;
  do {
    auto page = Repeated(&v1::Attnd::Stub::ListSequences, request);
    if (!page.ok()) return page.status();
    for (v1::SequenceInfo& info : *page->mutable_sequences()) sequences.push_back(std::move(info));
    request.set_after_sequence_id(page->next_after_sequence_id());
  } while (request.after_sequence_id() != 0);
  return sequences;
}

absl::StatusOr<std::vector<v1::SealedSequence>> ClientImpl::ListSealed() {
  std::vector<v1::SealedSequence> sealed;
  v1::ListSealedRequest request;
  do {
    auto page = Repeated(&v1::Attnd::Stub::ListSealed, request);
    if (!page.ok()) return page.status();
    for (v1::SealedSequence& info : *page->mutable_sealed()) sealed.push_back(std::move(info));
    request.set_after_sealed_id(page->next_after_sealed_id());
  } while (request.after_sealed_id() != 0);
  return sealed;
}

absl::StatusOr<v1::AppendKvResponse> ClientImpl::AppendKv(uint64_t sequence_id,
                                                          const v1::ModelShape& shape,
                                                          std::span<const KvBlock> blocks,
                                                          std::span<const uint32_t> token_ids,
                                                          const AppendOptions& options) {
  auto chunker = client::Chunker::Create(sequence_id, shape, blocks, token_ids, options);
  if (!chunker.ok()) return chunker.status();
  grpc::ClientContext context;
  AddTenant(&context);
  context.set_deadline(std::chrono::system_clock::now() + options.timeout);
  v1::AppendKvResponse reply;
  const auto stream = stub_->AppendKv(&context, &reply);
  v1::AppendKvRequest message;
  while (chunker->Next(&message)) {
    if (!stream->Write(message)) break;  // Finish says why
  }
  stream->WritesDone();
  absl::Status status = client::FromGrpc(stream->Finish());
  if (!status.ok()) return status;
  return reply;
}

absl::StatusOr<std::unique_ptr<MemorySession>> ClientImpl::StartMemoryDecode(
    const MemorySessionOptions& options) {
  MemorySessionOptions resolved = options;
  if (resolved.socket.empty()) {
    auto socket = MemoryClient::SocketOf(options_.target);
    if (!socket.ok()) return socket.status();
    resolved.socket = *std::move(socket);
  }
  return client::MakeMemorySession(stub_.get(), NewStreamContext(), options_.tenant, resolved,
                                   options_.timeout);
}

absl::Status CheckOptions(const ClientOptions& options) {
  if (options.target.empty()) return absl::InvalidArgumentError("target is empty");
  if (options.tenant.size() > kTenantBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("tenant has ", options.tenant.size(),
                                                   " bytes; allowed are 0..", kTenantBytesMax));
  }
  const auto printable = [](char c) { return c >= ' ' && c <= '~'; };
  if (!std::all_of(options.tenant.begin(), options.tenant.end(), printable)) {
    return absl::InvalidArgumentError("tenant is not printable ASCII");
  }
  if (options.timeout <= milliseconds::zero()) {
    return absl::InvalidArgumentError("timeout is not positive");
  }
  if (options.attempts < 1) return absl::InvalidArgumentError("attempts is below 1");
  if (options.max_message_bytes == 0 || options.max_message_bytes > kMessageBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_message_bytes is ", options.max_message_bytes, "; allowed are 1..", kMessageBytesMax));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ClientOptions& options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  arguments.SetMaxSendMessageSize(-1);  // the server's limit counts
  // A server that restarts is there again soon.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  // Clients do not share a connection: each is a shard of its own.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  auto channel =
      grpc::CreateCustomChannel(options.target, grpc::InsecureChannelCredentials(), arguments);
  return std::unique_ptr<Client>(std::make_unique<ClientImpl>(options, std::move(channel)));
}

}  // namespace attnd
