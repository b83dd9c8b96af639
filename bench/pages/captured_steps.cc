// SPDX-License-Identifier: Apache-2.0
//
// Steps over the keys, values and queries of a trained model (bench/pages/page_trace_capture.py),
// each beside dense attention of the same queries: how many times as fast, with what error, and
// with what share of that error predicted.
// Random keys have no clusters that matter more than others, so what a policy with a tolerance
// takes over them says little.
//
//   captured_steps --policies="error-target:tolerance=0.1@tree"
//   build/captures/131072-top-0.capture
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_split.h"
#include "attention/cpu/cpu_backend.h"
#include "bench/pages/page_capture.h"
#include "bench/statistics.h"
#include "bench/step_runner.h"
#include "bench/support.h"

ABSL_FLAG(std::string, policies,
          "error-target:tolerance=0.1@tree error-target:tolerance=0.1@regression "
          "error-target:tolerance=0.1@clusters double-p@clusters",
          "separated by spaces: NAME[:key=value,...]@INDEX, an index of clusters, a tree also with "
          "its sizes: tree:leaf_tokens=12,fan=16,levels=2");
ABSL_FLAG(uint32_t, steps, 32, "decoded tokens, the capture's last ones");
ABSL_FLAG(uint32_t, threads, 0, "threads; 0: all cores");

namespace attnd::bench {
namespace {

using Clock = std::chrono::steady_clock;

uint32_t Threads() {
  return absl::GetFlag(FLAGS_threads) != 0 ? absl::GetFlag(FLAGS_threads)
                                           : std::thread::hardware_concurrency();
}

// Steps of one query token over a capture.
class CapturedSteps {
 public:
  CapturedSteps(attention::Backend* backend, const PageCapture& capture)
      : backend_(backend), capture_(capture) {
    const ModelShape& shape = capture.view->shape;
    lse_.resize(shape.query_heads);
    row_.view = capture.view;
    row_.query_tokens = 1;
    row_.query_only = true;
    row_.query_dtype = shape.dtype;
    row_.stats = &stats_;
    row_.lse = lse_.data();
  }

  // Answers the token's query into out, [query_heads * value_dim]; returns seconds.
  double Run(const attention::Policy& policy, uint32_t layer, uint32_t token,
             std::vector<float>* out) {
    const ModelShape& shape = capture_.view->shape;
    out->resize(size_t{shape.query_heads} * shape.value_dim);
    row_.policy = &policy;
    row_.past_tokens = uint64_t{capture_.prompt_tokens} + token + 1;
    row_.queries = capture_.query(layer, token);
    row_.out = out->data();
    attention::StepRequest request;
    request.layer = layer;
    request.rows = {&row_, 1};
    const auto start = Clock::now();
    Must(backend_->Step(request));
    return std::chrono::duration<double>(Clock::now() - start).count();
  }
  // Of the last step.
  const attention::RowStats& stats() const { return stats_; }

 private:
  attention::Backend* const backend_;
  const PageCapture& capture_;
  attention::StepRow row_;
  attention::RowStats stats_;
  std::vector<float> lse_;
};

// Mean over heads of |out - dense| / |dense|.
double RelativeError(const std::vector<float>& out, const std::vector<float>& dense,
                     size_t value_dim) {
  double sum = 0;
  const size_t heads = out.size() / value_dim;
  for (size_t h = 0; h < heads; ++h) {
    double apart2 = 0, norm2 = 0;
    for (size_t c = h * value_dim; c < (h + 1) * value_dim; ++c) {
      apart2 += (double{out[c]} - dense[c]) * (double{out[c]} - dense[c]);
      norm2 += double{dense[c]} * dense[c];
    }
    sum += std::sqrt(apart2 / norm2);
  }
  return sum / static_cast<double>(heads);
}

// Processor time since `start`, on all threads, for 8,192 tokens and eight heads.
double BuildSeconds(const ModelShape& shape, uint32_t tokens, std::clock_t start) {
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  return seconds * 8192 / tokens * 8 / (shape.layers * shape.kv_heads);
}

// Bytes of the segments' indexes over bytes of their payload.
double IndexShare(const attention::SequenceView& view) {
  double index = 0, payload = 0;
  for (const auto& segment : view.segments) {
    index += static_cast<double>(attention::Segment::IndexBytes(segment->form()));
    payload += static_cast<double>(attention::Segment::PayloadBytes(segment->form()));
  }
  return index / payload;
}

// Times one policy over a capture, and prints its line.
void Measure(attention::Backend* backend, const std::string& path, const std::string& text) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('@', 1));
  const attention::Policy policy = ParsePolicyText(parts.first);
  const attention::Policy dense = ParsePolicyText("dense");
  const std::clock_t start = std::clock();
  const PageCapture capture = Must(ReadPageCapture(path, ParseIndexText(parts.second), Threads()));
  const double build = BuildSeconds(capture.view->shape, capture.prompt_tokens, start);
  Must(policy.CheckIndexes(capture.view->indexes));
  CapturedSteps steps(backend, capture);

