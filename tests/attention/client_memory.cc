// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/client_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace attnd::attention::test {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 64;

// Gives pieces of a buffer, one after another; without one it only counts.
class Pieces {
 public:
  explicit Pieces(std::byte* buffer) : buffer_(buffer) {}
  std::byte* Take(size_t bytes) {
    std::byte* const piece = buffer_ == nullptr ? nullptr : buffer_ + end_;
    end_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  size_t end() const { return end_; }

 private:
  std::byte* const buffer_;
  size_t end_ = 0;
};

}  // namespace

std::shared_ptr<std::byte> ClientMemory::FromTheHost(size_t bytes) {
  auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kPage, bytes));
  std::memset(memory, 0, bytes);
  return {memory, [](std::byte* of) { std::free(of); }};
}

ClientMemory::ClientMemory(const Backend& backend, std::span<const TestRow> rows,
                           const std::vector<RowMessage>& messages, const Allocate& allocate) {
  const DType dtype = rows.front().final_dtype;
  const ModelShape& shape = rows.front().sequence->spec.shape;
  size_t lanes = 0;
  for (const TestRow& row : rows) lanes += size_t{row.query_tokens} * shape.query_heads;
  const auto lay_out = [&](std::byte* buffer) {
    Pieces pieces(buffer);
    ring_ = reinterpret_cast<uint32_t*>(pieces.Take(kAlignment));
    answer_ = reinterpret_cast<uint64_t*>(pieces.Take(kAlignment));
    tokens_.assign(messages.size(), {});
    tensors_.clear();
    // Queries come last, as a client's may.
    const auto place = [&](const std::vector<std::byte>& bytes) -> const std::byte* {
      if (bytes.empty()) return nullptr;
      std::byte* const at = pieces.Take(bytes.size());
      if (buffer != nullptr) std::copy(bytes.begin(), bytes.end(), at);
      tensors_.emplace_back(at, bytes.size());
      return at;
    };
    for (size_t r = 0; r < messages.size(); ++r) tokens_[r].keys = place(messages[r].keys);
    for (size_t r = 0; r < messages.size(); ++r) tokens_[r].values = place(messages[r].values);
    for (size_t r = 0; r < messages.size(); ++r) tokens_[r].queries = place(messages[r].queries);
    if (dtype != DType::kFp32) {
      turn_.out = pieces.Take(lanes * shape.value_dim * DTypeBytes(dtype));
      turn_.lse = reinterpret_cast<float*>(pieces.Take(lanes * sizeof(float)));
      turn_.answer = answer_;
    }
    return pieces.end();
  };
  const size_t bytes = (lay_out(nullptr) + kPage - 1) / kPage * kPage;
  memory_ = allocate(bytes);
  lay_out(memory_.get());
  mapping_ = backend.MapMemory(memory_.get(), bytes);
  *ring_ = kEpoch - 1;
  *answer_ = kUntold;
  turn_.ring = ring_;
  turn_.epoch = kEpoch;
  turn_.tokens = tokens_;
  if (turn_.lse != nullptr) lse_ = {turn_.lse, lanes};
}

bool ClientMemory::told() const { return *answer_ == kEpoch; }

}  // namespace attnd::attention::test
