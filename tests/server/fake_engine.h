// SPDX-License-Identifier: Apache-2.0
//
// FakeEngine: an engine whose methods wait until a test lets them go, so that every state of a
// stream or a call can be reached without timing. It computes nothing.
#ifndef ATTND_TESTS_SERVER_FAKE_ENGINE_H_
#define ATTND_TESTS_SERVER_FAKE_ENGINE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "gtest/gtest.h"
#include "plane/word_wait.h"
#include "tests/engine/forwarding_backend.h"
#include "tests/server/within.h"

namespace attnd::testing {

// The CPU's, beside a device that sees clients' memory, or not.
class MappingBackend final : public engine::test::ForwardingBackend {
 public:
  void Map() { maps_ = true; }
  uint64_t mapped_bytes() const { return *bytes_; }
  std::shared_ptr<const void> MapMemory(std::byte* memory, uint64_t bytes) const override {
    if (!maps_) return nullptr;
    *bytes_ += bytes;
    return {memory, [bytes, all = bytes_](const std::byte*) { *all -= bytes; }};
  }

 private:
  std::atomic<bool> maps_{false};
  const std::shared_ptr<std::atomic<uint64_t>> bytes_ = std::make_shared<std::atomic<uint64_t>>(0);
};

// Thread-safety: all methods may be called from any thread.
class FakeEngine final : public engine::Engine {
 public:
  // Steps wait from now on, until Release or until their stream is cancelled.
  void Hold() { held_ = true; }
  void Release() { held_ = false; }
  // Truncate, Fork, Close, Open and List wait from now on, as behind a sequence's lock.
  void HoldCalls() { calls_held_ = true; }
  void ReleaseCalls() { calls_held_ = false; }
  int calls_waiting() const { return calls_waiting_; }
  int calls_done() const { return calls_done_; }
  // So does ReleaseWriter.
  void HoldWriters() { writers_held_ = true; }
  void ReleaseWriters() { writers_held_ = false; }
  // So does the end of a pass: what it has appended is still there.
  void HoldPassEnds() { pass_ends_held_ = true; }
  void ReleasePassEnds() { pass_ends_held_ = false; }
  // Every sequence has been closed: builds are given up.
  void LoseSequences() { gone_ = true; }
  int waiting() const { return waiting_; }
  int decoded() const { return decoded_; }
  int chunks() const { return chunks_; }
  int observed() const { return observed_; }
  // So many calls of Observe and of Append find no room; whoever waits for some finds it later.
  void RefuseNext(int observes, int chunks) {
    observes_refused_ = observes;
    chunks_refused_ = chunks;
    may_make_room_ = true;
  }
  // Called with each chunk, also one that is then refused. Before the first one.
  void OnAppend(std::function<void(const engine::AppendChunk&)> call) {
    on_append_ = std::move(call);
  }
  int cancelled() const { return cancelled_; }
  // Calls of passes' PrepareNextLayer and ForgetNextLayer.
  int prepared() const { return prepared_; }
  // From now on a device sees the memory that clients register.
  void MapClientMemory() { backend_.Map(); }
  uint64_t mapped_bytes() const { return backend_.mapped_bytes(); }
  // Of PrepareNextLayer, with a client's memory.
  int turns() const { return turns_; }
  int places() const { return places_; }  // of them, where the answer may be left
  // Steps of layers that are prepared so answer there, with 3 and an lse of 4, and tell the client,
  // until false. What they read of its memory: the first element of q.
  void TellClients(bool tells) { tells_clients_ = tells; }
  // Steps that have told their client fail behind that.
  void FailBehindAnswers(bool fails) { fails_behind_answers_ = fails; }
  float begun_with() const { return begun_with_; }
  int forgotten() const { return forgotten_; }
  int released_writers() const { return released_writers_; }
  bool opening_stopped() const { return opening_stopped_; }
  bool WaitForWaiting(int count) const {
    return Within([&] { return waiting_ >= count; });
  }
  // The first element of the last step's q, as it was when the step was let go.
  float first_of_q() const { return first_of_q_; }
  // From now on answers of 2 go to the caller's dtype, where it has a place for them; others are 1.
  void WriteFinalAnswers() { final_answers_ = true; }
  // Elements of `out` for each query token.
  void set_value_dim(uint64_t value_dim) { value_dim_ = value_dim; }

