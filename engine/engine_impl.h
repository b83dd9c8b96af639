// SPDX-License-Identifier: Apache-2.0
//
// EngineImpl: the engine itself, behind the interface of engine/engine.h. Its methods stand in
// files by what they are about: engine.cc (life cycle, listing), engine_open.cc (new sequences),
// engine_append.cc (prefills), engine_decode.cc (steps), engine_pass.cc (passes), engine_history.cc
// (truncating, forking), engine_sealed.cc (sequences on disk).
#ifndef ATTND_ENGINE_ENGINE_IMPL_H_
#define ATTND_ENGINE_ENGINE_IMPL_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/backend.h"
#include "attention/cpu/worker_pool.h"
#include "common/status.h"
#include "engine/archive/archive.h"
#include "engine/archive/pager.h"
#include "engine/audit/auditor.h"
#include "engine/engine.h"
#include "engine/memory_budget.h"
#include "engine/models/feature_map_files.h"
#include "engine/models/label_channel_files.h"
#include "engine/sequence/decode_batch.h"
#include "engine/sequence/lease_watch.h"
#include "engine/sequence/segmenter.h"
#include "engine/sequence/sequence.h"
#include "engine/sequence/sequence_table.h"

namespace attnd::engine {

// The result of `call`, or ResourceExhausted if the system refuses it memory.
template <typename F>
auto WithinMemory(const F& call) -> decltype(call()) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("the system refused memory");
  }
}

// Thread-safety: as Engine's. The class has no lock of its own: its parts are thread-safe by
// themselves, and what is set by Start does not change afterwards.
class EngineImpl final : public Engine {
 public:
  EngineImpl(const EngineOptions& options, std::unique_ptr<attention::Backend> backend,
             EventListener* listener);
  ~EngineImpl() override;

  // Before anything else. ResourceExhausted if the system refuses the background thread; what
  // Archive::Open says.
  absl::Status Start();

  const EngineOptions& options() const override { return options_; }
  const attention::Backend& backend() const override { return *backend_; }
  attention::IndexSet IndexesOf(const attention::Policy& policy) const override;

  absl::StatusOr<uint64_t> Open(absl::string_view tenant, const OpenArgs& args) override;
  absl::Status Append(absl::string_view tenant, WriterId writer, uint64_t sequence_id,
                      const AppendChunk& chunk) override;
  absl::Status Observe(absl::string_view tenant, WriterId writer, uint64_t sequence_id,
                       const ObservedChunk& chunk) override;
  absl::StatusOr<PrefillResult> FinishPrefill(absl::string_view tenant, WriterId writer,
                                              uint64_t sequence_id,
                                              const std::atomic<bool>* cancelled) override;
  absl::StatusOr<SequenceInfo> Info(absl::string_view tenant, uint64_t sequence_id) override;
  absl::StatusOr<Lease::Call> BeginCall(absl::string_view tenant, uint64_t sequence_id) override;
  bool MayReadDisk(absl::string_view tenant, uint64_t sequence_id) override;
  bool MayMakeRoom() const override { return archive_ != nullptr; }

  absl::Status Decode(absl::string_view tenant, WriterId writer, const DecodeArgs& args,
                      AnswerMemory memory, DecodeResult* result) override;
  absl::StatusOr<std::unique_ptr<Pass>> BeginPass(absl::string_view tenant, WriterId writer,
                                                  std::span<const DecodeRow> rows,
                                                  uint32_t layers) override;

  absl::StatusOr<uint64_t> Truncate(absl::string_view tenant, uint64_t sequence_id,
                                    uint64_t length) override;
  absl::StatusOr<SequenceInfo> Fork(absl::string_view tenant, uint64_t sequence_id,
                                    std::optional<uint64_t> length) override;
  absl::Status Close(absl::string_view tenant, uint64_t sequence_id) override;
  std::vector<SequenceInfo> List(absl::string_view tenant, uint64_t after, uint32_t count) override;

  absl::StatusOr<SealResult> Seal(absl::string_view tenant, uint64_t sequence_id,
                                  const std::atomic<bool>* cancelled) override;
  absl::StatusOr<OpenResult> Resume(absl::string_view tenant, const OpenArgs& args,
                                    uint64_t sealed_id,
                                    const std::atomic<bool>* cancelled) override;
  absl::StatusOr<OpenResult> OpenReusing(absl::string_view tenant, const OpenArgs& args,
                                         std::span<const uint32_t> token_ids,
                                         const std::atomic<bool>* cancelled) override;
  absl::Status DropSealed(absl::string_view tenant, uint64_t sealed_id) override;
  absl::StatusOr<std::vector<SealedInfo>> ListSealed(absl::string_view tenant, uint64_t after,
                                                     uint32_t count) override;
  ArchiveStats archive_stats() const override;

