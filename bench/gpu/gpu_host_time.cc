// SPDX-License-Identifier: Apache-2.0
//
// How long does the host take for a decode step beside copies and kernels? Steps of error-target
// over a tree, each with a new token. Prints medians over the steps of all layers, in microseconds:
//
//   before  from the call until the device is given the step: checks, pins, the wave's bytes
//   after   from the device's answer until the return: outputs, statistics
//   device  between the two
//
// Steps are those of passes: what can be prepared of a layer is prepared before its queries are
// there, unless --ahead=false, and not counted.
//
// First through the CUDA backend alone, over a device that does nothing (idle_device.h) and over
// segments of real sizes without content. Then through an engine, over as many segments, but short
// ones: how long they are takes the host no time. With --device=cuda only the engine's steps are
// measured, on the GPU.
//
// Each is measured twice: one step after another, and with --between_kib of memory written between
// two steps, as what a server does between two steps leaves little in the processor's caches.
//
//   gpu_host_time --tokens=131072 --layers=4 --steps=512
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/policy/policy.h"
#include "bench/engine_support.h"
#include "bench/gpu/idle_device.h"
#include "bench/gpu/timed_device.h"
#include "bench/statistics.h"
#include "bench/support.h"
#include "engine/engine.h"
#include "gpu/cuda_backend.h"

ABSL_FLAG(uint32_t, tokens, 131072, "tokens in segments, of each row");
ABSL_FLAG(uint32_t, tail, 576, "tokens behind them at the first step");
ABSL_FLAG(uint32_t, layers, 4, "layers");
ABSL_FLAG(uint32_t, steps, 512, "steps of all layers; 64 more warm up; 0: of an engine alone");
ABSL_FLAG(uint32_t, between_kib, 4096, "written between two steps");
ABSL_FLAG(uint32_t, engine_steps, 384, "the same of an engine; 0: no engine");
ABSL_FLAG(std::vector<std::string>, rows, (std::vector<std::string>{"1", "4"}), "rows of a step");
ABSL_FLAG(uint32_t, engine_segment_tokens, 512, "of the engine's segments");
ABSL_FLAG(bool, ahead, true, "whether steps are prepared before their queries are there");
ABSL_FLAG(std::string, device, "idle", "idle or cuda");

namespace attnd::bench {
namespace {

using attention::Backend;
using attention::kTailBlockTokens;
using attention::Segment;
using attention::SequenceView;
using attention::StepRow;
using attention::TailBlock;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kWarmUpSteps = 64;
constexpr uint32_t kSink = 4;

std::unique_ptr<gpu::Device> MakeDevice() {
  if (absl::GetFlag(FLAGS_device) == "cuda") return Must(gpu::OpenCudaDevice());
  return std::make_unique<IdleDevice>();
}

// A backend over the device, with the device's times.
struct TimedBackend {
  std::shared_ptr<DeviceTimes> times = std::make_shared<DeviceTimes>();
  std::unique_ptr<Backend> backend;

  TimedBackend() {
    gpu::CudaBackendOptions options;
    if (absl::GetFlag(FLAGS_device) == "idle") options.device_memory_bytes = uint64_t{256} << 30;
    options.timed_steps = 0;
    options.launch_ahead = absl::GetFlag(FLAGS_ahead);
    backend = Must(gpu::MakeCudaBackend(options, std::make_unique<TimedDevice>(MakeDevice(), times),
                                        attention::MakeCpuBackend({.threads = 1})));
  }
  // Steps of the CPU are none of the device's.
  static void CheckNoFallback(const Backend& backend) {
    if (backend.stats().fallback_steps == 0) return;
    Must(absl::InternalError("the CPU answered for the device"));
  }
};

// Memory whose writing leaves little of anything else in the processor's caches.
class Between {
 public:
  explicit Between(uint32_t kib) : bytes_(size_t{kib} << 10) {}
  void Write() { std::fill(bytes_.begin(), bytes_.end(), ++value_); }

 private:
  std::vector<unsigned char> bytes_;
  unsigned char value_ = 0;
};

// What was measured of some steps.
class Times {
 public:
  void Add(Clock::time_point begin, const DeviceTimes& device, Clock::time_point end) {
    before_.push_back(MicrosBetween(begin, device.given));
    after_.push_back(MicrosBetween(device.answered, end));
    device_.push_back(MicrosBetween(device.given, device.answered));
    both_.push_back(before_.back() + after_.back());
  }
  void Print(const char* what, uint32_t rows, uint32_t segments, bool between) const {
    std::printf("%-8s %4u %8u  %-6s %8.1f %8.1f %8.1f [%.1f .. %.1f] %8.1f\n", what, rows, segments,
                between ? "cold" : "warm", Median(before_), Median(after_), Median(both_),
                Quantile(both_, 0.1), Quantile(both_, 0.9), Median(device_));
    std::fflush(stdout);
  }

