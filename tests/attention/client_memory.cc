// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/client_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>

namespace attnd::attention::test {
namespace {

size_t BytesOf(const std::vector<RowMessage>& messages) {
  size_t bytes = 0;
  for (const RowMessage& message : messages) {
    bytes += message.queries.size() + message.keys.size() + message.values.size();
  }
  return bytes;
}

size_t LanesOf(std::span<const TestRow> rows) {
  size_t lanes = 0;
  for (const TestRow& row : rows) {
    lanes += size_t{row.query_tokens} * row.sequence->spec.shape.query_heads;
  }
  return lanes;
}

size_t OutBytes(std::span<const TestRow> rows) {
  const TestRow& first = rows.front();
  return LanesOf(rows) * first.sequence->spec.shape.value_dim * DTypeBytes(first.final_dtype);
}

}  // namespace

ClientMemory::ClientMemory(const Backend& backend, std::span<const TestRow> rows,
                           const std::vector<RowMessage>& messages,
                           const SharedPages::Allocate& allocate)
    : pages_(backend, BytesOf(messages) + OutBytes(rows) + LanesOf(rows) * sizeof(float),
             3 * messages.size() + 4, allocate),
      ring_(reinterpret_cast<uint32_t*>(pages_.Take(sizeof(uint32_t)))),
      answer_(reinterpret_cast<uint64_t*>(pages_.Take(sizeof(uint64_t)))),
      tokens_(messages.size()) {
  // Queries come last, as a client's may.
  for (size_t r = 0; r < messages.size(); ++r) tokens_[r].keys = Place(messages[r].keys);
  for (size_t r = 0; r < messages.size(); ++r) tokens_[r].values = Place(messages[r].values);
  for (size_t r = 0; r < messages.size(); ++r) tokens_[r].queries = Place(messages[r].queries);
  *ring_ = kEpoch - 1;
  *answer_ = kUntold;
  turn_.ring = ring_;
  turn_.epoch = kEpoch;
  turn_.tokens = tokens_;
  if (rows.front().final_dtype == DType::kFp32) return;
  turn_.out = pages_.Take(OutBytes(rows));
  turn_.lse = reinterpret_cast<float*>(pages_.Take(LanesOf(rows) * sizeof(float)));
  turn_.answer = answer_;
  lse_ = {turn_.lse, LanesOf(rows)};
}

const std::byte* ClientMemory::Place(const std::vector<std::byte>& bytes) {
  if (bytes.empty()) return nullptr;
  std::byte* const at = pages_.Take(bytes.size());
  std::copy(bytes.begin(), bytes.end(), at);
  tensors_.emplace_back(at, bytes.size());
  return at;
}

void ClientMemory::MakeTwin(const Backend& backend) {
  ASSERT_LE(pages_.bytes(), kSharedDeviceUnitBytes);
  auto twin = backend.ShareMemory(kSharedDeviceUnitBytes);
  ASSERT_TRUE(twin.ok()) << twin.status();
  void* const view = mmap(nullptr, kSharedDeviceUnitBytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                          twin->descriptor.get(), 0);
  if (view != MAP_FAILED) {
    twin_ = {static_cast<std::byte*>(view),
             [](std::byte* of) { munmap(of, kSharedDeviceUnitBytes); }};
  } else {
    twin_ = {twin->data, [](std::byte*) {}};
  }
  devices_twin_ = std::move(twin->memory);
  std::copy_n(pages_.data(), pages_.bytes(), twin_.get());
  turn_.memory = pages_.data();
  turn_.memory_twin = twin->data;
}

void ClientMemory::SpoilTensors() {
  for (const std::span<std::byte> tensor : tensors_) {
    std::fill(tensor.begin(), tensor.end(), std::byte{0x7f});
    if (twin_ != nullptr) std::fill_n(InTwin(tensor.data()), tensor.size(), std::byte{0x7f});
  }
}

bool ClientMemory::told() const {
  return *(twin_ != nullptr ? InTwin(answer_) : answer_) == kEpoch &&
         (twin_ == nullptr || *answer_ == kUntold);
}

bool ClientMemory::untouched() const {
  return *answer_ == kUntold && (twin_ == nullptr || *InTwin(answer_) == kUntold);
}

}  // namespace attnd::attention::test
