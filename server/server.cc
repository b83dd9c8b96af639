// SPDX-License-Identifier: Apache-2.0
#include "server/server.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/backend.h"
#include "common/status.h"
#include "glog/logging.h"
#include "grpc/grpc.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "server/calls/handler.h"
#include "server/calls/memory_plane.h"
#include "server/memory/memory_calls.h"
#include "server/memory/memory_socket.h"
#include "server/net/connections.h"
#include "server/net/unix_socket.h"
#include "server/service.h"

namespace attnd::server {
namespace {

StepExecutor::Options StepOptions(const ServerOptions& options, const Machine& machine) {
  return {.workers = options.step_workers,
          .inline_slots = InlineSlots(machine.cores, options.step_workers),
          .queue_max = options.max_queued_steps};
}

StepExecutor::Options DiskStepOptions(const ServerOptions& options) {
  return {.workers = options.disk_step_workers,
          .inline_slots = 0,
          .queue_max = options.max_queued_steps};
}

// Uploads that wait for room at the same time: what they wait for is done by few threads.
constexpr uint32_t kRoomWaiters = 4;

StepExecutor::Options RoomWaitOptions(const ServerOptions& options) {
  return {.workers = kRoomWaiters, .inline_slots = 0, .queue_max = options.max_streams};
}

// Finished prompts that are segmented at the same time: they take turns run by run (engine.h), so
// that a short one does not wait for a long one's end.
constexpr uint32_t kPrefillWorkers = 4;

StepExecutor::Options PrefillOptions(const ServerOptions& options) {
  return {.workers = kPrefillWorkers, .inline_slots = 0, .queue_max = options.max_streams};
}

// Unary calls; as many may wait as steps.
StepExecutor::Options CallOptions(const ServerOptions& options) {
  return {.workers = kCallWorkers, .inline_slots = 0, .queue_max = options.max_queued_steps};
}

plane::RegionLimits MemoryLimits(const ServerOptions& options) {
  return {.bytes_max = options.client_memory_bytes,
          .twin_bytes_max = options.client_device_memory_bytes,
          .regions_max = options.max_memory_regions,
          .client_regions_max = kClientRegionsMax};
}

plane::RegionDevice DeviceOf(const attention::Backend* backend) {
  return {
      .map = [backend](std::byte* data, uint64_t bytes) { return backend->MapMemory(data, bytes); },
      .uuid = backend->sharing_device(),
      .make_twin = [backend](uint64_t bytes) { return backend->ShareMemory(bytes); }};
}

v1::GpuSharing GpuSharingOf(const attention::Backend& backend, const Machine& machine) {
  if (backend.device().empty()) return v1::GPU_SHARING_NONE;
  return machine.mps_control.empty() ? v1::GPU_SHARING_TIME_SLICES : v1::GPU_SHARING_MPS;
}

// Each open stream ends once.
StepExecutor::Options EndOptions(const ServerOptions& options) {
  return {.workers = 1, .inline_slots = 0, .queue_max = options.max_streams};
}

class ServerImpl final : public Server {
 public:
  ServerImpl(const ServerOptions& options, const Machine& machine, engine::Engine* engine,
             Metrics* metrics)
      : options_(options),
        machine_(machine),
        engine_(engine),
        streams_(options.max_streams, options.reply_timeout()),
        steps_(StepOptions(options, machine)),
        disk_steps_(DiskStepOptions(options)),
        room_waits_(RoomWaitOptions(options)),
        prefills_(PrefillOptions(options)),
        calls_(CallOptions(options)),
        ends_(EndOptions(options)),
        memory_(options.allow_client_memory
                    ? std::make_unique<MemoryPlane>(MemoryLimits(options),
                                                    DeviceOf(&engine->backend()),
                                                    options.max_memory_passes)
                    : nullptr),
        requests_(options, &trimmer_),
        service_(&handlers_) {
    // Never given back. The last use of gRPC that ends joins a thread that may be asleep for 10 s,
    // as it polls for writes that met a full socket: too long for a shutdown, and nobody needs it.
    grpc_init();
    handlers_.options = &options_;
    handlers_.engine = engine;
    handlers_.metrics = metrics;
    handlers_.streams = &streams_;
    handlers_.steps = &steps_;
    handlers_.disk_steps = &disk_steps_;
    handlers_.room_waits = &room_waits_;
    handlers_.prefills = &prefills_;
    handlers_.calls = &calls_;
    handlers_.ends = &ends_;
    handlers_.memory = memory_.get();
    handlers_.gpu_sharing = GpuSharingOf(engine->backend(), machine);
    metrics->SetTimeSlices(handlers_.gpu_sharing == v1::GPU_SHARING_TIME_SLICES);
    handlers_.requests = &requests_;
    handlers_.trimmer = &trimmer_;
    handlers_.open_calls = &open_calls_;
    metrics->SetSources({.usage = [engine] { return engine->usage(); },
                         .streams = [this] { return streams_.size(); },
                         .queue_depth = [this] { return steps_.queue_depth(); },
                         .queued_calls = [this] { return calls_.queue_depth(); },
                         .backend = [engine] { return engine->backend().stats(); },
                         .link_rates = [engine] { return engine->backend().link_rates(); },
                         .degraded = [engine] { return !engine->backend().Health().ok(); },
                         .archive = [engine] { return engine->archive_stats(); },
                         .client_memory = [this] { return MemoryUsage(); }});
  }
  ~ServerImpl() override {
    Shutdown(ShutdownLimits());
    handlers_.metrics->SetSources({});
  }

