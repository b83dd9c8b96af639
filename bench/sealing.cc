// SPDX-License-Identifier: Apache-2.0
//
// What sealed sequences cost, in three parts, beside what they are compared with in the same round:
//
//   seal    Engine::Seal beside files of the same sizes that a bare loop writes and syncs. Target:
//           80% of the bare loop's bytes per second, or more.
//   resume  Resume and the first decode, nothing of the sequence being in memory, beside uploading
//           it. Targets: nothing but the index is read before the decode; together under 5% of the
//           upload's time.
//   steady  decode steps of a resumed sequence whose pages do not fit in memory, beside the same
//           steps of a sequence in memory. Steps take turns.
//
//   sealing --folder=/var/tmp --tokens=65536 --rounds=8
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "attention/cpu/cpu_backend.h"
#include "bench/bare_writer.h"
#include "bench/engine_support.h"
#include "bench/statistics.h"
#include "bench/support.h"
#include "engine/engine.h"

ABSL_FLAG(std::string, folder, "/var/tmp", "on the disk to measure; what is made there is removed");
ABSL_FLAG(uint32_t, tokens, 65536, "tokens of the sequence");
ABSL_FLAG(uint32_t, layers, 4, "layers");
ABSL_FLAG(uint32_t, head_dim, 128, "elements of a head");
ABSL_FLAG(uint32_t, chunk_tokens, 4096, "tokens of a chunk of the upload");
ABSL_FLAG(uint32_t, depth, 32, "writes under way, of the bare loop; Seal has 16");
ABSL_FLAG(uint32_t, write_kib, 256, "of one write of the bare loop; Seal's are of 1 MiB");
ABSL_FLAG(uint32_t, rounds, 8, "rounds of sealing, an even number; 1 more warms up");
ABSL_FLAG(uint32_t, resume_rounds, 3, "rounds of uploading and resuming; 0: not measured");
ABSL_FLAG(uint32_t, steps, 40, "steps of all layers in steady reading; 0: not measured");
ABSL_FLAG(uint32_t, page_mib, 64, "memory for pages in steady reading");
ABSL_FLAG(uint32_t, budget_mib, 256, "the whole memory budget in steady reading");
ABSL_FLAG(double, tolerance, 0.1, "of error-target");
ABSL_FLAG(double, focus, 1, "how much of a random token's key is in each query");

namespace attnd::bench {
namespace {

using engine::Engine;
using Clock = std::chrono::steady_clock;

constexpr uint64_t kWriter = 1;
constexpr uint32_t kRunTokens = 16;  // that have keys near one centre

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
// This process's processor time.
double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}
// How long this thread was ready and had no processor, on a machine that others use, too.
double WaitedSeconds() {
  std::ifstream file("/proc/thread-self/schedstat");
  uint64_t ran_ns = 0, waited_ns = 0;
  file >> ran_ns >> waited_ns;
  return static_cast<double>(waited_ns) * 1e-9;
}
// What this process has read from disks, as the system counts it.
uint64_t DiskReadBytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_inblock) * 512;
}
double Mib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// Normal bf16 numbers in the shape of one layer's keys and values, and queries that fit them. All
// layers have the same.
class Tokens {
 public:
  Tokens(const ModelShape& shape, uint64_t count) : shape_(shape), count_(count) {
    for (float& x : noise_) x = normal_(random_);
    const uint64_t row = RowElements();
    keys_.resize(count * row);
    values_.resize(count * row);
    std::vector<float> centre(row);
    for (uint64_t token = 0; token < count; ++token) {
      if (token % kRunTokens == 0) FillNoise(centre.data(), row);
      const float* noise = Noise(row);
      for (uint64_t c = 0; c < row; ++c) {
        keys_[token * row + c] = FloatToBf16(centre[c] + 0.5f * noise[c]);
      }
      const float* values = Noise(row);
      for (uint64_t c = 0; c < row; ++c) values_[token * row + c] = FloatToBf16(values[c]);
    }
  }

