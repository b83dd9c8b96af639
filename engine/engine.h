// SPDX-License-Identifier: Apache-2.0
//
// Engine: sequences, their tails and segments, and the execution of steps, without any RPC.
#ifndef ATTND_ENGINE_ENGINE_H_
#define ATTND_ENGINE_ENGINE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/policy/policy.h"
#include "attention/segment/index_set.h"
#include "engine/answer_memory.h"
#include "engine/event_listener.h"
#include "engine/lease.h"
#include "engine/options.h"
#include "engine/pass.h"
#include "engine/types.h"

namespace attnd::attention {
class Backend;
}  // namespace attnd::attention

namespace attnd::engine {

// Thread-safety: all methods may be called from any thread, several at once. A sequence of another
// tenant answers as an unknown one: NotFound.
class Engine {
 public:
  // `listener` may be null and must outlive the engine. InvalidArgument names the option,
  // Unimplemented the policy; ResourceExhausted if the system refuses a thread.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options,
                                                        std::unique_ptr<attention::Backend> backend,
                                                        EventListener* listener);
  // Calls Shutdown().
  virtual ~Engine() = default;

  virtual const EngineOptions& options() const = 0;
  virtual const attention::Backend& backend() const = 0;
  // The indexes that sequences of this policy get on the backend that owns them, if the model's
  // shape allows it: the indexes that the policy needs, or clusters if clusters serve the policy
  // and the backend lacks the indexes that the policy prefers. Empty: any indexes serve.
  virtual attention::IndexSet IndexesOf(const attention::Policy& policy) const = 0;

  // ResourceExhausted at max_sequences or at a full budget, Unavailable after StopOpening or
  // Shutdown, InvalidArgument for the shape and the lease, Unimplemented for the policy or for a
  // shape that the backend lacks, FailedPrecondition for a summary without feature maps of the
  // model, and for label channels of another shape than the model's.
  virtual absl::StatusOr<uint64_t> Open(absl::string_view tenant, const OpenArgs& args) = 0;

  // InvalidArgument (shape, dtype, NaN, |v| beyond kValueMax), FailedPrecondition (gap),
  // AlreadyExists (other content), Aborted (another writer), ResourceExhausted (budget), Cancelled
  // (AppendChunk::kept says no). On an error the sequence is unchanged.
  virtual absl::Status Append(absl::string_view tenant, WriterId writer, uint64_t sequence_id,
                              const AppendChunk& chunk) = 0;

  // Takes queries of the prompt's last tokens in one layer (AppendKvRequest.observed_queries).
  // InvalidArgument (shape, NaN), OutOfRange (numbers), Aborted (another writer),
  // ResourceExhausted.
  virtual absl::Status Observe(absl::string_view tenant, WriterId writer, uint64_t sequence_id,
                               const ObservedChunk& chunk) = 0;

  // Segments the tokens that no segment covers, the newest step's as well, on index_threads
  // threads; prefills that come at the same time take turns. FailedPrecondition if layers differ in
  // length, Aborted if another writer holds the sequence; nothing is segmented then.
  // FailedPrecondition, with everything segmented, if the policy is a keep-set and a layer has no
  // observed queries.
  // ResourceExhausted, NotFound (closed meanwhile), Cancelled and Unavailable (shutting down) leave
  // the segments that were built before.
  virtual absl::StatusOr<PrefillResult> FinishPrefill(absl::string_view tenant, WriterId writer,
                                                      uint64_t sequence_id,
                                                      const std::atomic<bool>* cancelled) = 0;
  virtual absl::StatusOr<SequenceInfo> Info(absl::string_view tenant, uint64_t sequence_id) = 0;

  // Holds the sequence's lease until the result ends. Every method that names a sequence does so by
  // itself, for as long as it runs; this one is for callers whose call begins before (in a queue),
  // lasts longer (an upload of several chunks), or has nothing else to say. The result does not
  // keep the sequence from Close, and must end before the engine does.
  virtual absl::StatusOr<Lease::Call> BeginCall(absl::string_view tenant, uint64_t sequence_id) = 0;

