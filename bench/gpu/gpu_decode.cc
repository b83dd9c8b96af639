// SPDX-License-Identifier: Apache-2.0
//
// Decoding through an engine on a GPU whose memory holds a part of the pages: prompts of a trained
// model's keys are appended, segmented on the GPU, and decoded, all layers of each token one after
// another. A capture (page_trace_capture.py --one-layer) is repeated over the layers and, if a
// sequence has more tokens than it, over the tokens. Prints what building took, and for each of a
// few stretches of tokens the milliseconds of a token and what moved over PCIe.
//
//   gpu_decode --tokens=524288 --layers=32 --page_memory_mib=8192 build/captures/131072-0.capture
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "attention/cpu/cpu_backend.h"
#include "bench/engine_support.h"
#include "bench/pages/page_capture.h"
#include "bench/statistics.h"
#include "bench/step_runner.h"
#include "bench/support.h"
#include "engine/engine.h"
#include "gpu/cuda_backend.h"
#include "gpu/device/device.h"

ABSL_FLAG(uint32_t, rows, 1, "sequences that decode together");
ABSL_FLAG(uint64_t, tokens, 131072, "of each prompt");
ABSL_FLAG(uint32_t, layers, 32, "layers");
ABSL_FLAG(uint32_t, decoded, 256, "tokens that are decoded");
ABSL_FLAG(uint32_t, stretch, 64, "tokens of a line of the table");
ABSL_FLAG(uint64_t, host_memory_mib, uint64_t{96} << 10, "the engine's budget");
ABSL_FLAG(uint64_t, device_memory_mib, uint64_t{24} << 10, "GPU memory in all");
ABSL_FLAG(uint64_t, page_memory_mib, 0, "of it for pages; 0: the backend's share");
ABSL_FLAG(std::string, policy, "error-target", "NAME[:key=value,...], over a tree");

namespace attnd::bench {
namespace {

using attention::BackendStats;
using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// One layer of a capture, token by token as the engine takes it.
struct Capture {
  ModelShape shape;  // of one layer
  uint32_t tokens = 0, queries = 0;
  std::vector<uint16_t> k, v;  // [tokens][kv_heads][head_dim]
  std::vector<uint16_t> q;     // [queries][query_heads][head_dim]

  explicit Capture(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    CaptureHeader header{};
    shape = Must(ReadCaptureHeader(path, &file, &header));
    if (shape.layers != 1) Must(absl::InvalidArgumentError(path + " has more than one layer"));
    tokens = header.prompt_tokens + header.decoded_tokens;
    queries = header.decoded_tokens;
    for (std::vector<uint16_t>* of : {&k, &v}) ReadHeads(&file, of);
    q.resize(size_t{queries} * shape.query_heads * shape.head_dim);
    file.read(reinterpret_cast<char*>(q.data()), static_cast<std::streamsize>(q.size() * 2));
    if (!file) Must(absl::DataLossError(path + " is too short"));
  }

 private:
  void ReadHeads(std::ifstream* file, std::vector<uint16_t>* to) const {
    to->resize(size_t{tokens} * shape.kv_heads * shape.head_dim);
    std::vector<uint16_t> head(size_t{tokens} * shape.head_dim);
    for (uint32_t h = 0; h < shape.kv_heads; ++h) {
      file->read(reinterpret_cast<char*>(head.data()),
                 static_cast<std::streamsize>(head.size() * 2));
      for (size_t t = 0; t < tokens; ++t) {
        std::copy_n(
            head.begin() + static_cast<ptrdiff_t>(t * shape.head_dim), shape.head_dim,
            to->begin() + static_cast<ptrdiff_t>((t * shape.kv_heads + h) * shape.head_dim));
      }
    }
  }
};

std::unique_ptr<engine::Engine> MakeGpuEngine() {
  gpu::CudaBackendOptions cuda;
  cuda.device_memory_bytes = absl::GetFlag(FLAGS_device_memory_mib) << 20;
  cuda.page_memory_bytes = absl::GetFlag(FLAGS_page_memory_mib) << 20;
  cuda.timed_steps = 0;
  engine::EngineOptions options;
  options.memory_budget_bytes = absl::GetFlag(FLAGS_host_memory_mib) << 20;
  options.segment_tokens = kSegmentTokens;
  return Must(
      engine::Engine::Create(options,
                             Must(gpu::MakeCudaBackend(cuda, Must(gpu::OpenCudaDevice()),
                                                       attention::MakeCpuBackend({.threads = 0}))),
                             nullptr));
}

class Decoding {
 public:
  Decoding(engine::Engine* engine, const Capture& capture)
      : engine_(engine), capture_(capture), shape_(capture.shape) {
    shape_.layers = absl::GetFlag(FLAGS_layers);
  }