  uint64_t RowElements() const { return uint64_t{shape_.kv_heads} * shape_.head_dim; }
  engine::TensorView Keys(uint64_t first, uint64_t tokens) const {
    return Part(keys_, first, tokens);
  }
  engine::TensorView Values(uint64_t first, uint64_t tokens) const {
    return Part(values_, first, tokens);
  }
  // [query_heads, head_dim], each query head looking for a random token of its KV head.
  std::vector<uint16_t> Queries() {
    const auto focus = static_cast<float>(absl::GetFlag(FLAGS_focus));
    std::vector<uint16_t> queries(size_t{shape_.query_heads} * shape_.head_dim);
    for (uint32_t head = 0; head < shape_.query_heads; ++head) {
      const uint64_t kv_head = head / (shape_.query_heads / shape_.kv_heads);
      const uint16_t* key = &keys_[random_() % count_ * RowElements() + kv_head * shape_.head_dim];
      for (uint32_t c = 0; c < shape_.head_dim; ++c) {
        queries[size_t{head} * shape_.head_dim + c] =
            FloatToBf16(focus * Bf16ToFloat(key[c]) + normal_(random_));
      }
    }
    return queries;
  }

 private:
  engine::TensorView Part(const std::vector<uint16_t>& all, uint64_t first, uint64_t tokens) const {
    return {DType::kBf16, reinterpret_cast<const std::byte*>(&all[first * RowElements()]),
            tokens * RowElements()};
  }
  const float* Noise(uint64_t elements) { return &noise_[random_() % (noise_.size() - elements)]; }
  void FillNoise(float* to, uint64_t elements) { std::copy_n(Noise(elements), elements, to); }

  const ModelShape shape_;
  const uint64_t count_;
  std::mt19937_64 random_{1};
  std::normal_distribution<float> normal_;
  std::vector<float> noise_ = std::vector<float>(1 << 21);
  std::vector<uint16_t> keys_, values_;  // [tokens, kv_heads, head_dim]
};

struct UploadTimes {
  double append_s = 0, finish_s = 0;
};

// An engine and its sequences of the one model.
class Model {
 public:
  // data_dir may be empty. page_bytes: 0 for the engine's default.
  Model(const ModelShape& shape, const std::string& data_dir, uint64_t budget_bytes,
        uint64_t page_bytes)
      : shape_(shape) {
    engine::EngineOptions options;
    options.memory_budget_bytes = budget_bytes;
    options.segment_tokens = kSegmentTokens;
    options.index_threads = 2;
    options.archive.data_dir = data_dir;
    options.archive.page_memory_bytes = page_bytes;
    engine_ = Must(Engine::Create(options, attention::MakeCpuBackend({}), nullptr));
  }

  Engine* engine() const { return engine_.get(); }
  uint64_t ReadBytes() const { return engine_->archive_stats().read_bytes; }

  uint64_t Upload(const Tokens& tokens, UploadTimes* times, const attention::Policy& policy) {
    const uint64_t count = absl::GetFlag(FLAGS_tokens);
    const uint64_t chunk_tokens = absl::GetFlag(FLAGS_chunk_tokens);
    const uint64_t id = Must(engine_->Open("", Args(policy)));
    auto start = Clock::now();
    engine::AppendChunk chunk;
    for (uint64_t at = 0; at < count; at += chunk_tokens) {
      chunk.first_position = at;
      chunk.tokens = std::min(chunk_tokens, count - at);
      chunk.k = tokens.Keys(at, chunk.tokens);
      chunk.v = tokens.Values(at, chunk.tokens);
      for (chunk.layer = 0; chunk.layer < shape_.layers; ++chunk.layer) {
        Must(engine_->Append("", kWriter, id, chunk));
      }
    }
    times->append_s = SecondsSince(start);
    start = Clock::now();
    Must(engine_->FinishPrefill("", kWriter, id, nullptr).status());
    times->finish_s = SecondsSince(start);
    return id;
  }

  uint64_t Resume(uint64_t sealed_id, const attention::Policy& policy) {
    return Must(engine_->Resume("", Args(policy), sealed_id, nullptr)).sequence_id;
  }
  void Close(uint64_t id) { Must(engine_->Close("", id)); }

  // A new token at `position`: its keys and values are those of token 0.
  attention::RowStats Decode(uint64_t id, uint64_t position, uint32_t layer, const Tokens& tokens,
                             const std::vector<uint16_t>& queries) {
    engine::DecodeRow row;
    row.sequence_id = id;
    row.query_tokens = 1;
    row.position = position;
    engine::DecodeArgs args;
    args.layer = layer;
    args.rows = {&row, 1};
    args.q = View(queries);
    args.q_heads = shape_.query_heads;
    args.q_head_dim = shape_.head_dim;
    args.k = tokens.Keys(0, 1);
    args.v = tokens.Values(0, 1);
    args.k_heads = args.v_heads = shape_.kv_heads;
    args.k_head_dim = args.v_value_dim = shape_.head_dim;
    Must(engine_->Decode("", kWriter, args, memory_, &result_));
    Must(result_.rows[0].status);
    return result_.rows[0].stats;
  }