  absl::Status StartThreads();
  absl::Status Listen();
  const std::vector<std::string>& addresses() const override { return addresses_; }
  void Shutdown(const ShutdownLimits& limits) override;

 private:
  void SetLimits(grpc::ServerBuilder* builder) const;
  absl::Status Build(const std::vector<ListenAddress>& addresses);
  void SetServing();
  ClientMemoryUsage MemoryUsage() const;

  const ServerOptions options_;
  const Machine machine_;
  engine::Engine* const engine_;
  HandlerContext handlers_;
  HeapTrimmer trimmer_;
  OpenCalls open_calls_;
  StreamRegistry streams_;
  StepExecutor steps_;
  StepExecutor disk_steps_;
  StepExecutor room_waits_;
  StepExecutor prefills_;
  StepExecutor calls_;
  StepExecutor ends_;
  const std::unique_ptr<MemoryPlane> memory_;  // null: clients share no memory
  RequestParser requests_;
  AttndService service_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::string> addresses_;
  std::unique_ptr<MemorySocket> memory_socket_;  // null before Listen and without memory_
};

// All that a server must have. One without the trimmer would answer, and keep the memory of every
// burst of large messages for ever: who starts it shall hear of that at once.
absl::Status ServerImpl::StartThreads() {
  ATTND_RETURN_IF_ERROR(trimmer_.Start());
  ATTND_RETURN_IF_ERROR(streams_.Start());
  ATTND_RETURN_IF_ERROR(steps_.Start("for steps"));
  ATTND_RETURN_IF_ERROR(disk_steps_.Start("for steps that read from disk"));
  ATTND_RETURN_IF_ERROR(room_waits_.Start("for uploads that wait for room"));
  ATTND_RETURN_IF_ERROR(prefills_.Start("for finished prompts"));
  ATTND_RETURN_IF_ERROR(calls_.Start("for unary calls"));
  ATTND_RETURN_IF_ERROR(ends_.Start("for the ends of streams"));
  return memory_ == nullptr ? absl::OkStatus() : memory_->Start();
}

absl::Status ServerImpl::Listen() {
  const std::vector<ListenAddress> addresses = options_.ListenAddresses();
  std::vector<FileLock> locks;  // until the sockets are bound
  for (const ListenAddress& address : addresses) {
    if (!address.is_unix()) continue;
    ATTND_ASSIGN_OR_RETURN(FileLock lock, PrepareSocket(address.path));
    locks.push_back(std::move(lock));
  }
  if (memory_ != nullptr) {
    ATTND_ASSIGN_OR_RETURN(
        memory_socket_,
        MemorySocket::Listen(
            {.path = options_.MemorySocketPath(),
             .user = geteuid(),
             .clients_max = options_.max_memory_clients,
             .on_full = [this] { handlers_.metrics->OnRejected(Rejection::kClientMemory); }},
            memory_->regions()));
  }
  ATTND_RETURN_IF_ERROR(Build(addresses));
  SetServing();
  return absl::OkStatus();
}

void ServerImpl::SetLimits(grpc::ServerBuilder* builder) const {
  builder->SetMaxReceiveMessageSize(static_cast<int>(options_.max_message_bytes));
  builder->SetMaxSendMessageSize(static_cast<int>(options_.max_message_bytes));
  // Nobody needs them: keys and values do not get smaller. What a small compressed message would be
  // inflated to has no limit in gRPC.
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    builder->SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  grpc::ResourceQuota quota("attnd");
  quota.Resize(GrpcMemoryBytes(options_, machine_));
  builder->SetResourceQuota(quota);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                              static_cast<int>(options_.max_connection_streams));
  // Pings are welcome at this rate, with calls or without; whoever sends more is disconnected.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              static_cast<int>(options_.min_ping_interval_s * 1000));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 2);
  // Two servers on one port would each get some of the clients.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

absl::Status ServerImpl::Build(const std::vector<ListenAddress>& addresses) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  SetLimits(&builder);
  builder.RegisterService(&service_);
  std::vector<int> ports(addresses.size(), 0);
  for (size_t i = 0; i < addresses.size(); ++i) {
    builder.AddListeningPort(addresses[i].ToString(), grpc::InsecureServerCredentials(), &ports[i]);
  }
  {
    const PrivateUmask mask;
    server_ = builder.BuildAndStart();
  }
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (server_ == nullptr || ports[i] == 0) {
      return absl::UnavailableError(absl::StrCat("listen: cannot listen at one of the addresses, ",
                                                 addresses[i].ToString(), " perhaps"));
    }
    ListenAddress bound = addresses[i];
    if (!bound.is_unix()) bound.port = static_cast<uint16_t>(ports[i]);
    addresses_.push_back(bound.ToString());
  }
  return absl::OkStatus();
}

