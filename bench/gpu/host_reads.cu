// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <random>

#include "bench/gpu/gpu_memory.cuh"
#include "bench/gpu/host_reads.h"
#include "bench/statistics.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/step/copy_page.cuh"

namespace attnd::bench {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / 32;
constexpr int kLaunches = 5;  // that are measured, behind one that is not

// What a launch reads: pages[0, count), all of them in mapped host memory.
struct PageList {
  const std::byte* const* pages;
  uint32_t count;
  uint32_t page_bytes;
};

__global__ void __launch_bounds__(kThreads) CopyPages(const PageList list, std::byte* to) {
  const uint32_t warps = gridDim.x * kWarps;
  for (uint32_t p = blockIdx.x * kWarps + threadIdx.x / 32; p < list.count; p += warps) {
    gpu::CopyPage(list.pages[p], to + uint64_t{p} * list.page_bytes, list.page_bytes);
  }
}

__device__ __forceinline__ uint32_t Sum(const uint4& word) {
  return word.x + word.y + word.z + word.w;
}

// Writes a sum of what was read, so that it has to be read.
__global__ void __launch_bounds__(kThreads) ReadPages(const PageList list, uint32_t* sums) {
  constexpr uint32_t kAtOnce = 8;  // as CopyPage
  const uint32_t warps = gridDim.x * kWarps, chunks = list.page_bytes / sizeof(uint4);
  uint32_t sum = 0;
  for (uint32_t p = blockIdx.x * kWarps + threadIdx.x / 32; p < list.count; p += warps) {
    const auto* source = reinterpret_cast<const uint4*>(list.pages[p]);
    for (uint32_t first = threadIdx.x % 32; first < chunks; first += 32 * kAtOnce) {
      uint4 data[kAtOnce] = {};
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (first + i * 32 < chunks) data[i] = __ldcs(source + first + i * 32);
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) sum += Sum(data[i]);
    }
  }
  sums[blockIdx.x * kThreads + threadIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) ReadWords(const PageList list, uint32_t* sums) {
  constexpr uint32_t kAtOnce = 4;
  const uint32_t chunks = list.page_bytes / sizeof(uint4);
  const uint64_t words = uint64_t{list.count} * chunks, threads = uint64_t{gridDim.x} * kThreads;
  uint32_t sum = 0;
  for (uint64_t first = blockIdx.x * kThreads + threadIdx.x; first < words;
       first += threads * kAtOnce) {
    uint4 data[kAtOnce] = {};
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint64_t word = first + i * threads;
      if (word < words) {
        data[i] = reinterpret_cast<const uint4*>(list.pages[word / chunks])[word % chunks];
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) sum += Sum(data[i]);
  }
  sums[blockIdx.x * kThreads + threadIdx.x] = sum;
}

enum class Way { kCopyPages, kReadPages, kReadWords };
struct Shape {
  Way way;
  const char* name;
  std::vector<uint32_t> thread_blocks;
};
// The fetch stage has 8 thread blocks for each query token and KV head.
const Shape kShapes[] = {
    {Way::kCopyPages, "pages to device memory, as the fetch stage", {64, 256, 1024}},
    {Way::kReadPages, "pages, reads alone", {64, 256, 1024}},
    {Way::kReadWords, "plain loads of 16 bytes", {256, 1024, 4096}},
};
constexpr uint32_t kBlocksMax = 4096;

class Reader {
 public:
  Reader(const std::vector<const std::byte*>& pages, uint32_t page_bytes, uint64_t bytes_max)
      : page_bytes_(page_bytes), in_order_(gpu::OnDevice(pages)) {
    std::vector<const std::byte*> shuffled = pages;
    std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937_64(1));
    shuffled_ = gpu::OnDevice(shuffled);
    total_ = static_cast<uint32_t>(pages.size());
    to_ = gpu::NewOnDevice<std::byte>(bytes_max);
    sums_ = gpu::NewOnDevice<uint32_t>(size_t{kBlocksMax} * kThreads);
    // It waits for the copies above, which are of the default stream.
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamDefault));
    for (cudaEvent_t* event : {&begin_, &end_}) {
      CHECK_CUDA(cudaEventCreateWithFlags(event, cudaEventDefault));
    }
  }
  ~Reader() {
    for (cudaEvent_t event : {begin_, end_}) CHECK_CUDA(cudaEventDestroy(event));
    CHECK_CUDA(cudaStreamDestroy(stream_));
    for (void* memory : {static_cast<void*>(in_order_), static_cast<void*>(shuffled_),
                         static_cast<void*>(to_), static_cast<void*>(sums_)}) {
      CHECK_CUDA(cudaFree(memory));
    }
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // GB a second of launches that read `count` pages each.
  double Rate(Way way, uint32_t thread_blocks, uint32_t count) {
    std::vector<double> rates;
    for (int launch = 0; launch <= kLaunches; ++launch) {
      const auto first = static_cast<uint32_t>(uint64_t{count} * launch % (total_ - count + 1));
      const double seconds = Seconds(way, thread_blocks, first, count);
      if (launch > 0) rates.push_back(double{1} * count * page_bytes_ / seconds / 1e9);
    }
    return Median(rates);
  }

 private:
  // More would have nothing to do.
  uint32_t BlocksFor(Way way, uint32_t count) const {
    const uint64_t words = uint64_t{count} * (page_bytes_ / sizeof(uint4));
    const uint64_t blocks = way == Way::kReadWords ? (words + kThreads - 1) / kThreads
                                                   : (uint64_t{count} + kWarps - 1) / kWarps;
    return static_cast<uint32_t>(std::min<uint64_t>(blocks, kBlocksMax));
  }

  double Seconds(Way way, uint32_t thread_blocks, uint32_t first, uint32_t count) {
    const uint32_t blocks = std::min(thread_blocks, BlocksFor(way, count));
    // One of other pages, which is not measured: its time hides the host's, from the event to the
    // launch behind it.
    const auto others =
        static_cast<uint32_t>((uint64_t{first} + total_ / 2) % (total_ - count + 1));
    Launch(way, blocks, others, count);
    CHECK_CUDA(cudaEventRecord(begin_, stream_));
    Launch(way, blocks, first, count);
    CHECK_CUDA(cudaEventRecord(end_, stream_));
    CHECK_CUDA(cudaStreamSynchronize(stream_));
    float milliseconds = 0;
    CHECK_CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return double{milliseconds} / 1e3;
  }

  void Launch(Way way, uint32_t blocks, uint32_t first, uint32_t count) {
    const PageList in_order = {in_order_ + first, count, page_bytes_};
    const PageList shuffled = {shuffled_ + first, count, page_bytes_};
    switch (way) {
      case Way::kCopyPages:
        CHECK_CUDA(gpu::Launch(CopyPages, blocks, kThreads, 0, stream_, shuffled, to_));
        break;
      case Way::kReadPages:
        CHECK_CUDA(gpu::Launch(ReadPages, blocks, kThreads, 0, stream_, shuffled, sums_));
        break;
      case Way::kReadWords:
        CHECK_CUDA(gpu::Launch(ReadWords, blocks, kThreads, 0, stream_, in_order, sums_));
        break;
    }
  }

  const uint32_t page_bytes_;
  uint32_t total_ = 0;
  const std::byte** in_order_ = nullptr;
  const std::byte** shuffled_ = nullptr;
  std::byte* to_ = nullptr;
  uint32_t* sums_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace

std::vector<HostReadRate> MeasureHostReads(const std::vector<const std::byte*>& pages,
                                           uint32_t page_bytes,
                                           const std::vector<uint64_t>& amounts) {
  std::vector<HostReadRate> rates;
  const uint64_t all = pages.size() * page_bytes;
  if (amounts.empty() || all == 0) return rates;
  const uint64_t most = std::min(all, *std::max_element(amounts.begin(), amounts.end()));
  Reader reader(pages, page_bytes, most);
  for (const uint64_t amount : amounts) {
    const auto count =
        static_cast<uint32_t>(std::max<uint64_t>(1, std::min(all, amount) / page_bytes));
    for (const Shape& shape : kShapes) {
      for (const uint32_t blocks : shape.thread_blocks) {
        rates.push_back({shape.name, blocks, uint64_t{count} * page_bytes,
                         reader.Rate(shape.way, blocks, count)});
      }
    }
  }
  return rates;
}

}  // namespace attnd::bench