 private:
  engine::OpenArgs Args(const attention::Policy& policy) const {
    engine::OpenArgs args;
    args.shape = shape_;
    args.policy = policy;
    return args;
  }

  const ModelShape shape_;
  std::unique_ptr<Engine> engine_;
  engine::AnswerVectors memory_;
  engine::DecodeResult result_;
};

class Bench {
 public:
  Bench() {
    Must(files_->MakeFolder(bare_folder_));
    std::printf("%u tokens, %u layers, 8 KV heads, head_dim %u, bf16: %.0f MiB of payload\n",
                absl::GetFlag(FLAGS_tokens), shape_.layers, shape_.head_dim, Mib(PayloadBytes()));
  }
  ~Bench() { std::filesystem::remove_all(root_); }

  void Run() {
    MeasureSealing();
    if (absl::GetFlag(FLAGS_resume_rounds) > 0) MeasureResuming();
    large_.reset();  // lets go of the data folder
    if (absl::GetFlag(FLAGS_steps) > 0) MeasureSteadyReading();
  }

 private:
  uint64_t PayloadBytes() const {
    return absl::GetFlag(FLAGS_tokens) * tokens_.RowElements() * 2 * sizeof(uint16_t) *
           shape_.layers;
  }
  // What was written or removed before must not be paid for by what is measured next.
  void Settle() const {
    const int fd = open(root_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    syncfs(fd);
    close(fd);
  }

  // ---- sealing ----

  void MeasureSealing() {
    UploadTimes times;
    const uint64_t id = large_->Upload(tokens_, &times, error_target_);
    const uint64_t bytes = Seal(id).bytes;  // warms up
    const std::vector<uint64_t> sizes = FileSizes();
    std::vector<double> ratios;
    Series seal, bare;
    for (uint32_t round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
      // Who goes first changes.
      if (round % 2 == 0) bare.Add(WriteBare(sizes));
      seal.Add(Seal(id));
      if (round % 2 != 0) bare.Add(WriteBare(sizes));
      ratios.push_back(seal.gb_per_s.back() / bare.gb_per_s.back());
      std::printf("  round %u: seal %.3f GB/s, bare %.3f GB/s, ratio %.3f; waited %.2f s, %.2f s\n",
                  round, seal.gb_per_s.back(), bare.gb_per_s.back(), ratios.back(),
                  seal.waited.back(), bare.waited.back());
    }
    large_->Close(id);
    const auto stats = large_->engine()->archive_stats();
    std::printf(
        "seal (%s%s, %.0f MiB in %zu files): %.3f GB/s, bare loop %.3f GB/s, ratio of "
        "medians %.3f; of rounds: median %.3f (p10 %.3f, p90 %.3f)\n",
        stats.io.c_str(), stats.direct ? ", direct" : "", Mib(bytes), sizes.size(),
        Median(seal.gb_per_s), Median(bare.gb_per_s), Median(seal.gb_per_s) / Median(bare.gb_per_s),
        Median(ratios), Quantile(ratios, 0.1), Quantile(ratios, 0.9));
    std::printf("  processor %.2f s and %.2f s; waited for a processor %.2f s and %.2f s\n",
                Median(seal.cpu), Median(bare.cpu), Median(seal.waited), Median(bare.waited));
  }

  struct Timed {
    uint64_t bytes = 0;
    double seconds = 0, cpu_seconds = 0, waited_seconds = 0;
  };
  struct Series {
    std::vector<double> gb_per_s, cpu, waited;
    void Add(const Timed& timed) {
      gb_per_s.push_back(static_cast<double>(timed.bytes) / timed.seconds / 1e9);
      cpu.push_back(timed.cpu_seconds);
      waited.push_back(timed.waited_seconds);
    }
  };
  // What `work` takes, once the disk is quiet.
  template <typename Work>
  Timed Time(const Work& work) const {
    Settle();
    Timed timed;
    const double cpu = CpuSeconds(), waited = WaitedSeconds();
    const auto start = Clock::now();
    timed.bytes = work();
    timed.seconds = SecondsSince(start);
    timed.cpu_seconds = CpuSeconds() - cpu;
    timed.waited_seconds = WaitedSeconds() - waited;
    return timed;
  }

  // The sealed sequence before is dropped first, so that all is written again.
  Timed Seal(uint64_t id) {
    if (sealed_id_ != 0) Must(large_->engine()->DropSealed("", sealed_id_));
    return Time([&] {
      const engine::SealResult sealed = Must(large_->engine()->Seal("", id, nullptr));
      sealed_id_ = sealed.sealed_id;
      return sealed.written_bytes;
    });
  }

  Timed WriteBare(const std::vector<uint64_t>& sizes) {
    const auto path = [&](size_t i) { return absl::StrCat(bare_folder_, "/", i); };
    const Timed timed = Time([&] {
      for (size_t i = 0; i < sizes.size(); ++i) bare_.Write(path(i), sizes[i]);
      return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
    });
    for (size_t i = 0; i < sizes.size(); ++i) Must(files_->Remove(path(i)));
    return timed;
  }

  std::vector<uint64_t> FileSizes() const {
    std::vector<uint64_t> sizes;
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(data_folder_ + "/segments")) {
      if (entry.is_regular_file()) sizes.push_back(entry.file_size());
    }
    std::sort(sizes.rbegin(), sizes.rend());
    return sizes;
  }