  void ReleaseWriter(WriterId writer) override { sequences_.ReleaseWriter(writer); }
  Usage usage() const override {
    return {budget_.used(), budget_.capacity(), sequences_.size(), sequences_.leased()};
  }
  void WaitForBackground() override;
  void StopOpening() override { sequences_.StopOpening(); }
  void Shutdown() override;

 private:
  class PassImpl;  // engine_pass.cc
  static constexpr uint32_t kShardsMax = 4096;
  static constexpr attention::IndexSet kClusters = attention::kClusterIndexes;

  // New sequences (engine_open.cc).

  // What a policy asks for of one backend, as IndexesOf says.
  static attention::IndexSet IndexesOn(const attention::Backend& backend,
                                       const attention::Policy& policy);
  // What a sequence is opened with if nothing was said.
  attention::IndexSet IndexesFor(const OpenArgs& args) const;
  // Those of the model, if its indexes need any.
  absl::Status SetFeatureMaps(OpenArgs* args) const;
  // Those of the model, if its indexes have labels and there is a file.
  absl::Status SetLabelChannels(OpenArgs* args) const;
  // A sequence that nobody can find yet.
  absl::StatusOr<std::shared_ptr<Sequence>> Make(absl::string_view tenant, OpenArgs args);
  // A sequence as a caller asks for it, that nobody can find yet.
  absl::StatusOr<std::shared_ptr<Sequence>> MakeNew(absl::string_view tenant, const OpenArgs& args);
  // Gives a new sequence the longest prefix of these tokens that another one has or that lies on
  // disk, and that leaves its window free.
  absl::Status BeginWithKnown(std::span<const uint32_t> token_ids,
                              const std::atomic<bool>* cancelled, Sequence* fresh);
  absl::StatusOr<OpenResult> PublishWith(std::shared_ptr<Sequence> sequence);

  // Prefills (engine_append.cc).

  absl::Status AppendChecked(absl::string_view tenant, WriterId writer, uint64_t sequence_id,
                             const AppendChunk& chunk);
  absl::StatusOr<uint64_t> AppendWithWorkers(WriterId writer, const NewTokens& tokens,
                                             Sequence* sequence);
  absl::StatusOr<uint64_t> AppendWithRoom(WriterId writer, const NewTokens& tokens,
                                          const AppendChunk& chunk,
                                          const std::shared_ptr<Sequence>& sequence);
  void ReportAppended(uint64_t tokens, bool prefill) {
    if (listener_ != nullptr && tokens > 0) listener_->OnAppended(tokens, prefill);
  }

  // Steps (engine_decode.cc).

  // What a step keeps until it ends.
  struct StepSequences {
    std::vector<Lease::Call> calls;                // of its rows
    std::vector<std::shared_ptr<Sequence>> grown;  // have newly committed tokens
  };
  // Runs a step: checks the message, has `prepare` refuse or append each row of the batch, and
  // answers. The segmenter hears of the sequences that have grown, whatever came of the step.
  absl::Status RunStep(const DecodeArgs& args, AnswerMemory memory, DecodeBatch* batch,
                       absl::FunctionRef<void(StepSequences*)> prepare, DecodeResult* result,
                       attention::PreparedStep* prepared = nullptr);
  // Refuses or appends each row.
  void PrepareRows(absl::string_view tenant, WriterId writer, const DecodeArgs& args,
                   DecodeBatch* batch, StepSequences* sequences, DecodeResult* result);
  // Of rows whose sequences are paged, begins to read what the next layer wanted last; whether
  // there are any.
  bool PrefetchNextLayer(uint32_t layer, std::span<const attention::StepRow> rows) const;
  void PutAwayDamaged(const DecodeBatch& batch, const DecodeResult& result);
  // Whether one of a step's rows may be audited: then all are answered in floats, as rows that
  // differ in that are two waves of a GPU's. sequence_id: of each row.
  bool MayAudit(uint32_t layer, std::span<const attention::StepRow> rows,
                absl::FunctionRef<uint64_t(size_t)> sequence_id) const;
  void OfferToAudit(uint32_t layer, const DecodeBatch& batch);

  // Sequences on disk (engine_sealed.cc).

  absl::StatusOr<Archive*> GetArchive();

  // Room in memory: calls that are repeated when segments have been moved to disk or back.