 private:
  std::vector<double> before_, after_, both_, device_;
};

// A sequence with segments without content, whose tail grows.
class GrowingSequence {
 public:
  GrowingSequence(const ModelShape& shape, uint64_t tokens, uint32_t segment_tokens)
      : view_(std::make_shared<SequenceView>()), length_(tokens + absl::GetFlag(FLAGS_tail)) {
    auto view = std::make_shared<SequenceView>();
    view->shape = shape;
    view->indexes = attention::kTreeIndexes;
    for (uint64_t begin = 0; begin < tokens; begin += segment_tokens) {
      view->segments.push_back(std::make_shared<Segment>(
          begin + 1,
          attention::SegmentForm{shape, view->indexes, segment_tokens, begin == 0 ? kSink : 0},
          begin));
    }
    view->tail_begin = tokens;
    view_ = std::move(view);
    GrowTo(length_);
  }

  uint64_t length() const { return length_; }
  const std::shared_ptr<const SequenceView>& view() const { return view_; }
  void Add() { GrowTo(++length_); }

 private:
  // As an engine's: a view stays until there is another block.
  void GrowTo(uint64_t length) {
    const uint64_t blocks =
        (length + kTailBlockTokens - 1) / kTailBlockTokens - view_->tail_begin / kTailBlockTokens;
    if (view_->tail.size() == blocks) return;
    auto view = std::make_shared<SequenceView>(*view_);
    while (view->tail.size() < blocks) {
      view->tail.push_back(std::make_shared<TailBlock>(view->shape));
    }
    view_ = std::move(view);
  }

  std::shared_ptr<const SequenceView> view_;
  uint64_t length_;
};

std::vector<uint32_t> Rows() {
  std::vector<uint32_t> rows;
  for (const std::string& text : absl::GetFlag(FLAGS_rows)) {
    if (!absl::SimpleAtoi(text, &rows.emplace_back()) || rows.back() == 0) {
      Must(absl::InvalidArgumentError("--rows has " + text + "; allowed are numbers from 1 on"));
    }
  }
  return rows;
}

ModelShape Shape() { return Bf16Shape(absl::GetFlag(FLAGS_layers), 32, 8, 128); }

Times StepsOfBackend(uint32_t rows, uint32_t segment_tokens, bool between) {
  const ModelShape shape = Shape();
  const attention::Policy policy = Must(attention::ParsePolicy("error-target"));
  TimedBackend timed;
  std::vector<GrowingSequence> sequences;
  for (uint32_t r = 0; r < rows; ++r) {
    sequences.emplace_back(shape, absl::GetFlag(FLAGS_tokens), segment_tokens);
  }
  const std::vector<uint16_t> queries(size_t{shape.query_heads} * shape.head_dim);
  std::vector<float> out(rows * queries.size()), lse(size_t{rows} * shape.query_heads);
  Between memory(absl::GetFlag(FLAGS_between_kib));
  Times times;
  for (uint32_t step = 0; step < kWarmUpSteps + absl::GetFlag(FLAGS_steps); ++step) {
    for (GrowingSequence& sequence : sequences) sequence.Add();
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      std::vector<StepRow> step_rows(rows);
      std::vector<attention::RowStats> stats(rows);
      for (uint32_t r = 0; r < rows; ++r) {
        StepRow& row = step_rows[r];
        row.view = sequences[r].view();
        row.policy = &policy;
        row.past_tokens = sequences[r].length() - 1;
        row.query_tokens = 1;
        row.query_dtype = DType::kBf16;
        row.queries = reinterpret_cast<const std::byte*>(queries.data());
        row.out = out.data() + r * queries.size();
        row.lse = lse.data() + size_t{r} * shape.query_heads;
        row.stats = &stats[r];
      }
      attention::StepRequest request;
      request.layer = layer;
      request.rows = step_rows;
      const auto prepared = timed.backend->Prepare(request, /*turn=*/nullptr);
      if (between) memory.Write();
      request.prepared = prepared.get();
      const auto begin = Clock::now();
      Must(timed.backend->Step(request));
      const auto end = Clock::now();
      if (step >= kWarmUpSteps) times.Add(begin, *timed.times, end);
    }
  }
  TimedBackend::CheckNoFallback(*timed.backend);
  return times;
}

// Sequences with as many segments, in an engine.
class EngineSteps {
 public:
  explicit EngineSteps(uint32_t segments) {
    engine::EngineOptions options;
    options.memory_budget_bytes = uint64_t{16} << 30;
    options.segment_tokens = absl::GetFlag(FLAGS_engine_segment_tokens);
    options.index_threads = 2;
    TimedBackend timed;
    times_ = timed.times;
    engine_ = Must(engine::Engine::Create(options, std::move(timed.backend), nullptr));
    engine::OpenArgs args;
    args.shape = shape_;
    args.policy = Must(attention::ParsePolicy("error-target"));
    args.indexes = attention::kTreeIndexes;
    const uint64_t id = Must(engine_->Open("", args));
    engine::AppendChunk chunk;
    chunk.tokens = segments * options.segment_tokens + kWindow;
    const auto k = RandomBf16(chunk.tokens * shape_.kv_heads * shape_.head_dim, &random_);
    chunk.k = chunk.v = View(k);
    // Tokens with ids become segments of one size; without them a prompt's segments grow.
    std::vector<uint32_t> ids(chunk.tokens);
    std::iota(ids.begin(), ids.end(), 0u);
    chunk.token_ids = ids;
    for (; chunk.layer < shape_.layers; ++chunk.layer) {
      Must(engine_->Append("", id, id, chunk));
    }
    Must(engine_->FinishPrefill("", id, id, nullptr).status());
    prompt_ = Must(engine_->Info("", id));
    if (prompt_.segments != segments) {
      Must(absl::InternalError("the prompt has " + std::to_string(prompt_.segments) + " segments"));
    }
  }