  // ---- resuming ----

  struct Resumed {
    std::vector<double> resume_ms, first_ms, all_ms, share_first, share_all;
    std::vector<double> resume_mib, first_mib, all_mib, disk_mib, exact_share;
  };

  void MeasureResuming() {
    std::vector<double> append, upload;
    std::map<std::string, Resumed> resumed;
    for (uint32_t round = 0; round < absl::GetFlag(FLAGS_resume_rounds); ++round) {
      UploadTimes times;
      large_->Close(large_->Upload(tokens_, &times, error_target_));
      append.push_back(times.append_s);
      upload.push_back(times.append_s + times.finish_s);
      for (const auto* policy : {&error_target_, &double_p_}) {
        ResumeOnce(*policy, upload.back(), &resumed[policy->preset]);
      }
    }
    std::printf("upload: %.2f s, of which %.2f s without building indexes\n", Median(upload),
                Median(append));
    for (const auto& [name, r] : resumed) {
      std::printf(
          "%s: resume %.1f ms; + decode of layer 0 %.1f ms, %.2f%% of the upload; + of all "
          "layers %.1f ms, %.2f%%\n",
          name.c_str(), Median(r.resume_ms), Median(r.first_ms), 100 * Median(r.share_first),
          Median(r.all_ms), 100 * Median(r.share_all));
      std::printf(
          "  read: resume %.1f MiB (%.1f by the system's count), + decode of layer 0 %.1f MiB, + "
          "of all layers %.1f MiB, of "
          "%.0f MiB of payload; of tokens exactly %.2f%%; without building: %.2f%% and %.2f%%\n",
          Median(r.resume_mib), Median(r.disk_mib), Median(r.first_mib), Median(r.all_mib),
          Mib(PayloadBytes()), 100 * Median(r.exact_share),
          Median(r.first_ms) / 10 / Median(append), Median(r.all_ms) / 10 / Median(append));
    }
  }

  // Nobody else holds the sequence, so that none of it is in memory.
  void ResumeOnce(const attention::Policy& policy, double upload_s, Resumed* r) {
    const uint64_t position = absl::GetFlag(FLAGS_tokens);
    const auto queries = tokens_.Queries();
    const uint64_t before = large_->ReadBytes();
    const uint64_t disk_before = DiskReadBytes();
    const auto mib = [&] { return Mib(large_->ReadBytes() - before); };
    const auto start = Clock::now();
    const uint64_t id = large_->Resume(sealed_id_, policy);
    r->resume_ms.push_back(1e3 * SecondsSince(start));
    r->resume_mib.push_back(mib());
    r->disk_mib.push_back(Mib(DiskReadBytes() - disk_before));
    const attention::RowStats stats = large_->Decode(id, position, 0, tokens_, queries);
    r->first_ms.push_back(1e3 * SecondsSince(start));
    r->first_mib.push_back(mib());
    for (uint32_t layer = 1; layer < shape_.layers; ++layer) {
      large_->Decode(id, position, layer, tokens_, queries);
    }
    r->all_ms.push_back(1e3 * SecondsSince(start));
    r->all_mib.push_back(mib());
    r->share_first.push_back(r->first_ms.back() / 1e3 / upload_s);
    r->share_all.push_back(r->all_ms.back() / 1e3 / upload_s);
    r->exact_share.push_back(
        static_cast<double>(stats.exact_tokens) /
        static_cast<double>(stats.exact_tokens + stats.estimated_tokens + stats.dropped_tokens));
    large_->Close(id);
  }

