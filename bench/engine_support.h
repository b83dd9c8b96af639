// SPDX-License-Identifier: Apache-2.0
//
// What benchmarks of the engine share.
#ifndef ATTND_BENCH_ENGINE_SUPPORT_H_
#define ATTND_BENCH_ENGINE_SUPPORT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "bench/support.h"
#include "engine/engine.h"

namespace attnd::bench {

inline constexpr uint32_t kSegmentTokens = 8192;

// An engine with more memory than benchmarks take; a step uses `threads` threads, 0: all cores.
// `listener`, if any, must outlive the engine.
inline std::unique_ptr<engine::Engine> MakeEngine(uint32_t threads,
                                                  engine::EventListener* listener = nullptr) {
  engine::EngineOptions options;
  options.memory_budget_bytes = uint64_t{8} << 30;
  options.segment_tokens = kSegmentTokens;
  attention::CpuBackendOptions backend;
  backend.threads = threads;
  return Must(engine::Engine::Create(options, attention::MakeCpuBackend(backend), listener));
}

// The first `elements` of bf16 numbers.
inline engine::TensorView View(const std::vector<uint16_t>& values, size_t elements) {
  return {DType::kBf16, reinterpret_cast<const std::byte*>(values.data()), elements};
}
inline engine::TensorView View(const std::vector<uint16_t>& values) {
  return View(values, values.size());
}

}  // namespace attnd::bench

#endif  // ATTND_BENCH_ENGINE_SUPPORT_H_
