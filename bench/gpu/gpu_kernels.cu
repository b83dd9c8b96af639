// SPDX-License-Identifier: Apache-2.0
//
// Times a step's kernels on one layer that lies in device memory, and checks their answers against
// plain loops in double precision on a small layer. Needs nothing but the planner, the kernels and
// a GPU, so that a kernel can be changed and tried in a minute; parity with the CPU backend is
// tests/gpu's.
//
//   gpu_kernels [--check] [--bench] [--launches] [--only=TEXT] [--shape=0..3]
//               [--no-cooperative-groups]
//
// --launches: one step at a time as the service runs it, with its copies, launched one by one and
// from a graph.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bench/gpu/gpu_layer.cuh"
#include "bench/gpu/gpu_memory.cuh"
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu {
namespace {

const StepKernels& KernelsFor(uint32_t dim) {
  const StepKernels* kernels = StepKernelsFor({DType::kBf16, dim, dim});
  if (kernels != nullptr) return *kernels;
  std::fprintf(stderr, "no kernels for head_dim %u\n", dim);
  std::exit(2);
}

constexpr int kStages = 9;
const char* const kStageNames[kStages] = {"prepare", "read",     "score",  "select", "all",
                                          "measure", "estimate", "chosen", "merge"};

cudaStream_t side = nullptr;
cudaEvent_t fork, join;

// All of the layer's units have groups of one size, so that there is one launch. overlap: prepare
// runs right before.
void LaunchGroups(const StepHeader& step, const StepKernels& kernels, bool overlap,
                  cudaStream_t stream) {
  for (uint32_t size = 0; size < kCoopSizes; ++size) {
    if (step.coop_counts[size] == 0) continue;
    CHECK_CUDA(kernels.cooperative(step, size, overlap, stream));
  }
}

void RunStep(const StepHeader& step, uint32_t dim, bool clusters, bool measure, uint32_t sms,
             cudaStream_t stream, cudaEvent_t* events) {
  const StepKernels& kernels = KernelsFor(dim);
  const auto mark = [&](int i) {
    if (events != nullptr) CHECK_CUDA(cudaEventRecord(events[i], stream));
  };
  const bool overlap = events == nullptr;
  mark(0);
  if (CoopUnits(step) == step.units) {
    LaunchGroups(step, kernels, /*overlap=*/false, stream);
    for (int i = 1; i <= 9; ++i) mark(i);
    return;
  }
  CHECK_CUDA(kernels.prepare(step, /*beside_gate=*/false, stream));
  mark(1);
  if (clusters && side != nullptr) {
    CHECK_CUDA(cudaEventRecord(fork, stream));
    CHECK_CUDA(cudaStreamWaitEvent(side, fork));
    CHECK_CUDA(kernels.read(step, sms, false, side));
    CHECK_CUDA(cudaEventRecord(join, side));
  } else {
    CHECK_CUDA(kernels.read(step, sms, overlap, stream));
  }
  mark(2);
  if (clusters) CHECK_CUDA(kernels.score(step, sms, stream));
  mark(3);
  if (clusters) CHECK_CUDA(LaunchSelect(step, stream));
  if (clusters && side != nullptr) CHECK_CUDA(cudaStreamWaitEvent(stream, join));
  mark(4);
  if (measure) CHECK_CUDA(kernels.estimate(step, true, stream));
  mark(5);
  if (measure) CHECK_CUDA(LaunchMeasure(step, dim, stream));
  mark(6);
  if (clusters && side != nullptr) {
    CHECK_CUDA(cudaEventRecord(fork, stream));
    CHECK_CUDA(cudaStreamWaitEvent(side, fork));
    CHECK_CUDA(kernels.estimate(step, false, side));
    CHECK_CUDA(cudaEventRecord(join, side));
  } else if (clusters) {
    CHECK_CUDA(kernels.estimate(step, false, stream));
  }
  mark(7);
  if (clusters) CHECK_CUDA(kernels.chosen(step, sms, stream));
  if (clusters && side != nullptr) CHECK_CUDA(cudaStreamWaitEvent(stream, join));
  mark(8);
  CHECK_CUDA(kernels.merge(step, overlap && !clusters, stream));
  mark(9);
}

std::vector<Policy> Policies() {
  const double off = std::numeric_limits<double>::infinity();
  const auto make = [](const char* name, UnitKind kind, CutKind cut, bool second, double a,
                       double b) {
    Policy p;
    p.name = name, p.kind = kind, p.cut = cut, p.second_order = second;
    if (cut == CutKind::kTopK) p.exact_share = a, p.estimated_share = b;
    if (cut == CutKind::kTopP) p.p2 = a, p.p1 = b;
    if (cut == CutKind::kErrorBudget) p.floor = a, p.tolerance = b;
    return p;
  };
  const auto c = UnitKind::kClusters;
  return {make("dense", UnitKind::kDense, CutKind::kTopK, false, 0, 0),
          make("streaming", UnitKind::kStreaming, CutKind::kTopK, false, 0, 0),
          make("clusters-top-k 1.8% + 23.2%", c, CutKind::kTopK, false, 0.018, 0.232),
          make("double-p 0.7 / 0.95", c, CutKind::kTopP, false, 0.7, 0.95),
          make("error-target 2%, tolerance off", c, CutKind::kErrorBudget, true, 0.02, off),
          make("error-target 1%, tolerance 0.2", c, CutKind::kErrorBudget, true, 0.01, 0.2),
          make("clusters-top-k 2%", c, CutKind::kTopK, false, 0.02, 0.98),
          make("clusters-top-k 5%", c, CutKind::kTopK, false, 0.05, 0.95),
          make("clusters-top-k 10%", c, CutKind::kTopK, false, 0.10, 0.90),
          make("clusters-top-k 37%", c, CutKind::kTopK, false, 0.37, 0.63),
          make("error-target 37%, tolerance off", c, CutKind::kErrorBudget, true, 0.37, off)};
}

// What of everything the command line asks for.
struct Selected {
  std::string only;
  int shape = -1;
  bool cooperative_groups = true;

  bool Has(const Policy& policy) const {
    return only.empty() || std::string(policy.name).find(only) != std::string::npos;
  }
};
bool Measures(const Policy& policy) {
  return policy.second_order && std::isfinite(policy.tolerance);
}

int CheckAll(uint32_t sms, const Selected& selected) {
  const Shape shapes[] = {{1, 1500, 2, 4, 128, 1, 100},
                          {2, 9000, 2, 4, 128, 3, 300},
                          {1, 3000, 1, 16, 128, 2, 65},
                          {1, 2500, 2, 1, 64, 8, 1100},
                          {1, 2500, 1, 8, 256, 2, 64}};
  int checks = 0, failures = 0;
  for (const Shape& shape : shapes) {
    std::printf(
        "rows %u, tokens %u, KV heads %u, group %u, head_dim %u, query tokens %u, tail %u\n",
        shape.rows, shape.tokens, shape.kv_heads, shape.group, shape.dim, shape.query_tokens,
        shape.tail);
    Layer layer(shape, /*consistent=*/true);
    for (const Policy& policy : Policies()) {
      if (!selected.Has(policy)) continue;
      const StepHeader step = layer.Plan(policy, selected.cooperative_groups);
      RunStep(step, shape.dim, policy.kind == UnitKind::kClusters, Measures(policy), sms, nullptr,
              nullptr);
      CHECK_CUDA(cudaDeviceSynchronize());
      ++checks;
      if (!(layer.Reference(policy, step) < 1e-2)) ++failures;
    }
  }
  if (checks == 0) {
    std::printf("nothing was checked: no policy is called %s\n", selected.only.c_str());
    return 1;
  }
  std::printf(failures == 0 ? "all answers agree\n" : "%d checks FAILED\n", failures);
  return failures == 0 ? 0 : 1;
}

constexpr Shape kShapes[] = {{4, 131072, 8, 4, 128, 1, 64},
                             {1, 131072, 8, 4, 128, 1, 64},
                             {8, 32768, 8, 4, 128, 1, 64},
                             {4, 131072, 8, 4, 64, 1, 64}};

float Median(std::vector<float> x) {
  std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
  return x[x.size() / 2];
}

void CreateSideStream() {
  CHECK_CUDA(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  CHECK_CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  CHECK_CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
}

void BenchAll(uint32_t sms, const Selected& selected) {
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  cudaEvent_t events[kStages + 1];
  for (auto& event : events) CHECK_CUDA(cudaEventCreate(&event));
  for (const Shape& shape : kShapes) {
    if (selected.shape >= 0 && &shape != &kShapes[selected.shape]) continue;
    std::printf("%u x %u tokens, head_dim %u: microseconds, median of 30 in one stream\n",
                shape.rows, shape.tokens, shape.dim);
    Layer layer(shape, /*consistent=*/false);
    for (const Policy& policy : Policies()) {
      if (!selected.Has(policy)) continue;
      const bool clusters = policy.kind == UnitKind::kClusters;
      const bool measure = Measures(policy);
      const StepHeader step = layer.Plan(policy, selected.cooperative_groups);
      // Whole steps from a graph, as peers are timed; stages from events between launches.
      cudaGraph_t graph;
      cudaGraphExec_t executable;
      RunStep(step, shape.dim, clusters, measure, sms, stream, nullptr);
      CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      RunStep(step, shape.dim, clusters, measure, sms, stream, nullptr);
      CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
      CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
      std::vector<float> whole, stage[kStages];
      for (int i = 0; i < 40; ++i) {
        CHECK_CUDA(cudaEventRecord(events[0], stream));
        CHECK_CUDA(cudaGraphLaunch(executable, stream));
        CHECK_CUDA(cudaEventRecord(events[1], stream));
        CHECK_CUDA(cudaStreamSynchronize(stream));
        float ms;
        CHECK_CUDA(cudaEventElapsedTime(&ms, events[0], events[1]));
        if (i >= 10) whole.push_back(ms * 1000);
      }
      // Back to back, so that no launch latency of the host shows.
      CHECK_CUDA(cudaEventRecord(events[0], stream));
      for (int i = 0; i < 30; ++i) CHECK_CUDA(cudaGraphLaunch(executable, stream));
      CHECK_CUDA(cudaEventRecord(events[1], stream));
      CHECK_CUDA(cudaStreamSynchronize(stream));
      float back_to_back;
      CHECK_CUDA(cudaEventElapsedTime(&back_to_back, events[0], events[1]));
      const cudaStream_t other = std::exchange(side, nullptr);
      for (int i = 0; i < 40; ++i) {
        RunStep(step, shape.dim, clusters, measure, sms, stream, events);
        CHECK_CUDA(cudaStreamSynchronize(stream));
        for (int s = 0; s < kStages; ++s) {
          float ms;
          CHECK_CUDA(cudaEventElapsedTime(&ms, events[s], events[s + 1]));
          if (i >= 10) stage[s].push_back(ms * 1000);
        }
      }
      side = other;
      std::printf("  %-34s %8.1f  each of 30 %8.1f |", policy.name, Median(whole),
                  back_to_back * 1000 / 30);
      for (int s = 0; s < kStages; ++s) std::printf(" %s %.1f", kStageNames[s], Median(stage[s]));
      std::printf("\n");
      std::fflush(stdout);
      CHECK_CUDA(cudaGraphExecDestroy(executable));
      CHECK_CUDA(cudaGraphDestroy(graph));
    }
  }
}

// A step as the service runs it, between pinned host memory and back: its description and queries
// are copied there, with new tokens that prepare puts into their pages, and its answers back.
class WholeStep {
 public:
  WholeStep(const StepHeader& step, const Policy& policy, uint32_t dim, uint32_t sms)
      : step_(step),
        policy_(policy),
        dim_(dim),
        sms_(sms),
        out_(ToHost(step.answer, 1).front().out) {
    CHECK_CUDA(cudaMallocHost(&input_, kInputBytes));
    CHECK_CUDA(cudaMallocHost(&output_, OutputBytes()));
    device_input_ = NewOnDevice<std::byte>(kInputBytes);
    uploads_ = NewOnDevice<std::byte>(kInputBytes);
    std::vector<UploadRef> refs;
    for (uint32_t head = 0; head < 2 * step.kv_heads; ++head) {
      refs.push_back({uploads_ + head * dim * 2, head * dim * 2, dim * 2});
    }
    refs_ = OnDevice(refs);
    step_.upload_data = device_input_;
    step_.upload_refs = refs_;
    step_.uploads = static_cast<uint32_t>(refs.size());
  }
  ~WholeStep() {
    cudaFree(refs_);
    cudaFree(uploads_);
    cudaFree(device_input_);
    cudaFreeHost(output_);
    cudaFreeHost(input_);
  }

  void Enqueue(cudaStream_t stream, bool kernels_alone) const {
    if (!kernels_alone) {
      CHECK_CUDA(
          cudaMemcpyAsync(device_input_, input_, kInputBytes, cudaMemcpyHostToDevice, stream));
    }
    if (CoopUnits(step_) == step_.units) {
      CHECK_CUDA(KernelsFor(dim_).prepare(step_, /*beside_gate=*/false, stream));
      LaunchGroups(step_, KernelsFor(dim_), /*overlap=*/true, stream);
    } else {
      RunStep(step_, dim_, policy_.kind == UnitKind::kClusters, Measures(policy_), sms_, stream,
              nullptr);
    }
    if (!kernels_alone) {
      CHECK_CUDA(cudaMemcpyAsync(output_, out_, OutputBytes(), cudaMemcpyDeviceToHost, stream));
    }
  }

 private:
  static constexpr size_t kInputBytes = 16 << 10;
  size_t OutputBytes() const {
    return size_t{step_.query_tokens} * step_.kv_heads * step_.group * dim_ * sizeof(float);
  }
  StepHeader step_;
  const Policy policy_;
  const uint32_t dim_;
  const uint32_t sms_;
  const std::byte* const out_;
  std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
  std::byte* device_input_ = nullptr;
  std::byte* uploads_ = nullptr;
  UploadRef* refs_ = nullptr;
};

// Microseconds that the host waits for `run` and the stream's end, the median of many with a pause
// before each.
template <typename Run>
float MicrosecondsOf(Run run, cudaStream_t stream, std::chrono::microseconds pause) {
  using Clock = std::chrono::steady_clock;
  std::vector<float> times;
  for (int i = 0; i < 400; ++i) {
    for (const auto until = Clock::now() + pause; Clock::now() < until;) continue;
    const auto begin = Clock::now();
    run();
    CHECK_CUDA(cudaStreamSynchronize(stream));
    const std::chrono::duration<float, std::micro> time = Clock::now() - begin;
    if (i >= 100) times.push_back(time.count());
  }
  return Median(times);
}

void BenchLaunches(uint32_t sms, const Selected& selected) {
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  for (const Shape& shape : kShapes) {
    if (selected.shape >= 0 && &shape != &kShapes[selected.shape]) continue;
    std::printf("%u x %u tokens, head_dim %u: microseconds the host waits for one step\n",
                shape.rows, shape.tokens, shape.dim);
    Layer layer(shape, /*consistent=*/false);
    for (const Policy& policy : Policies()) {
      if (!selected.Has(policy)) continue;
      const WholeStep step(layer.Plan(policy, selected.cooperative_groups), policy, shape.dim, sms);
      step.Enqueue(stream, /*kernels_alone=*/false);
      for (const int pause : {0, 200}) {
        std::printf("  %-34s %3d us apart:", policy.name, pause);
        for (const bool alone : {false, true}) {
          cudaGraph_t graph;
          cudaGraphExec_t executable;
          CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
          step.Enqueue(stream, alone);
          CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
          CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
          std::vector<float> on_device;
          const auto one_by_one = [&] { step.Enqueue(stream, alone); };
          const auto from_graph = [&] { CHECK_CUDA(cudaGraphLaunch(executable, stream)); };
          const auto between_events = [&] {
            CHECK_CUDA(cudaEventRecord(begin, stream));
            step.Enqueue(stream, alone);
            CHECK_CUDA(cudaEventRecord(end, stream));
            CHECK_CUDA(cudaStreamSynchronize(stream));
            float ms;
            CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
            on_device.push_back(ms * 1000);
          };
          const std::chrono::microseconds wait(pause);
          std::printf(" %s one by one %.1f, from a graph %.1f,", alone ? "kernels" : "whole",
                      MicrosecondsOf(one_by_one, stream, wait),
                      MicrosecondsOf(from_graph, stream, wait));
          MicrosecondsOf(between_events, stream, wait);
          std::printf(" between events %.1f;", Median(on_device));
          CHECK_CUDA(cudaGraphExecDestroy(executable));
          CHECK_CUDA(cudaGraphDestroy(graph));
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace
}  // namespace attnd::gpu

int main(int argc, char** argv) {
  bool check = false, bench = false, launches = false;
  attnd::gpu::Selected selected;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--check") check = true;
    if (arg == "--bench") bench = true;
    if (arg == "--launches") launches = true;
    if (arg == "--no-cooperative-groups") selected.cooperative_groups = false;
    if (arg.rfind("--only=", 0) == 0) selected.only = arg.substr(7);
    if (arg.rfind("--shape=", 0) == 0) selected.shape = std::atoi(arg.c_str() + 8) % 4;
  }
  cudaDeviceProp properties;
  attnd::gpu::Check(cudaGetDeviceProperties(&properties, 0), "device");
  std::printf("%s, %d multiprocessors\n", properties.name, properties.multiProcessorCount);
  const auto sms = static_cast<uint32_t>(properties.multiProcessorCount);
  int result = 0;
  if (check) result = attnd::gpu::CheckAll(sms, selected);
  if (bench || launches) attnd::gpu::CreateSideStream();
  if (bench) attnd::gpu::BenchAll(sms, selected);
  if (launches) attnd::gpu::BenchLaunches(sms, selected);
  return result;
}