  // Of forks, so that each measurement begins with the same tail. What they generate is too little
  // for a segment, unless --engine_steps says otherwise.
  Times Run(uint32_t rows, bool between) {
    std::vector<uint64_t> ids;
    for (uint32_t r = 0; r < rows; ++r) {
      ids.push_back(Must(engine_->Fork("", prompt_.id, std::nullopt)).id);
    }
    const auto q = RandomBf16(size_t{rows} * shape_.query_heads * shape_.head_dim, &random_);
    const auto k = RandomBf16(size_t{rows} * shape_.kv_heads * shape_.head_dim, &random_);
    std::vector<engine::DecodeRow> decode_rows(rows);
    engine::DecodeArgs args;
    args.q = View(q);
    args.q_heads = shape_.query_heads;
    args.q_head_dim = args.k_head_dim = args.v_value_dim = shape_.head_dim;
    args.k = args.v = View(k);
    args.k_heads = args.v_heads = shape_.kv_heads;
    const uint32_t rung = 1;
    const engine::ClientLayer client = {.args = args, .ring = &rung, .epoch = rung};
    Between memory(absl::GetFlag(FLAGS_between_kib));
    Times times;
    engine::AnswerVectors answer;
    engine::DecodeResult result;
    for (uint32_t step = 0; step < kWarmUpSteps + absl::GetFlag(FLAGS_engine_steps); ++step) {
      for (uint32_t r = 0; r < rows; ++r) {
        decode_rows[r].sequence_id = ids[r];
        decode_rows[r].query_tokens = 1;
        decode_rows[r].position = prompt_.committed_tokens + step;
      }
      const auto pass = Must(engine_->BeginPass("", prompt_.id + 1, decode_rows, shape_.layers));
      while (pass->layer() < shape_.layers) {
        if (between) memory.Write();
        pass->WarmNextLayer();
        const auto begin = Clock::now();
        Must(pass->Step(args, answer, &result));
        const auto end = Clock::now();
        for (const auto& row : result.rows) Must(row.status);
        if (step >= kWarmUpSteps) times.Add(begin, *times_, end);
        pass->PrepareNextLayer(&client);
      }
    }
    for (const uint64_t id : ids) Must(engine_->Close("", id));
    TimedBackend::CheckNoFallback(engine_->backend());
    return times;
  }

 private:
  static constexpr uint32_t kWindow = 64;

  const ModelShape shape_ = Shape();
  std::mt19937_64 random_{1};
  std::shared_ptr<DeviceTimes> times_;
  std::unique_ptr<engine::Engine> engine_;
  engine::SequenceInfo prompt_;
};

void Run() {
  std::printf("%-8s %4s %8s  %-6s %8s %8s %8s [p10 .. p90] %8s\n", "", "rows", "segments", "caches",
              "before", "after", "both", "device");
  const uint32_t tokens = absl::GetFlag(FLAGS_tokens);
  for (const uint32_t segments : {16u, 4u}) {
    if (absl::GetFlag(FLAGS_device) != "idle" || absl::GetFlag(FLAGS_steps) == 0) break;
    for (const uint32_t rows : Rows()) {
      for (const bool between : {false, true}) {
        StepsOfBackend(rows, tokens / segments, between).Print("backend", rows, segments, between);
      }
    }
  }
  if (absl::GetFlag(FLAGS_engine_steps) == 0) return;
  for (const uint32_t segments : {16u, 4u}) {
    EngineSteps steps(segments);
    for (const uint32_t rows : Rows()) {
      for (const bool between : {false, true}) {
        steps.Run(rows, between).Print("engine", rows, segments, between);
      }
    }
  }
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  attnd::bench::Run();
}
