// SPDX-License-Identifier: Apache-2.0
//
// What benchmarks share: an end for what must not fail, and the model and data that they measure.
#ifndef ATTND_BENCH_SUPPORT_H_
#define ATTND_BENCH_SUPPORT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/dtype.h"
#include "common/model_shape.h"

namespace attnd::bench {

inline double MicrosBetween(std::chrono::steady_clock::time_point begin,
                            std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - begin).count();
}

// Ends the program, saying why, unless the status is OK.
inline void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

// The value, if there is one.
template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

// Calls work() on so many threads, of which this one is one.
template <typename Work>
void OnThreads(uint32_t threads, const Work& work) {
  std::vector<std::thread> others;
  for (uint32_t i = 1; i < threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

// A bf16 model whose keys and values are of one width.
inline ModelShape Bf16Shape(uint32_t layers, uint32_t query_heads, uint32_t kv_heads,
                            uint32_t head_dim) {
  ModelShape shape;
  shape.layers = layers;
  shape.query_heads = query_heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = shape.value_dim = head_dim;
  shape.dtype = DType::kBf16;
  shape.softmax_scale = 0.08f;
  return shape;
}

// Normal numbers as bf16.
inline std::vector<uint16_t> RandomBf16(size_t elements, std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(elements);
  for (uint16_t& value : values) value = FloatToBf16(normal(*random));
  return values;
}

}  // namespace attnd::bench

#endif  // ATTND_BENCH_SUPPORT_H_