  const engine::EngineOptions& options() const override { return options_; }
  const attention::Backend& backend() const override { return backend_; }
  attention::IndexSet IndexesOf(const attention::Policy& policy) const override {
    return policy.Indexes();
  }
  absl::StatusOr<uint64_t> Open(absl::string_view, const engine::OpenArgs&) override {
    if (opening_stopped_) return absl::UnavailableError("the server is shutting down");
    WaitForCall();
    return next_id_.fetch_add(1);
  }
  absl::Status Observe(absl::string_view, engine::WriterId, uint64_t,
                       const engine::ObservedChunk&) override {
    return TakeUnlessFull(&observes_refused_, &observed_);
  }
  absl::Status Append(absl::string_view, engine::WriterId, uint64_t,
                      const engine::AppendChunk& chunk) override {
    if (on_append_ != nullptr) on_append_(chunk);
    return TakeUnlessFull(&chunks_refused_, &chunks_);
  }
  absl::StatusOr<engine::PrefillResult> FinishPrefill(absl::string_view, engine::WriterId, uint64_t,
                                                      const std::atomic<bool>* cancel) override {
    if (!WaitIfHeld(cancel)) return absl::CancelledError("cancelled");
    if (gone_) return absl::NotFoundError("sequence_id is unknown");
    return engine::PrefillResult();
  }
  absl::StatusOr<engine::SequenceInfo> Info(absl::string_view, uint64_t) override {
    if (gone_) return absl::NotFoundError("sequence_id is unknown");
    return engine::SequenceInfo();
  }
  // All sequences have one lease.
  absl::StatusOr<engine::Lease::Call> BeginCall(absl::string_view, uint64_t) override {
    return engine::Lease::Call(lease_);
  }
  bool lease_held() const { return lease_->in_call(); }
  absl::Status Decode(absl::string_view, engine::WriterId, const engine::DecodeArgs& args,
                      engine::AnswerMemory memory, engine::DecodeResult* result) override {
    if (!WaitIfHeld(args.cancelled)) return absl::CancelledError("cancelled");
    float first = 0;
    ToFloat(args.q.dtype, args.q.data, 1, &first);
    first_of_q_ = first;
    ++decoded_;
    uint64_t tokens = 0;
    for (const engine::DecodeRow& row : args.rows) tokens += row.query_tokens;
    result->rows.assign(args.rows.size(), {});
    result->value_dim = value_dim_;
    const auto answer = memory({tokens, args.q_heads, result->value_dim});
    if (!answer.ok()) return answer.status();
    std::fill(answer->out.begin(), answer->out.end(), 1.0f);
    std::fill(answer->lse.begin(), answer->lse.end(), 0.0f);
    if (final_answers_ && !answer->final_out.empty()) {
      std::fill(answer->out.begin(), answer->out.end(), std::nanf(""));
      std::vector<float> twos(answer->out.size(), 2.0f);
      FromFloat(args.final_dtype, twos.data(), twos.size(), answer->final_out.data());
      for (engine::DecodeRowResult& row : result->rows) row.out_is_final = true;
    }
    return absl::OkStatus();
  }
  // Its steps are Decode's.
  absl::StatusOr<std::unique_ptr<engine::Pass>> BeginPass(absl::string_view, engine::WriterId,
                                                          std::span<const engine::DecodeRow> rows,
                                                          uint32_t) override {
    return std::make_unique<FakePass>(this, rows);
  }
  int passes_over() const { return passes_over_; }
  absl::StatusOr<uint64_t> Truncate(absl::string_view, uint64_t, uint64_t) override {
    WaitForCall();
    return 0;
  }
  absl::StatusOr<engine::SequenceInfo> Fork(absl::string_view, uint64_t,
                                            std::optional<uint64_t>) override {
    WaitForCall();
    return engine::SequenceInfo();
  }
  absl::Status Close(absl::string_view, uint64_t) override {
    WaitForCall();
    return absl::OkStatus();
  }
  std::vector<engine::SequenceInfo> List(absl::string_view, uint64_t, uint32_t) override {
    WaitForCall();
    return {};
  }
  absl::StatusOr<engine::SealResult> Seal(absl::string_view, uint64_t,
                                          const std::atomic<bool>* cancel) override {
    if (!WaitIfHeld(cancel)) return absl::CancelledError("cancelled");
    return engine::SealResult{.sealed_id = 1};
  }
  absl::StatusOr<engine::OpenResult> Resume(absl::string_view, const engine::OpenArgs&,
                                            uint64_t sealed_id,
                                            const std::atomic<bool>* cancel) override {
    if (!WaitIfHeld(cancel)) return absl::CancelledError("cancelled");
    return engine::OpenResult{next_id_.fetch_add(1), sealed_id};
  }
  absl::StatusOr<engine::OpenResult> OpenReusing(absl::string_view tenant,
                                                 const engine::OpenArgs& args,
                                                 std::span<const uint32_t>,
                                                 const std::atomic<bool>*) override {
    const auto id = Open(tenant, args);
    if (!id.ok()) return id.status();
    return engine::OpenResult{*id, 0};
  }
  absl::Status DropSealed(absl::string_view, uint64_t) override { return absl::OkStatus(); }
  absl::StatusOr<std::vector<engine::SealedInfo>> ListSealed(absl::string_view, uint64_t,
                                                             uint32_t) override {
    WaitForCall();
    return std::vector<engine::SealedInfo>();
  }
  engine::ArchiveStats archive_stats() const override { return {}; }
  bool MayReadDisk(absl::string_view, uint64_t) override { return may_read_disk_; }
  bool MayMakeRoom() const override { return may_make_room_; }
  // From now on steps may have to wait for the disk.
  void ReadDisk() { may_read_disk_ = true; }
  void ReleaseWriter(engine::WriterId) override {
    WaitWhile(writers_held_);
    ++released_writers_;
  }
  engine::Usage usage() const override { return {}; }
  void WaitForBackground() override {}
  void StopOpening() override { opening_stopped_ = true; }
  void Shutdown() override {}