ClientMemoryUsage ServerImpl::MemoryUsage() const {
  if (memory_ == nullptr) return {};
  const plane::RegionTable::Usage usage = memory_->regions()->usage();
  return {.regions = usage.regions,
          .bytes = usage.bytes,
          .device_bytes = usage.twin_bytes,
          .passes = memory_->passes()};
}

void ServerImpl::SetServing() {
  grpc::HealthCheckServiceInterface* const health = server_->GetHealthCheckService();
  health->SetServingStatus(v1::Attnd::service_full_name(), true);
}

void ServerImpl::Shutdown(const ShutdownLimits& limits) {
  if (server_ == nullptr) return;
  // 1. Whoever asks is told to go elsewhere.
  server_->GetHealthCheckService()->SetServingStatus(false);
  // 2. No new sequences.
  engine_->StopOpening();
  // 3. No new streams; idle ones end, the others when their step has been answered. No new calls
  // either; those that wait for a worker are refused, those that run are brought to their end.
  streams_.StopAll();
  if (!streams_.WaitUntilEmpty(limits.steps)) {
    // 4. What is still there is cancelled.
    LOG(WARNING) << "shutdown: cancelling " << streams_.size() << " streams";
    streams_.AbortAll(ShuttingDown());
    if (!streams_.WaitUntilEmpty(limits.cancel)) {
      LOG(ERROR) << "shutdown: " << streams_.size() << " streams do not end";
    }
  }
  // 5. No pass or upload is left that uses clients' memory, which goes now.
  memory_socket_.reset();
  // 6. Calls that run are answered.
  if (!open_calls_.WaitUntilNone(limits.calls)) LOG(WARNING) << "shutdown: calls do not end";
  // 7. Clients read what they were told, then nobody is heard any more: gRPC would answer with
  // CANCELLED from here on.
  std::vector<ListenAddress> bound;
  for (const std::string& text : addresses_) {
    if (auto address = ParseListenAddress("listen", text); address.ok()) bound.push_back(*address);
  }
  std::vector<FileLock> locks;  // until the sockets' files are gone
  for (const ListenAddress& address : bound) {
    if (!address.is_unix()) continue;
    auto lock = AwaitSocketLock(address.path, limits.socket_lock);
    if (lock.ok()) {
      locks.push_back(*std::move(lock));
    } else {
      LOG(WARNING) << "shutdown: the socket goes without its lock, a server that starts there may "
                      "lose its own: "
                   << lock.status().message();
    }
  }
  ShutdownSockets(bound, limits.read);
  // 8. gRPC ends.
  server_->Shutdown(std::chrono::system_clock::now() + limits.server);
  server_->Wait();
  server_.reset();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options,
                                                      const Machine& machine,
                                                      engine::Engine* engine, Metrics* metrics) {
  auto server = std::make_unique<ServerImpl>(options, machine, engine, metrics);
  ATTND_RETURN_IF_ERROR(server->StartThreads());
  ATTND_RETURN_IF_ERROR(server->Listen());
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace attnd::server