  std::vector<double> seconds, dense_seconds;  // of a token, all layers
  double error = 0, predicted = 0, exact = 0, middle = 0, rows = 0, clusters = 0, select = 0,
         stages = 0;
  std::vector<float> out, expected;
  const uint32_t layers = capture.view->shape.layers;
  const uint32_t count = std::min(absl::GetFlag(FLAGS_steps), capture.decoded_tokens);
  for (uint32_t step = 0; step < count; ++step) {
    const uint32_t token = capture.decoded_tokens - count + step;
    seconds.push_back(0);
    dense_seconds.push_back(0);
    for (uint32_t layer = 0; layer < layers; ++layer) {
      dense_seconds.back() += steps.Run(dense, layer, token, &expected);
      seconds.back() += steps.Run(policy, layer, token, &out);
      const attention::RowStats& stats = steps.stats();
      predicted += stats.predicted_error_mean.value_or(NAN);
      error += RelativeError(out, expected, capture.view->shape.value_dim);
      exact += static_cast<double>(stats.exact_tokens);
      middle +=
          static_cast<double>(stats.exact_tokens + stats.estimated_tokens + stats.dropped_tokens);
      rows += static_cast<double>(stats.index_rows);
      clusters += static_cast<double>(stats.clusters);
      const attention::StageNanos& s = stats.stages;
      select += static_cast<double>(s.score + s.select);
      stages += static_cast<double>(s.score + s.select + s.attend + s.merge);
    }
  }
  const double ours = Median(seconds), theirs = Median(dense_seconds);
  std::printf("| %s | %.2f | %.2f | %.1f | %.3f | %.2f | %.2f%% | %.3f | %.2f | %.2f | %.3f |\n",
              text.c_str(), 1e3 * ours, 1e3 * theirs, theirs / ours, error / (count * layers),
              predicted / error, 100 * exact / middle, rows / clusters, select / stages, build,
              IndexShare(*capture.view));
  std::fflush(stdout);
}

int Main(const std::vector<char*>& arguments) {
  if (arguments.size() < 2 || absl::GetFlag(FLAGS_steps) == 0) {
    std::fprintf(stderr, "usage: captured_steps [--policies=...] [--steps=1 or more] CAPTURE...\n");
    return 2;
  }
  attention::CpuBackendOptions options;
  options.threads = Threads();
  const auto backend = attention::MakeCpuBackend(options);
  for (size_t i = 1; i < arguments.size(); ++i) {
    std::printf(
        "\n%s, %u threads, %s: ms of a token, all layers; medians of %u tokens, or all there "
        "are; building: processor seconds for 8,192 tokens and eight heads; index bytes: share of "
        "the payload\n\n"
        "| policy | ms | dense ms | times as fast | error | predicted / error | read | index | "
        "score + select | building | index bytes |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n",
        arguments[i], options.threads, std::string(backend->target()).c_str(),
        absl::GetFlag(FLAGS_steps));
    for (const auto text : absl::StrSplit(absl::GetFlag(FLAGS_policies), ' ', absl::SkipEmpty())) {
      Measure(backend.get(), arguments[i], std::string(text));
    }
  }
  return 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) { return attnd::bench::Main(absl::ParseCommandLine(argc, argv)); }