  static storage::Proceed UnlessCancelled(const std::atomic<bool>* cancelled) {
    return [cancelled] {
      const bool stop = cancelled != nullptr && cancelled->load(std::memory_order_relaxed);
      return stop ? absl::CancelledError("the caller has gone") : absl::OkStatus();
    };
  }
  // Whether so many eighths of the budget are in use, not counting what can be had back at once.
  bool InUse(uint64_t eighths) const {
    const uint64_t used = budget_.used();
    const uint64_t reclaimable = archive_ == nullptr ? 0 : archive_->ReclaimableBytes();
    return used - std::min(used, reclaimable) > budget_.capacity() / 8 * eighths;
  }
  // Early segments are copies: they leave memory for tokens that have no other place.
  static constexpr uint64_t kNoCopies = 6;
  // What is built of prompts that are uploaded goes before that.
  static constexpr uint64_t kNoUploads = 4;
  // A prompt that could outgrow memory does not wait for its end to become segments...
  static constexpr uint64_t kSegmentsMeanwhile = 4;
  // ... and waits for them when it would take the room that building them needs.
  static constexpr uint64_t kSegmentsFirst = 6;

  // Drops what is built of prompts that are uploaded; else the early segments of one sequence, the
  // one used longest ago. False if there are none, or if enough of the budget is free for it not to
  // be what a caller lacks. Not under any lock.
  bool DropCopies();
  // Repeats `call` while it finds no room in the budget and there are copies to drop.
  template <typename F>
  auto WithoutCopies(const F& call) -> decltype(call());
  // Repeats `call` while it finds no room in the budget and copies can be dropped or segments moved
  // to disk.
  template <typename F>
  auto WithRoom(const std::atomic<bool>* cancelled, const F& call) -> decltype(call());
  // Repeats `call` until none of the segments that it needs whole is paged.
  template <typename Needed, typename F>
  auto WithWhole(Sequence* sequence, const std::atomic<bool>* cancelled, const Needed& needed,
                 const F& call) -> decltype(call());

  static absl::Status StatusOf(const absl::Status& status) { return status; }
  template <typename T>
  static absl::Status StatusOf(const absl::StatusOr<T>& result) {
    return result.status();
  }

  // Constant.
  const EngineOptions options_;
  const std::unique_ptr<attention::Backend> backend_;
  EventListener* const listener_;

  // Set by Start, constant afterwards.
  FeatureMapStore feature_maps_;
  LabelChannelStore label_channels_;

  // Thread-safe by themselves.
  attention::WorkerPool append_workers_;          // write an upload to its sequence's tail
  std::atomic<bool> append_workers_busy_{false};  // one upload at a time
  MemoryBudget budget_;
  StepGate gate_;
  SequenceTable sequences_;
  std::unique_ptr<Archive> archive_;  // set by Start; null without a data folder
  std::unique_ptr<Pager> pager_;      // as archive_
  std::unique_ptr<Auditor> auditor_;  // set by Start; null where nothing is audited
  std::atomic<uint64_t> reused_tokens_{0};

  LeaseWatch lease_watch_;
  Segmenter segmenter_;  // last: its thread uses everything above
};

template <typename F>
auto EngineImpl::WithoutCopies(const F& call) -> decltype(call()) {
  auto result = call();
  while (absl::IsResourceExhausted(StatusOf(result)) && DropCopies()) result = call();
  return result;
}

template <typename F>
auto EngineImpl::WithRoom(const std::atomic<bool>* cancelled, const F& call) -> decltype(call()) {
  const auto until = std::chrono::steady_clock::now() + kRoomWait;
  // Rounds of the pager that moved nothing: room may have come meanwhile, made by other rounds or
  // by the call itself.
  constexpr int kFruitlessMax = 3;
  for (int fruitless = 0;;) {
    auto result = WithoutCopies(call);
    if (archive_ == nullptr || !absl::IsResourceExhausted(StatusOf(result))) return result;
    const bool gone = cancelled != nullptr && cancelled->load(std::memory_order_relaxed);
    const bool late = std::chrono::steady_clock::now() > until;
    if (fruitless == kFruitlessMax || gone || late) return result;
    fruitless = pager_->MakeRoom(until, cancelled) ? 0 : fruitless + 1;
  }
}

template <typename Needed, typename F>
auto EngineImpl::WithWhole(Sequence* sequence, const std::atomic<bool>* cancelled,
                           const Needed& needed, const F& call) -> decltype(call()) {
  constexpr int kTries = 4;
  for (int tries = 1;; ++tries) {
    if (const auto paged = needed(); !paged.empty()) {
      const auto swaps =
          WithRoom(cancelled, [&] { return archive_->PageIn(paged, UnlessCancelled(cancelled)); });
      ATTND_RETURN_IF_ERROR(swaps.status());
      sequence->SwapSegments(*swaps);
    }
    auto result = call();
    if (!absl::IsAborted(StatusOf(result)) || tries == kTries) return result;
  }
}

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ENGINE_IMPL_H_