  void Prefill() {
    constexpr uint64_t kChunk = 4096;
    const auto begin = Clock::now();
    const uint64_t tokens = absl::GetFlag(FLAGS_tokens);
    for (uint32_t r = 0; r < absl::GetFlag(FLAGS_rows); ++r) {
      engine::OpenArgs args;
      args.shape = shape_;
      args.policy = ParsePolicyText(absl::GetFlag(FLAGS_policy));
      args.indexes = attention::kTreeIndexes;
      ids_.push_back(Must(engine_->Open("", args)));
      for (uint64_t at = 0; at < tokens;) {
        const uint64_t from = at % capture_.tokens;
        const uint64_t count = std::min({kChunk, tokens - at, capture_.tokens - from});
        AppendChunk(ids_.back(), at, from, count);
        at += count;
      }
      Must(engine_->FinishPrefill("", kWriter, ids_.back(), nullptr).status());
    }
    const auto info = Must(engine_->Info("", ids_.back()));
    std::printf("%u x %llu tokens of %u layers: %.1f s of appending and building, %llu segments\n",
                absl::GetFlag(FLAGS_rows), static_cast<unsigned long long>(tokens), shape_.layers,
                SecondsSince(begin), static_cast<unsigned long long>(info.segments));
    position_ = tokens;
  }

  // One token of all rows; returns milliseconds.
  double Step() {
    const auto rows = static_cast<uint32_t>(ids_.size());
    const size_t q_row = size_t{shape_.query_heads} * shape_.head_dim;
    const size_t kv_row = size_t{shape_.kv_heads} * shape_.head_dim;
    const size_t query = position_ % capture_.queries, token = position_ % capture_.tokens;
    std::vector<uint16_t> q, k, v;
    std::vector<engine::DecodeRow> decode_rows(rows);
    for (uint32_t r = 0; r < rows; ++r) {
      const auto add = [](const std::vector<uint16_t>& from, size_t at, size_t count,
                          std::vector<uint16_t>* to) {
        to->insert(to->end(), from.begin() + static_cast<ptrdiff_t>(at * count),
                   from.begin() + static_cast<ptrdiff_t>((at + 1) * count));
      };
      add(capture_.q, query, q_row, &q);
      add(capture_.k, token, kv_row, &k);
      add(capture_.v, token, kv_row, &v);
      decode_rows[r].sequence_id = ids_[r];
      decode_rows[r].query_tokens = 1;
      decode_rows[r].position = position_;
    }
    engine::DecodeArgs args;
    args.q = View(q);
    args.q_heads = shape_.query_heads;
    args.q_head_dim = args.k_head_dim = args.v_value_dim = shape_.head_dim;
    args.k = View(k);
    args.v = View(v);
    args.k_heads = args.v_heads = shape_.kv_heads;
    args.rows = decode_rows;
    engine::AnswerVectors answer;
    engine::DecodeResult result;
    const auto begin = Clock::now();
    for (args.layer = 0; args.layer < shape_.layers; ++args.layer) {
      Must(engine_->Decode("", kWriter, args, answer, &result));
      for (const auto& row : result.rows) Must(row.status);
    }
    ++position_;
    return 1e3 * SecondsSince(begin);
  }

