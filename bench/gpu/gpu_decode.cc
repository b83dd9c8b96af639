// SPDX-License-Identifier: Apache-2.0
//
// Decoding through an engine on a GPU whose memory holds a part of the pages: prompts of a trained
// model's keys are appended, segmented on the GPU, and decoded, all layers of each token one after
// another. A capture (page_trace_capture.py --one-layer) is repeated over the layers and, if a
// sequence has more tokens than it, over the tokens. With a data folder, what does not fit
// host_memory_mib lies in files there. Prints what building took, and for each of a few stretches
// of tokens the milliseconds of a token and what moved: from files, from the pool of their pages in
// host memory, and over PCIe. Pages of files, a token: late ones were being read already when a
// step asked for them (for a step before, or ahead); of those read ahead, used ones were asked for
// later and wasted ones were evicted before, and for the refused ones there was no room. Without a
// capture keys, values and queries are random; the queries move slowly (step_rows.h).
//
//   gpu_decode --tokens=524288 --layers=32 --page_memory_mib=8192 build/captures/131072-0.capture
//   gpu_decode --tokens=524288 --layers=16 --device_memory_mib=71680 --resume_memory_mib=16384
//     --data_dir=DIR build/captures/131072-0.capture   (in one line)
#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "attention/cpu/cpu_backend.h"
#include "bench/engine_support.h"
#include "bench/gpu/step_rows.h"
#include "bench/pages/page_capture.h"
#include "bench/statistics.h"
#include "bench/step_runner.h"
#include "bench/support.h"
#include "common/dtype.h"
#include "engine/engine.h"
#include "gpu/cuda_backend.h"
#include "gpu/device/device.h"

ABSL_FLAG(uint32_t, rows, 1, "sequences that decode together");
ABSL_FLAG(uint64_t, tokens, 131072, "of each prompt");
ABSL_FLAG(uint32_t, layers, 32, "layers");
ABSL_FLAG(uint32_t, decoded, 256, "tokens that are decoded");
ABSL_FLAG(uint32_t, stretch, 64, "tokens of a line of the table");
ABSL_FLAG(uint64_t, host_memory_mib, uint64_t{96} << 10, "the engine's budget");
ABSL_FLAG(std::string, data_dir, "",
          "an empty folder for what the budget does not hold; empty: all must fit");
ABSL_FLAG(uint64_t, pool_mib, 0, "of the budget, kept for pages of files; 0: the engine's default");
ABSL_FLAG(bool, page_prefetch, false,
          "the server's option: the pages of files that the next layer read last are read ahead");
ABSL_FLAG(bool, all_on_gpu, false,
          "fail if the CPU answers a row for the GPU, or all pages fit --page_memory_mib or "
          "--resume_memory_mib");
ABSL_FLAG(uint64_t, resume_memory_mib, 0,
          "if not 0, the sequences are sealed, and resumed by an engine with this budget: with the "
          "segments that they had in memory. data_dir holds all of them then");
ABSL_FLAG(bool, cpu, false, "the CPU answers: what files cost, on a machine without a GPU");
ABSL_FLAG(uint32_t, random_tokens, 16384, "without a capture: of random keys, 24 heads over 8");
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
  // Random.
  explicit Capture(uint32_t count) : tokens(count), queries(std::min(count, 256u)) {
    shape.layers = 1;
    shape.query_heads = 24;
    shape.kv_heads = 8;
    shape.head_dim = shape.value_dim = 128;
    shape.dtype = DType::kBf16;
    shape.softmax_scale = 1 / std::sqrt(128.0f);
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](size_t numbers, std::vector<uint16_t>* to) {
      to->resize(numbers);
      for (uint16_t& number : *to) {  // bf16 is a float's front
        number = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
      }
    };
    const size_t row = size_t{shape.kv_heads} * shape.head_dim;
    fill(tokens * row, &k);
    fill(tokens * row, &v);
    for (const float number : MovingQueries(shape, /*seed=*/2, queries)) {
      q.push_back(FloatToBf16(number));
    }
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