 private:
  class FakePass final : public engine::Pass {
   public:
    FakePass(FakeEngine* engine, std::span<const engine::DecodeRow> rows)
        : engine_(engine), rows_(rows.begin(), rows.end()) {}
    ~FakePass() override {
      WaitWhile(engine_->pass_ends_held_);
      ++engine_->passes_over_;
    }
    uint32_t layer() const override { return layer_; }
    absl::Status Step(const engine::DecodeArgs& args, engine::AnswerMemory memory,
                      engine::DecodeResult* result) override {
      engine::DecodeArgs step = args;
      step.rows = rows_;
      const engine::ClientLayer client = std::exchange(client_, {});
      result->told_client = false;
      const absl::Status status = engine_->Decode("", 0, step, memory, result);
      if (!status.ok()) return status;
      ++layer_;
      if (client.ring == nullptr) return status;
      EXPECT_EQ(plane::ReadWord(client.ring), client.epoch);
      float first = 0;
      ToFloat(client.args.q.dtype, client.args.q.data, 1, &first);
      engine_->begun_with_ = first;
      if (!engine_->tells_clients_ || client.answer == nullptr) return status;
      TellClient(client, result);
      return engine_->fails_behind_answers_ ? absl::UnavailableError("planted") : status;
    }
    void WarmNextLayer() override {}
    void ExpectFirstLayer(const engine::DecodeArgs&) override {}
    bool PrepareNextLayer(const engine::ClientLayer* client) override {
      ++engine_->prepared_;
      if (client != nullptr) ++engine_->turns_;
      if (client != nullptr && !client->out.empty()) ++engine_->places_;
      client_ = client != nullptr ? *client : engine::ClientLayer();
      return true;
    }
    void ForgetNextLayer() override {
      ++engine_->forgotten_;
      client_ = {};
    }

   private:
    static void TellClient(const engine::ClientLayer& client, engine::DecodeResult* result) {
      const float three = 3;
      FromFloat(client.args.final_dtype, &three, 1, client.out.data());
      if (!client.lse.empty()) client.lse.front() = 4;
      for (engine::DecodeRowResult& row : result->rows) row.out_is_final = true;
      result->told_client = true;
      std::atomic_ref(*client.answer).store(client.epoch, std::memory_order_release);
    }

    FakeEngine* const engine_;
    engine::ClientLayer client_;  // of the next layer; its ring is null: none
    const std::vector<engine::DecodeRow> rows_;
    uint32_t layer_ = 0;
  };

  std::atomic<bool> may_read_disk_{false}, may_make_room_{false};
  static absl::Status TakeUnlessFull(std::atomic<int>* refused, std::atomic<int>* taken) {
    if (*refused > 0) {
      --*refused;
      return absl::ResourceExhaustedError("memory_budget_bytes: no room");
    }
    ++*taken;
    return absl::OkStatus();
  }
  static void WaitWhile(const std::atomic<bool>& held) {
    while (held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  void WaitForCall() {
    ++calls_waiting_;
    WaitWhile(calls_held_);
    --calls_waiting_;
    ++calls_done_;
  }
  // False if the work was cancelled.
  bool WaitIfHeld(const std::atomic<bool>* cancel) {
    ++waiting_;
    while (held_ && (cancel == nullptr || !*cancel)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    --waiting_;
    if (cancel != nullptr && *cancel) ++cancelled_;
    return cancel == nullptr || !*cancel;
  }

  const engine::EngineOptions options_{};
  MappingBackend backend_;
  const std::shared_ptr<engine::Lease> lease_ =
      std::make_shared<engine::Lease>(std::chrono::seconds(600), &std::chrono::steady_clock::now);
  std::atomic<bool> held_{false}, calls_held_{false}, writers_held_{false}, gone_{false};
  std::atomic<bool> pass_ends_held_{false};
  std::atomic<bool> opening_stopped_{false};
  std::atomic<int> calls_waiting_{0}, calls_done_{0}, chunks_{0}, observed_{0};
  std::atomic<int> observes_refused_{0}, chunks_refused_{0};
  std::function<void(const engine::AppendChunk&)> on_append_;  // constant once there are calls
  std::atomic<int> passes_over_{0}, prepared_{0}, forgotten_{0}, turns_{0}, places_{0};
  std::atomic<int> waiting_{0}, decoded_{0}, cancelled_{0}, released_writers_{0};
  std::atomic<bool> final_answers_{false}, tells_clients_{false}, fails_behind_answers_{false};
  std::atomic<float> first_of_q_{0}, begun_with_{0};
  std::atomic<uint64_t> value_dim_{16}, next_id_{1};
};

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVER_FAKE_ENGINE_H_
