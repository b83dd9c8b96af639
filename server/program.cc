// SPDX-License-Identifier: Apache-2.0
#include "server/program.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/file_lock.h"
#include "common/start_thread.h"
#include "common/status.h"
#include "engine/engine.h"
#include "glog/logging.h"
#include "google/protobuf/stubs/logging.h"
#include "grpc/support/log.h"
#include "prometheus/exposer.h"
#include "server/backend.h"
#include "server/calls/unary_handlers.h"
#include "server/metrics/metrics.h"
#include "server/net/probe.h"
#include "server/net/unix_socket.h"
#include "server/options/command_line.h"
#include "server/options/options.h"
#include "server/server.h"
#include "server/stop_request.h"

namespace attnd::server {
namespace {

constexpr auto kProbeTimeout = std::chrono::seconds(3);
// A scrape takes one thread for some milliseconds. A connection that says nothing takes one, too,
// until it times out.
constexpr char kMetricsThreads[] = "8";
constexpr char kMetricsTimeoutMs[] = "1000";
// A shutdown that has not ended by then never will.
constexpr auto kShutdownMax = std::chrono::milliseconds(9500);

// SIGTERM and SIGINT are blocked in every thread and taken by sigwait, so that no handler runs
// inside anything.
sigset_t BlockSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

int WaitForSignal(const sigset_t& signals) {
  int signal = 0;
  while (sigwait(&signals, &signal) != 0) continue;
  return signal;
}

// Takes the signals from here on: the first one ends the server, a second one the process at once.
absl::Status TakeSignals(const sigset_t& signals, const std::shared_ptr<StopRequest>& stop) {
  ATTND_ASSIGN_OR_RETURN(std::thread thread, StartThread("for signals", [signals, stop] {
                           stop->OnSignal(WaitForSignal(signals));
                           _exit(128 + WaitForSignal(signals));
                         }));
  thread.detach();
  return absl::OkStatus();
}

// Ends the process when the shutdown takes too long. A shutdown that the system refuses this thread
// goes on: most end in time.
void LimitShutdown(int exit_status) {
  absl::StatusOr<std::thread> thread = StartThread("that limits the shutdown", [exit_status] {
    std::this_thread::sleep_for(kShutdownMax);
    // Not LOG: whoever hangs may hold its lock.
    constexpr char kMessage[] = "attnd: the shutdown did not end in time\n";
    static_cast<void>(!write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1));
    _exit(exit_status);
  });
  if (thread.ok()) {
    thread->detach();
  } else {
    LOG(WARNING) << "shutdown: nothing limits its time: " << thread.status().message();
  }
}

// The endpoint of `metrics`; null if it is off.
absl::StatusOr<std::unique_ptr<prometheus::Exposer>> Expose(
    const std::string& address, const std::shared_ptr<Metrics>& metrics) {
  if (address.empty()) return nullptr;
  try {
    auto exposer = std::make_unique<prometheus::Exposer>(
        std::vector<std::string>{"listening_ports", address, "num_threads", kMetricsThreads,
                                 "request_timeout_ms", kMetricsTimeoutMs});
    exposer->RegisterCollectable(metrics);
    const std::string host = address.substr(0, address.rfind(':'));
    for (const int port : exposer->GetListeningPorts()) {
      LOG(INFO) << "metrics at http://" << host << ":" << port << "/metrics";
    }
    return exposer;
  } catch (const std::exception& error) {  // the library's own way to fail
    return absl::UnavailableError(
        absl::StrCat("metrics_listen: cannot listen at ", address, ": ", error.what()));
  }
}

void WarnOfSlowIo(const engine::ArchiveStats& stats) {
  if (!stats.why_threads.empty()) {
    LOG(WARNING) << "io_uring is refused, threads read and write in its place: "
                 << stats.why_threads;
  }
  if (!stats.direct) {
    LOG(WARNING)
        << "the file system of data_dir refuses O_DIRECT: files go by way of the page cache";
  }
}

void WarnOfMuchMemory(const ServerOptions& options, const Machine& machine) {
  const uint64_t clients = options.allow_client_memory ? options.client_memory_bytes : 0;
  if (options.memory_budget_bytes + clients <= machine.memory_bytes) return;  // each at most 2^50
  const std::string shared =
      clients > 0 ? absl::StrCat(", client_memory_bytes is ", clients, " beside it") : "";
  LOG(WARNING) << "memory_budget_bytes is " << options.memory_budget_bytes << shared
               << ", and the machine, or "
               << "the process's control group, has " << machine.memory_bytes
               << ": the system will end the process before the budget is full";
}

// What a fault of the GPU calls; null where the CPU answers instead.
std::function<void(const absl::Status&)> OnGpuFault(const ServerOptions& options,
                                                    const Machine& machine,
                                                    const std::shared_ptr<StopRequest>& stop) {
  const GpuFaultChoice choice = ChooseOnGpuFault(options, machine.mps_control);
  if (options.backend != "cpu") LOG(INFO) << "on_gpu_fault: " << choice.ToString();
  if (!choice.exit) return nullptr;
  return [stop](const absl::Status& fault) { stop->OnGpuFault(fault); };
}

// The exit status of a server that has served.
absl::StatusOr<int> Serve(const ServerOptions& options, OpenDevice open_device) {
  const auto stop = std::make_shared<StopRequest>();
  ATTND_RETURN_IF_ERROR(TakeSignals(BlockSignals(), stop));
  const Machine machine = Machine::Detect();
  WarnOfMuchMemory(options, machine);
  ATTND_RETURN_IF_ERROR(MakePrivateDirectory(options.data_dir));
  ATTND_RETURN_IF_ERROR(CheckPrivateDirectory("data_dir", options.data_dir, geteuid()));
  ATTND_ASSIGN_OR_RETURN(const FileLock lock, LockDataDir(options.data_dir));

  ATTND_ASSIGN_OR_RETURN(std::unique_ptr<attention::Backend> backend,
                         MakeBackend(options, open_device, OnGpuFault(options, machine, stop)));
  const auto metrics = std::make_shared<Metrics>();  // shared only because the exposer wants it
  engine::EngineOptions engine_options = ToEngineOptions(options, machine);
  engine_options.archive = ToArchiveOptions(options);
  ATTND_ASSIGN_OR_RETURN(const std::unique_ptr<engine::Engine> engine,
                         engine::Engine::Create(engine_options, std::move(backend), metrics.get()));
  WarnOfSlowIo(engine->archive_stats());
  metrics->SetBuildInfo(ServerVersion(), engine->backend().target());
  ATTND_ASSIGN_OR_RETURN(const std::unique_ptr<Server> server,
                         Server::Start(options, machine, engine.get(), metrics.get()));
  ATTND_ASSIGN_OR_RETURN(const auto exposer, Expose(options.metrics_listen, metrics));
  LOG(INFO) << "attnd " << ServerVersion() << " serves at "
            << absl::StrJoin(server->addresses(), ", ") << ", backend "
            << absl::StrJoin(engine->backend().names(), ", ") << " ("
            << std::string(engine->backend().target()) << "), budget "
            << engine->options().memory_budget_bytes << " bytes";

  const StopReason reason = stop->Wait();
  const int exit_status = reason.signal != 0 ? EXIT_SUCCESS : kExitGpuFault;
  if (reason.signal != 0) {
    LOG(INFO) << "signal " << reason.signal << ": shutting down";
  } else {
    LOG(ERROR) << "the GPU has failed and on_gpu_fault is exit: shutting down, exit status "
               << kExitGpuFault << ", to be started again: " << reason.gpu_fault;
  }
  // gRPC complains of the sockets that are shut down below it (connections.h).
  gpr_set_log_verbosity(static_cast<gpr_log_severity>(GPR_LOG_SEVERITY_ERROR + 1));
  LimitShutdown(exit_status == EXIT_SUCCESS ? EXIT_FAILURE : exit_status);
  server->Shutdown(ShutdownLimits());
  engine->Shutdown();
  LOG(INFO) << "shut down";
  return exit_status;
}

int Report(const absl::Status& status) {
  if (status.ok()) return EXIT_SUCCESS;
  std::fprintf(stderr, "attnd: %s\n", std::string(status.message()).c_str());
  return EXIT_FAILURE;
}

int Main(int argc, char** argv, OpenDevice open_device) {
  const auto line = ParseCommandLine(std::vector<std::string>(argv, argv + argc));
  if (!line.ok()) return Report(line.status());
  switch (line->command) {
    case Command::kHelp:
      std::fputs(HelpText().c_str(), stdout);
      return EXIT_SUCCESS;
    case Command::kVersion:
      std::printf("attnd %s\n", std::string(ServerVersion()).c_str());
      return EXIT_SUCCESS;
    case Command::kProbe:
      return Report(Probe(line->probe_address, kProbeTimeout));
    case Command::kServe: {
      const absl::StatusOr<int> served = Serve(line->options, open_device);
      return served.ok() ? *served : Report(served.status());
    }
  }
  return EXIT_FAILURE;
}

}  // namespace

int RunProgram(int argc, char** argv, OpenDevice open_device) {
  // What a client gets wrong is answered; it must not be able to fill the log.
  google::protobuf::SetLogHandler(nullptr);
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  return Main(argc, argv, open_device);
}

}  // namespace attnd::server