  static constexpr std::chrono::seconds kRoomWait{30};
  // That write an upload; more would only wait for memory.
  static constexpr uint32_t kAppendThreadsMax = 4;
  // Whether a step over this sequence may have to wait for the disk; false for unknown ones.
  virtual bool MayReadDisk(absl::string_view tenant, uint64_t sequence_id) = 0;
  // Whether a call that found no room may find room by waiting (AppendChunk, ObservedChunk:
  // may_wait).
  virtual bool MayMakeRoom() const = 0;

  // Appends the rows' new tokens and answers attention: out and lse go to `memory`, NaN for rows
  // whose status is not OK, the rest to `result`. A status other than OK concerns the whole step:
  // limits, tensors that fit no row, the deadline, memory that the system refused. Tokens may have
  // been appended then, and repeating the step is safe; the content of the answer's memory is
  // undefined. Faults of single rows are in the result.
  virtual absl::Status Decode(absl::string_view tenant, WriterId writer, const DecodeArgs& args,
                              AnswerMemory memory, DecodeResult* result) = 0;

  // Declares a pass over these rows, of models with so many layers (engine/pass.h). InvalidArgument
  // for the numbers of rows and of query tokens; faults of single rows are in the results of the
  // pass's steps. The rows are copied.
  virtual absl::StatusOr<std::unique_ptr<Pass>> BeginPass(absl::string_view tenant, WriterId writer,
                                                          std::span<const DecodeRow> rows,
                                                          uint32_t layers) = 0;

  virtual absl::StatusOr<uint64_t> Truncate(absl::string_view tenant, uint64_t sequence_id,
                                            uint64_t length) = 0;  // -> segmented tokens
  virtual absl::StatusOr<SequenceInfo> Fork(absl::string_view tenant, uint64_t sequence_id,
                                            std::optional<uint64_t> length) = 0;
  virtual absl::Status Close(absl::string_view tenant, uint64_t sequence_id) = 0;
  // Ascending ids greater than `after`, at most `count`. No lease is renewed.
  virtual std::vector<SequenceInfo> List(absl::string_view tenant, uint64_t after,
                                         uint32_t count) = 0;

  // Calls for sequences on disk. Each is FailedPrecondition if there is no data folder. DataLoss
  // for damaged or missing files, ResourceExhausted for a full disk or budget, Unavailable for
  // other faults of the disk, Cancelled.

  // Writes down all that is committed; durable when it returns OK. The sequence goes on as it was.
  // FailedPrecondition if nothing is committed.
  virtual absl::StatusOr<SealResult> Seal(absl::string_view tenant, uint64_t sequence_id,
                                          const std::atomic<bool>* cancelled) = 0;
  // Opens a sequence that begins with all that was sealed. args: as Open's; FailedPrecondition if
  // the model differs from the sealed one's, or the policy asks for another sink or a greater
  // window.
  virtual absl::StatusOr<OpenResult> Resume(absl::string_view tenant, const OpenArgs& args,
                                            uint64_t sealed_id,
                                            const std::atomic<bool>* cancelled) = 0;
  // Opens a sequence that begins with the longest run of segments, of open or sealed sequences,
  // whose tokens are the first of token_ids. Without such a run, without token_ids, or for a model
  // without a fingerprint: as Open.
  virtual absl::StatusOr<OpenResult> OpenReusing(absl::string_view tenant, const OpenArgs& args,
                                                 std::span<const uint32_t> token_ids,
                                                 const std::atomic<bool>* cancelled) = 0;
  virtual absl::Status DropSealed(absl::string_view tenant, uint64_t sealed_id) = 0;
  // Ascending ids greater than `after`, at most `count`.
  virtual absl::StatusOr<std::vector<SealedInfo>> ListSealed(absl::string_view tenant,
                                                             uint64_t after, uint32_t count) = 0;
  virtual ArchiveStats archive_stats() const = 0;

  // Lets go every sequence that the writer holds: its stream has ended, and no call of it is under
  // way.
  virtual void ReleaseWriter(WriterId writer) = 0;

  virtual Usage usage() const = 0;
  // Waits until no segment is being built or due, and no row is being audited or waits for an
  // audit; for tests and benchmarks.
  virtual void WaitForBackground() = 0;

  // Shutdown step: no new sequences from now on.
  virtual void StopOpening() = 0;
  // Stops the background threads. Steps in flight must have ended.
  virtual void Shutdown() = 0;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ENGINE_H_
