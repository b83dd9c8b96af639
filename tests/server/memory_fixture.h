// SPDX-License-Identifier: Apache-2.0
//
// A client of passes over memory that writes every word and every field itself, right or wrong.
#ifndef ATTND_TESTS_SERVER_MEMORY_FIXTURE_H_
#define ATTND_TESTS_SERVER_MEMORY_FIXTURE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "client/cpp/memory_client.h"
#include "gtest/gtest.h"
#include "plane/word_wait.h"
#include "plane/words.h"
#include "tests/server/test_server.h"
#include "tests/server/within.h"

namespace attnd::testing {

// A region and a Decode stream. Rows are SmallStep's, over models of two layers: 2 query heads, 1
// KV head of 16 elements, fp32.
class MemoryPassClient {
 public:
  static constexpr uint32_t kLayers = 2;
  static constexpr uint64_t kRegionBytes = 8192;
  // Where the fields of Declaration() lie.
  static constexpr uint64_t kQ = 128, kK = 1024, kV = 2048, kOut = 3072, kLse = 4096;

  explicit MemoryPassClient(const TestServer& server, const std::string& tenant = "")
      : stub_(server.NewStub()) {
    auto memory =
        MemoryClient::Connect(server.address().substr(5) + ".memory", std::chrono::seconds(10));
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    region_ = *memory_->Register(kRegionBytes, tenant);
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    if (!tenant.empty()) context_.AddMetadata("attnd-tenant", tenant);
    stream_ = stub_->Decode(&context_);
  }
  ~MemoryPassClient() { context_.TryCancel(); }

  // A pass of one token of one row, without data. The ring word is ready for it.
  v1::DecodeRequest Declaration(uint64_t sequence = 1, uint64_t position = 0) {
    v1::DecodeRequest request = SmallStep(sequence, position);
    for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
      tensor->clear_data();
    }
    v1::Pass* const pass = request.mutable_begin_pass();
    pass->set_layers(kLayers);
    pass->set_want_lse(true);
    v1::PassMemory* const memory = pass->mutable_memory();
    memory->set_region_id(region_.id);
    memory->set_first_epoch(epoch_);
    memory->mutable_q()->set_offset(kQ);
    memory->mutable_k()->set_offset(kK);
    memory->mutable_v()->set_offset(kV);
    memory->mutable_out()->set_offset(kOut);
    memory->mutable_lse()->set_offset(kLse);
    plane::WriteWord(&words()->ring, epoch_ - 1);
    return request;
  }
  bool Declare(const v1::DecodeRequest& request) { return stream_->Write(request); }
  // Rings for the layer, whose q, k and v are `value` throughout.
  void Ring(uint32_t layer, float value = 1.0f) {
    Fill(value);
    plane::WriteWord(&words()->ring, epoch_ + layer);
  }
  // As a GPU rings: nobody is woken.
  void RingAsDevice(uint32_t layer, float value = 1.0f) {
    Fill(value);
    std::atomic_ref<uint32_t>(words()->ring).store(epoch_ + layer, std::memory_order_release);
  }
  bool WaitFor(uint32_t layer) {
    return Within([&] { return plane::ReadWord(&words()->answer) == epoch_ + layer; });
  }
  // The same without a sleep between two looks.
  bool LookFor(uint32_t layer) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (plane::ReadWord(&words()->answer) != epoch_ + layer) {
      if (std::chrono::steady_clock::now() > limit) return false;
    }
    return true;
  }
  // The pass's reply. Later passes have later epochs.
  v1::DecodeResponse Reply() {
    v1::DecodeResponse reply;
    EXPECT_TRUE(stream_->Read(&reply));
    epoch_ += kLayers + 1;
    return reply;
  }
  // Of a pass with so many layers more than kLayers.
  void Skip(uint32_t epochs) { epoch_ += epochs; }
  // A whole pass that must succeed.
  v1::DecodeResponse Pass(uint64_t sequence, uint64_t position, float value = 1.0f) {
    EXPECT_TRUE(Declare(Declaration(sequence, position)));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      Ring(layer, value);
      EXPECT_TRUE(WaitFor(layer)) << layer;
    }
    return Reply();
  }
  // As a client that is killed. The connection that owns the region stays.
  void LeaveStream() { context_.TryCancel(); }
  void LeaveMemory() { memory_.reset(); }
  grpc::Status Finish() {
    stream_->WritesDone();
    v1::DecodeResponse reply;
    while (stream_->Read(&reply)) continue;
    return stream_->Finish();
  }

  plane::Words* words() const { return reinterpret_cast<plane::Words*>(region_.memory->data()); }
  float* floats(uint64_t offset) const {
    return reinterpret_cast<float*>(region_.memory->data() + offset);
  }
  uint32_t epoch() const { return epoch_; }
  uint64_t region_id() const { return region_.id; }
  MemoryClient* memory() const { return memory_.get(); }

 private:
  void Fill(float value) {
    std::fill_n(floats(kQ), 32, value);
    std::fill_n(floats(kK), 16, value);
    std::fill_n(floats(kV), 16, value);
  }

  const std::unique_ptr<v1::Attnd::Stub> stub_;
  std::unique_ptr<MemoryClient> memory_;
  ClientRegion region_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>> stream_;
  uint32_t epoch_ = 1;
};

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVER_MEMORY_FIXTURE_H_