std::unique_ptr<attention::Backend> MakeBackend(const gpu::CudaBackendOptions& cuda) {
  auto cpu = attention::MakeCpuBackend({.threads = 0});
  if (absl::GetFlag(FLAGS_cpu)) return cpu;
  return Must(gpu::MakeCudaBackend(cuda, Must(gpu::OpenCudaDevice()), std::move(cpu)));
}

std::unique_ptr<engine::Engine> MakeEngine(uint64_t budget_mib) {
  gpu::CudaBackendOptions cuda;
  cuda.device_memory_bytes = absl::GetFlag(FLAGS_device_memory_mib) << 20;
  cuda.page_memory_bytes = absl::GetFlag(FLAGS_page_memory_mib) << 20;
  cuda.timed_steps = 0;
  engine::EngineOptions options;
  options.memory_budget_bytes = budget_mib << 20;
  options.segment_tokens = kSegmentTokens;
  options.archive.data_dir = absl::GetFlag(FLAGS_data_dir);
  options.archive.prefetch = absl::GetFlag(FLAGS_page_prefetch);
  if (const uint64_t mib = absl::GetFlag(FLAGS_pool_mib); mib != 0) {
    options.archive.page_memory_bytes = mib << 20;
  }
  return Must(engine::Engine::Create(options, MakeBackend(cuda), nullptr));
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
      ids_.push_back(Must(engine_->Open("", Args())));
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

  // Goes on with another engine, on the same folder.
  void MoveTo(std::unique_ptr<engine::Engine>* engine, uint64_t budget_mib) {
    const auto begin = Clock::now();
    std::vector<uint64_t> sealed;
    for (const uint64_t id : ids_) {
      sealed.push_back(Must((*engine)->Seal("", id, nullptr)).sealed_id);
    }
    engine->reset();
    *engine = MakeEngine(budget_mib);
    engine_ = engine->get();
    for (size_t r = 0; r < ids_.size(); ++r) {
      ids_[r] = Must(engine_->Resume("", Args(), sealed[r], nullptr)).sequence_id;
    }
    std::printf("%.1f s of sealing and resuming\n", SecondsSince(begin));
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

 private:
  static constexpr uint64_t kWriter = 1;

  engine::OpenArgs Args() const {
    engine::OpenArgs args;
    args.shape = shape_;
    args.policy = ParsePolicyText(absl::GetFlag(FLAGS_policy));
    args.indexes = attention::kTreeIndexes;
    return args;
  }

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

  engine::Engine* engine_;
  const Capture& capture_;
  ModelShape shape_;
  std::vector<uint64_t> ids_;
  uint64_t position_ = 0;
};

// What a stretch of tokens moved, per token.
struct Moved {
  BackendStats backend;
  engine::ArchiveStats archive;

  explicit Moved(const engine::Engine& engine)
      : backend(engine.backend().stats()), archive(engine.archive_stats()) {}
};

void PrintStretch(uint32_t first, const std::vector<double>& ms, const Moved& before,
                  const Moved& after) {
  const auto each = [&](uint64_t a, uint64_t b) {
    return static_cast<double>(a - b) / static_cast<double>(ms.size());
  };
  const auto mega = [&](uint64_t a, uint64_t b) { return each(a, b) / 1e6; };
  const BackendStats &a = after.backend, &b = before.backend;
  const double looked_up = each(a.cache.lookups, b.cache.lookups);
  const double missed = each(a.cache.fetched + a.cache.in_place + a.cache.carried,
                             b.cache.fetched + b.cache.in_place + b.cache.carried);
  const storage::PageCacheStats &pool = after.archive.pages, &pool_before = before.archive.pages;
  const double pool_pages = each(pool.lookups, pool_before.lookups);
  std::printf(
      "| %u to %zu | %.2f | %.2f | %.0f | %.2f%% | %.2f | %.2f | %.2f | %.0f | %.2f%% | %.2f | "
      "%.1f | %.0f | %.0f | %.0f | %.0f | %.0f | %llu |\n",
      first, first + ms.size() - 1, Median(ms), *std::max_element(ms.begin(), ms.end()), looked_up,
      looked_up > 0 ? 100 * (1 - missed / looked_up) : 100,
      mega(a.cache.fetched_bytes, b.cache.fetched_bytes), mega(a.files.bytes, b.files.bytes),
      mega(a.bytes_to_device, b.bytes_to_device), pool_pages,
      pool_pages > 0 ? 100 * each(pool.hits, pool_before.hits) / pool_pages : 100,
      mega(pool.read_bytes, pool_before.read_bytes), each(a.files.runs_again, b.files.runs_again),
      each(pool.late, pool_before.late), each(pool.prefetched_pages, pool_before.prefetched_pages),
      each(pool.prefetched_used, pool_before.prefetched_used),
      each(pool.prefetched_wasted, pool_before.prefetched_wasted),
      each(pool.prefetches_refused, pool_before.prefetches_refused),
      static_cast<unsigned long long>(a.fallback_steps - b.fallback_steps));
  std::fflush(stdout);
}

// What --all_on_gpu promises, and that there was what the flags ask for: the exit status.
int CheckOnGpu(const Moved& all) {
  const bool paged = absl::GetFlag(FLAGS_page_memory_mib) != 0;
  const bool files = absl::GetFlag(FLAGS_resume_memory_mib) != 0;
  const std::pair<bool, const char*> faults[] = {
      {all.backend.fallback_steps > 0, "the CPU answered rows for the GPU"},
      {paged && all.backend.cache.lookups == 0, "no page was looked up: the GPU held them all"},
      {files && all.backend.files.bytes == 0, "no page came from a file"}};
  int status = 0;
  for (const auto& [found, what] : faults) {
    if (!found) continue;
    std::fprintf(stderr, "%s\n", what);
    status = 1;
  }
  return status;
}

// The exit status.
int Run(const char* path) {
  const Capture capture =
      path != nullptr ? Capture(path) : Capture(absl::GetFlag(FLAGS_random_tokens));
  auto engine = MakeEngine(absl::GetFlag(FLAGS_host_memory_mib));
  Decoding decoding(engine.get(), capture);
  decoding.Prefill();
  if (const uint64_t mib = absl::GetFlag(FLAGS_resume_memory_mib); mib != 0) {
    decoding.MoveTo(&engine, mib);
  }
  std::printf(
      "| tokens | ms a token, median | greatest | pages looked up | GPU hits | MB fetched from "
      "host "
      "memory a token | MB of files handed over | MB to the GPU by copies | pages of files asked "
      "for | pool hits | MB read from files | runs again | late pages | read ahead | used | wasted "
      "| "
      "refused | steps of the CPU |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  Moved before(*engine);
  for (uint32_t done = 0; done < absl::GetFlag(FLAGS_decoded);) {
    std::vector<double> ms;
    const uint32_t stretch = done == 0 ? 1 : absl::GetFlag(FLAGS_stretch);  // the first one alone
    for (uint32_t i = 0; i < stretch; ++i) ms.push_back(decoding.Step());
    const Moved after(*engine);
    PrintStretch(done + 1, ms, before, after);
    before = after;
    done += stretch;
  }
  const BackendStats& last = before.backend;
  std::printf("host memory: %.2f GB of the budget in use, %.2f GB of it pages of files\n",
              static_cast<double>(engine->usage().resident_bytes) / 1e9,
              static_cast<double>(before.archive.pages.slab_bytes) / 1e9);
  std::printf("cache of %.2f GB, index %.2f of %.2f GB, pages %.2f of %.2f GB\n",
              static_cast<double>(last.cache.bytes) / 1e9,
              static_cast<double>(last.index.used_bytes) / 1e9,
              static_cast<double>(last.index.capacity_bytes) / 1e9,
              static_cast<double>(last.pages.used_bytes) / 1e9,
              static_cast<double>(last.pages.capacity_bytes) / 1e9);
  return absl::GetFlag(FLAGS_all_on_gpu) ? CheckOnGpu(before) : 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  if (arguments.size() > 2) {
    std::fprintf(stderr, "usage: gpu_decode [flags] [CAPTURE]\n");
    return 2;
  }
  return attnd::bench::Run(arguments.size() == 2 ? arguments[1] : nullptr);
}
