// SPDX-License-Identifier: Apache-2.0
//
// What a sequence takes beyond its keys and values: the index, and everything else. One prompt of
// each length is uploaded and segmented; its own figure (resident_bytes), the budget's (usage) and
// the process's resident memory are compared with the payload. The target is at most 10% beyond
// payload and index together.
//
//   memory_overhead --head_dim=128 --layers=2
#include <malloc.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "attention/segment/segment.h"
#include "bench/engine_support.h"
#include "bench/support.h"
#include "common/process_memory.h"
#include "engine/engine.h"

ABSL_FLAG(uint32_t, layers, 2, "layers");
ABSL_FLAG(uint32_t, head_dim, 128, "elements of a head");
ABSL_FLAG(uint32_t, kv_heads, 8, "KV heads");

namespace attnd::bench {
namespace {

constexpr uint32_t kSinkTokens = 4;
constexpr uint32_t kChunkTokens = 1024;

class Bench {
 public:
  void Measure(uint64_t tokens) {
    malloc_trim(0);
    const uint64_t before = ResidentBytes();
    const uint64_t id = Upload(tokens);
    const engine::PrefillResult prefill = Must(engine_->FinishPrefill("", id, id, nullptr));
    const engine::SequenceInfo info = Must(engine_->Info("", id));
    const uint64_t used = engine_->usage().resident_bytes;
    malloc_trim(0);
    const auto process = static_cast<double>(ResidentBytes() - before);
    const double payload =
        static_cast<double>(tokens) * shape_.layers * shape_.kv_heads * shape_.token_bytes();
    const auto index = static_cast<double>(IndexBytes(prefill.segmented_tokens));
    const double whole = payload + index;
    std::printf(
        "%8llu tokens: payload %8.2f MiB, index %5.2f%% of it; beyond both: sequence %5.2f%%, "
        "budget %5.2f%%, process %5.2f%%\n",
        static_cast<unsigned long long>(tokens), payload / (1 << 20), 100 * index / payload,
        100 * (static_cast<double>(info.resident_bytes) / whole - 1),
        100 * (static_cast<double>(used) / whole - 1), 100 * (process / whole - 1));
    Must(engine_->Close("", id));
  }

 private:
  uint64_t IndexBytes(uint64_t segmented) const {
    uint64_t bytes = 0;
    for (uint64_t at = 0; at < segmented; at += kSegmentTokens) {
      const auto run = static_cast<uint32_t>(std::min<uint64_t>(kSegmentTokens, segmented - at));
      bytes += attention::Segment::IndexBytes(
          {shape_, attention::kClusterIndexes, run, at == 0 ? kSinkTokens : 0});
    }
    return bytes;
  }

  uint64_t Upload(uint64_t tokens) {
    engine::OpenArgs args;
    args.fingerprint = "memory_overhead";
    args.shape = shape_;
    const uint64_t id = Must(engine_->Open("", args));
    const uint64_t row = uint64_t{shape_.kv_heads} * shape_.head_dim;
    const std::vector<uint16_t> values = RandomBf16(kChunkTokens * row, &random_);
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      for (uint64_t at = 0; at < tokens; at += kChunkTokens) {
        engine::AppendChunk chunk;
        chunk.layer = layer;
        chunk.first_position = at;
        chunk.tokens = std::min<uint64_t>(kChunkTokens, tokens - at);
        chunk.k = chunk.v = View(values, chunk.tokens * row);
        Must(engine_->Append("", id, id, chunk));
      }
    }
    return id;
  }

  const ModelShape shape_ =
      Bf16Shape(absl::GetFlag(FLAGS_layers), 4 * absl::GetFlag(FLAGS_kv_heads),
                absl::GetFlag(FLAGS_kv_heads), absl::GetFlag(FLAGS_head_dim));
  const std::unique_ptr<engine::Engine> engine_ = MakeEngine(/*threads=*/0);
  std::mt19937_64 random_{1};
};

int Main() {
  Bench bench;
  bench.Measure(kSegmentTokens);  // warm-up: threads, scratch
  for (const uint64_t tokens : {1000u, 8192u, 20001u, 65536u}) bench.Measure(tokens);
  return 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return attnd::bench::Main();
}