  uint64_t page_bytes() const { return gpu::PageBytesOf(gpu::KernelShapeOf(shape_)); }

 private:
  static constexpr uint64_t kWriter = 1;

  void AppendChunk(uint64_t id, uint64_t at, uint64_t from, uint64_t count) {
    const size_t kv_row = size_t{shape_.kv_heads} * shape_.head_dim;
    engine::AppendChunk chunk;
    chunk.tokens = static_cast<uint32_t>(count);
    chunk.first_position = at;
    const auto view = [&](const std::vector<uint16_t>& of) {
      return engine::TensorView{DType::kBf16,
                                reinterpret_cast<const std::byte*>(of.data() + from * kv_row),
                                count * kv_row};
    };
    chunk.k = view(capture_.k);
    chunk.v = view(capture_.v);
    chunk.may_wait = true;
    for (; chunk.layer < shape_.layers; ++chunk.layer) {
      Must(engine_->Append("", kWriter, id, chunk));
    }
  }

  engine::Engine* const engine_;
  const Capture& capture_;
  ModelShape shape_;
  std::vector<uint64_t> ids_;
  uint64_t position_ = 0;
};

void Run(const std::string& path) {
  const Capture capture(path);
  const auto engine = MakeGpuEngine();
  Decoding decoding(engine.get(), capture);
  decoding.Prefill();
  std::printf(
      "| tokens | ms a token, median | greatest | pages looked up | hits | MB fetched a token | "
      "other "
      "MB to the GPU | steps of the CPU |\n|---|---|---|---|---|---|---|---|\n");
  BackendStats before = engine->backend().stats();
  for (uint32_t done = 0; done < absl::GetFlag(FLAGS_decoded);) {
    std::vector<double> ms;
    const uint32_t stretch = done == 0 ? 1 : absl::GetFlag(FLAGS_stretch);  // the first one alone
    for (uint32_t i = 0; i < stretch; ++i) ms.push_back(decoding.Step());
    const BackendStats after = engine->backend().stats();
    const auto each = [&](uint64_t a, uint64_t b) { return static_cast<double>(a - b) / stretch; };
    const double looked_up = each(after.cache.lookups, before.cache.lookups);
    const double missed = each(after.cache.fetched + after.cache.in_place,
                               before.cache.fetched + before.cache.in_place);
    const double fetched = each(after.cache.fetched, before.cache.fetched);
    std::printf("| %u to %u | %.2f | %.2f | %.0f | %.2f%% | %.2f | %.2f | %llu |\n", done + 1,
                done + stretch, Median(ms), *std::max_element(ms.begin(), ms.end()), looked_up,
                looked_up > 0 ? 100 * (1 - missed / looked_up) : 100,
                fetched * static_cast<double>(decoding.page_bytes()) / 1e6,
                each(after.bytes_to_device, before.bytes_to_device) / 1e6,
                static_cast<unsigned long long>(after.fallback_steps - before.fallback_steps));
    std::fflush(stdout);
    before = after;
    done += stretch;
  }
  std::printf("cache of %.2f GB, index %.2f of %.2f GB, pages %.2f of %.2f GB\n",
              static_cast<double>(before.cache.bytes) / 1e9,
              static_cast<double>(before.index.used_bytes) / 1e9,
              static_cast<double>(before.index.capacity_bytes) / 1e9,
              static_cast<double>(before.pages.used_bytes) / 1e9,
              static_cast<double>(before.pages.capacity_bytes) / 1e9);
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  if (arguments.size() != 2) {
    std::fprintf(stderr, "usage: gpu_decode [flags] CAPTURE\n");
    return 2;
  }
  attnd::bench::Run(arguments[1]);
}