  // What RowStats counts is of query token and KV head, as is this.
  // ---- steady reading ----

  void MeasureSteadyReading() {
    Model small(shape_, data_folder_, uint64_t{absl::GetFlag(FLAGS_budget_mib)} << 20,
                uint64_t{absl::GetFlag(FLAGS_page_mib)} << 20);
    Model memory(shape_, "", kLargeBytes, 0);
    UploadTimes times;
    const uint64_t whole = memory.Upload(tokens_, &times, error_target_);
    const uint64_t paged = small.Resume(sealed_id_, error_target_);
    std::vector<double> paged_s, memory_s, read_mib, ratios;
    for (uint32_t step = 0; step < absl::GetFlag(FLAGS_steps) + kWarmSteps; ++step) {
      const auto queries = tokens_.Queries();
      const uint64_t before = small.ReadBytes();
      const double slow = StepSeconds(&small, paged, step, queries);
      const double fast = StepSeconds(&memory, whole, step, queries);
      if (step < kWarmSteps) continue;
      read_mib.push_back(Mib(small.ReadBytes() - before));
      paged_s.push_back(slow);
      memory_s.push_back(fast);
      ratios.push_back(slow / fast);
    }
    const auto pages = small.engine()->archive_stats().pages;
    std::printf(
        "steady, %u MiB for pages (%.0f MiB taken) of %.0f MiB, all %u layers: %.1f steps/s, %.1f "
        "MiB read a step; in memory %.1f steps/s; time ratio of medians %.2f; of steps: median "
        "%.2f (p10 %.2f, p90 %.2f); hits %.1f%%, late %.1f%% of lookups\n",
        absl::GetFlag(FLAGS_page_mib), Mib(pages.slab_bytes), Mib(PayloadBytes()), shape_.layers,
        1 / Median(paged_s), Median(read_mib), 1 / Median(memory_s),
        Median(paged_s) / Median(memory_s), Median(ratios), Quantile(ratios, 0.1),
        Quantile(ratios, 0.9), Percent(pages.hits, pages.lookups),
        Percent(pages.late, pages.lookups));
  }

  double StepSeconds(Model* model, uint64_t id, uint32_t step,
                     const std::vector<uint16_t>& queries) {
    const auto start = Clock::now();
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      model->Decode(id, absl::GetFlag(FLAGS_tokens) + step, layer, tokens_, queries);
    }
    return SecondsSince(start);
  }

  static double Percent(uint64_t part, uint64_t all) {
    return 100 * static_cast<double>(part) / static_cast<double>(std::max<uint64_t>(all, 1));
  }

  static constexpr uint64_t kLargeBytes = uint64_t{8} << 30;
  static constexpr uint32_t kWarmSteps = 5;

  const ModelShape shape_ =
      Bf16Shape(absl::GetFlag(FLAGS_layers), 32, 8, absl::GetFlag(FLAGS_head_dim));
  const attention::Policy error_target_ = Must(attention::ParsePolicy(
      "error-target", {{"tolerance", absl::StrCat(absl::GetFlag(FLAGS_tolerance))}}));
  const attention::Policy double_p_ = Must(attention::ParsePolicy("double-p"));
  const std::string root_ = absl::StrCat(absl::GetFlag(FLAGS_folder), "/attnd-sealing-", getpid());
  const std::string data_folder_ = root_ + "/data";
  const std::string bare_folder_ = root_ + "/bare";
  const std::unique_ptr<storage::FileSystem> files_ = storage::MakePosixFileSystem();
  BareWriter bare_{files_.get(), absl::GetFlag(FLAGS_depth),
                   uint64_t{absl::GetFlag(FLAGS_write_kib)} << 10};
  Tokens tokens_{shape_, absl::GetFlag(FLAGS_tokens)};
  std::unique_ptr<Model> large_ = std::make_unique<Model>(shape_, data_folder_, kLargeBytes, 0);
  uint64_t sealed_id_ = 0;  // the newest
};

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  attnd::bench::Bench().Run();
  return 0;
}
