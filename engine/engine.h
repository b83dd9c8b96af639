// SPDX-License-Identifier: Apache-2.0
//
// Engine: sequences, their tails and segments, and the execution of steps, without any RPC.
#ifndef ATTND_ENGINE_ENGINE_H_
#define ATTND_ENGINE_ENGINE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/backend.h"
#include "attention/policy/policy.h"
#include "common/model_shape.h"
#include "engine/answer_memory.h"
#include "engine/audit/audit.h"
#include "storage/cache/page_cache_stats.h"

namespace attnd::engine {

// What is kept of sealed sequences; 0: everything.
struct RetentionLimits {
  uint64_t bytes_max = 0;  // of all files
  uint64_t age_max_s = 0;  // since a sequence was sealed, resumed or begun with
};

// Where sealed sequences lie.
struct ArchiveOptions {
  std::string data_dir;  // empty: nothing can be sealed
  enum class Io { kAuto, kUring, kThreads };
  Io io = Io::kAuto;  // kAuto: io_uring, or threads where it is refused
  // Of the memory budget, kept for pages of segments that are read from disk; what nobody else
  // needs of the budget is used for them, too. 0: an eighth of the budget, 256 MiB at most.
  uint64_t page_memory_bytes = 0;
  uint32_t page_readers = 4;      // threads that read them, each with 64 transfers under way
  uint64_t read_bytes_per_s = 0;  // of all readers; 0: no limit
  RetentionLimits retention;
  bool prefetch = false;  // of what the next layer's last step read
  // Set by the engine: Observer::OnPagesRead. May be empty.
  std::function<void(uint64_t bytes, std::chrono::nanoseconds time)> on_pages_read;
  // The same: Observer::OnDiskFault.
  std::function<void(const absl::Status&)> on_disk_fault;

  uint64_t PageMemoryBytes(uint64_t memory_budget_bytes) const;
};

struct EngineOptions {
  // Sequences with their KV, indexes and token ids, the building of segments, answers under way.
  uint64_t memory_budget_bytes = uint64_t{1} << 30;
  uint32_t max_sequences = 4096;
  uint64_t max_sequence_tokens = uint64_t{4} << 20;
  uint32_t max_rows = 1024;          // of one step
  uint32_t max_query_tokens = 4096;  // of one step, all rows together
  uint32_t segment_tokens =
      8192;  // length of a run; generated tokens become a segment when so many left the window
  uint32_t index_threads = 1;        // threads that segment a finished prefill
  attention::Policy default_policy;  // of sequences that choose none
  ArchiveOptions archive;
  AuditOptions audit;
  // Files of feature maps, one for each model that has any (engine/models/feature_map_files.h).
  std::vector<std::string> feature_maps;
  // Files of label channels, likewise (engine/models/label_channel_files.h).
  std::vector<std::string> label_channels;

  // InvalidArgument names the option and its range.
  absl::Status Validate() const;
};

// What happened, for metrics. Called from engine threads and from callers' threads, possibly
// several at once, never with an engine lock held; must not call back into the engine.
class Observer {
 public:
  virtual ~Observer() = default;
  enum class BuildTrigger { kPrefill, kBackground };
  // New tokens of a sequence's first layer; repeats are none.
  virtual void OnAppended(uint64_t /*tokens*/, bool /*prefill*/) {}
  virtual void OnSegmentBuilt(BuildTrigger, uint64_t /*tokens*/,
                              std::chrono::nanoseconds /*time*/) {}
  virtual void OnSegmentBuildFailed(BuildTrigger, const absl::Status&) {}
  // Pages were read from disk; the time is from when they were asked for.
  virtual void OnPagesRead(uint64_t /*bytes*/, std::chrono::nanoseconds /*time*/) {}
  // A call or row was refused for this; its client is told the same without the server's paths.
  virtual void OnDiskFault(const absl::Status&) {}
  // Of each row that was picked for an audit, one of the two.
  virtual void OnAudited(const AuditedRow&) {}
  virtual void OnAuditSkipped(AuditSkip) {}
};

// Names who appends. The first writer that appends to a sequence holds it until ReleaseWriter.
using WriterId = uint64_t;

// A tensor in the caller's memory, already checked: `data` holds exactly the elements that the
// field's shape says.
struct TensorView {
  DType dtype = DType::kFp32;
  const std::byte* data = nullptr;
  uint64_t elements = 0;
};

struct Shard {
  enum class Kind { kWhole, kHeads, kContext };
  Kind kind = Kind::kWhole;
  uint32_t index = 0;
  uint32_t count = 1;
  bool operator==(const Shard&) const = default;
};

struct OpenArgs {
  std::string fingerprint;
  ModelShape shape;  // validated by Open
  Shard shard;       // kept for listings
  std::optional<attention::Policy> policy;
  // What is built of segments, and so their order. Absent: what the policy needs, clusters if it
  // needs none or if cluster_order asks for them; of a resumed sequence, what it had.
  std::optional<attention::IndexSet> indexes;
  bool cluster_order = false;
  // Of indexes with a summary, set by the engine: what it is made with, and what that is known by.
  std::shared_ptr<const attention::FeatureMaps> feature_maps;
  std::string feature_maps_id;
  // Of indexes with labels, set by the engine: the channels that they are made of, and what those
  // are known by; null and empty if the server has no file of the model's. A sequence that begins
  // with segments keeps to the channels of the first of them all the same.
  std::shared_ptr<const attention::LabelChoice> label_channels;
  std::string label_channels_id;
  // Set by the engine: the backend that has the sequence. Lives as long as the engine.
  const attention::Backend* backend = nullptr;
};

struct SequenceInfo {
  uint64_t id = 0;
  OpenArgs args;  // policy and indexes are always present
  uint64_t committed_tokens = 0;
  uint64_t segmented_tokens = 0;
  uint32_t segments = 0;
  uint64_t resident_bytes = 0;
  std::vector<uint64_t> layer_tokens;
};

// One chunk of a prefill: tokens [first_position, + tokens) of one layer.
struct AppendChunk {
  uint32_t layer = 0;
  uint64_t first_position = 0;
  uint64_t tokens = 0;
  TensorView k;                         // [tokens, kv_heads, head_dim]
  TensorView v;                         // [tokens, kv_heads, value_dim]; none of a latent model
  std::span<const uint32_t> token_ids;  // none or [tokens]
  // Whether the call may wait for room in the memory budget, while segments are built and moved to
  // disk: up to Engine::kRoomWait.
  bool may_wait = false;
  const std::atomic<bool>* cancelled = nullptr;  // ends waiting; may be null
};

// Queries of a prompt's last tokens in one layer.
struct ObservedChunk {
  uint32_t layer = 0;
  uint64_t tokens = 0;
  uint64_t heads = 0, head_dim = 0;  // the tensor's own
  TensorView queries;                // [tokens, heads, head_dim]
  bool may_wait = false;             // for room, as AppendChunk's
  const std::atomic<bool>* cancelled = nullptr;
};

struct PrefillResult {
  uint64_t committed_tokens = 0;
  uint64_t segmented_tokens = 0;
  std::chrono::nanoseconds build_time{0};
};

struct DecodeRow {
  uint64_t sequence_id = 0;
  uint64_t position = 0;
  uint32_t query_tokens = 0;
  std::span<const uint32_t> token_ids;  // none or [query_tokens]
  std::optional<attention::Policy> policy;
  bool query_only = false;
  // A row that was refused before it came here (for example its policy did not parse): reported,
  // not run.
  absl::Status precheck;
};

struct DecodeArgs {
  uint32_t layer = 0;
  std::span<const DecodeRow> rows;
  // Shapes as the proto says; all rows' tokens one after the other. The engine checks everything
  // but that `data` holds as many elements as the view says.
  TensorView q;
  uint64_t q_heads = 0,
           q_head_dim = 0;  // the tensor's own last two extents; tokens = sum of query_tokens
  TensorView k;
  uint64_t k_heads = 0, k_head_dim = 0;
  // None if rows that append are of latent models.
  TensorView v;
  uint64_t v_heads = 0, v_value_dim = 0;
  std::optional<std::chrono::steady_clock::time_point> deadline;
  const std::atomic<bool>* cancelled = nullptr;
};

struct DecodeRowResult {
  absl::Status status;
  attention::RowStats stats;
};

// What a step found, but for out and lse, which lie in the caller's AnswerMemory.
struct DecodeResult {
  std::vector<DecodeRowResult> rows;
  uint64_t value_dim = 0;                     // of out; 0 if no row was accepted
  std::chrono::nanoseconds validate_time{0};  // checks and appending
};

struct SealResult {
  uint64_t sealed_id = 0;  // names what was sealed, for ever; never 0
  uint64_t tokens = 0;     // all that were committed
  uint64_t segments = 0;
  uint64_t written_segments = 0;  // of these; the others lay on disk already
  uint64_t written_bytes = 0;     // files of segments and of the tail
};
struct SealedInfo {
  uint64_t id = 0;
  uint64_t tokens = 0;
  int64_t sealed_unix_s = 0;
};
struct OpenResult {
  uint64_t sequence_id = 0;
  uint64_t tokens_present = 0;
  absl::string_view backend = "";  // name of the one that has the sequence
};

// Since the start.
struct ArchiveStats {
  bool open = false;        // whether there is a data folder
  std::string io;           // "io_uring" or "threads"
  std::string why_threads;  // why it is not io_uring, if it was wanted
  bool direct = false;      // whether transfers go past the page cache
  uint64_t written_bytes = 0;
  uint64_t read_bytes = 0;
  uint64_t sealed_sequences = 0;
  uint64_t resumed_sequences = 0;
  uint64_t reused_tokens = 0;  // also without a data folder
  uint64_t written_segments = 0;
  uint64_t loaded_segments = 0;
  uint64_t quarantined_files = 0;
  uint64_t orphan_files = 0;        // that no record named at the start
  uint64_t paged_out_segments = 0;  // that want of memory moved to disk
  uint64_t failed_page_outs = 0;
  uint64_t retired_sequences = 0;  // dropped by the limits of retention
  storage::PageCacheStats pages;
};

struct Usage {
  uint64_t resident_bytes = 0;
  uint64_t capacity_bytes = 0;
  uint64_t sequences = 0;
};

// Thread-safety: all methods may be called from any thread, several at once. A sequence of another
// tenant answers as an unknown one: NotFound.
class Engine {
 public:
  // `observer` may be null and must outlive the engine. InvalidArgument names the option,
  // Unimplemented the policy; ResourceExhausted if the system refuses a thread.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options,
                                                        std::unique_ptr<attention::Backend> backend,
                                                        Observer* observer);
  // Calls Shutdown().
  virtual ~Engine() = default;

  virtual const EngineOptions& options() const = 0;
  virtual const attention::Backend& backend() const = 0;
  // The indexes that a policy asks for on the backend that has its sequences where the model's
  // shape allows it, empty if any do: those it needs, or clusters where they serve it and the
  // backend does not have what it prefers.
  virtual attention::IndexSet IndexesOf(const attention::Policy& policy) const = 0;

  // ResourceExhausted at max_sequences or at a full budget, Unavailable after StopOpening or
  // Shutdown, InvalidArgument for the shape, Unimplemented for the policy or for a shape that the
  // backend lacks, FailedPrecondition for a summary without feature maps of the model, and for
  // label channels of another shape than the model's.
  virtual absl::StatusOr<uint64_t> Open(absl::string_view tenant, const OpenArgs& args) = 0;

  // InvalidArgument (shape, dtype, NaN, |v| beyond kValueMax), FailedPrecondition (gap),
  // AlreadyExists (other content), Aborted (another writer), ResourceExhausted (budget); state is
  // unchanged then.
  virtual absl::Status Append(absl::string_view tenant, WriterId writer, uint64_t sequence_id,
                              const AppendChunk& chunk) = 0;

  // Takes queries of the prompt's last tokens in one layer (AppendKvRequest.observed_queries).
  // InvalidArgument (shape, NaN), OutOfRange (numbers), Aborted (another writer),
  // ResourceExhausted.
  virtual absl::Status Observe(absl::string_view tenant, WriterId writer, uint64_t sequence_id,
                               const ObservedChunk& chunk) = 0;

  // Segments what the prefill left uncovered, the newest step's tokens as well, on index_threads
  // threads; prefills that come at the same time take turns. FailedPrecondition if layers differ in
  // length, Aborted if another writer holds the sequence; nothing is segmented then.
  // FailedPrecondition, with everything segmented, if the policy is a keep-set and a layer has no
  // observed queries.
  // ResourceExhausted, NotFound (closed meanwhile), Cancelled and Unavailable (shutting down) leave
  // what was segmented before.
  virtual absl::StatusOr<PrefillResult> FinishPrefill(absl::string_view tenant, WriterId writer,
                                                      uint64_t sequence_id,
                                                      const std::atomic<bool>* cancelled) = 0;
  virtual absl::StatusOr<SequenceInfo> Info(absl::string_view tenant, uint64_t sequence_id) = 0;

  static constexpr std::chrono::seconds kRoomWait{30};
  // Whether a step over this sequence may have to wait for the disk; false for unknown ones.
  virtual bool MayReadDisk(absl::string_view tenant, uint64_t sequence_id) = 0;
  // Whether what found no room may find some by waiting (AppendChunk, ObservedChunk: may_wait).
  virtual bool MayMakeRoom() const = 0;

  // Appends the rows' new tokens and answers attention: out and lse go to `memory`, NaN for rows
  // whose status is not OK, the rest to `result`. A status other than OK concerns the whole step
  // (limits, tensors that no row could have, deadline, memory that the system refused: tokens may
  // have been appended, and repeating is safe), and what memory was asked for has then no defined
  // content; row faults are in the result.
  virtual absl::Status Decode(absl::string_view tenant, WriterId writer, const DecodeArgs& args,
                              AnswerMemory memory, DecodeResult* result) = 0;

  virtual absl::StatusOr<uint64_t> Truncate(absl::string_view tenant, uint64_t sequence_id,
                                            uint64_t length) = 0;  // -> segmented tokens
  virtual absl::StatusOr<SequenceInfo> Fork(absl::string_view tenant, uint64_t sequence_id,
                                            std::optional<uint64_t> length) = 0;
  virtual absl::Status Close(absl::string_view tenant, uint64_t sequence_id) = 0;
  // Ascending ids greater than `after`, at most `count`.
  virtual std::vector<SequenceInfo> List(absl::string_view tenant, uint64_t after,
                                         uint32_t count) = 0;

  // Sequences on disk; FailedPrecondition, all of them, if there is no data folder. DataLoss for
  // damaged or missing files, ResourceExhausted for a full disk or budget, Unavailable for other
  // faults of the disk, Cancelled.

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
  // Opens a sequence that begins with the segments, of open sequences or sealed ones, if there are
  // any, that token_ids begin with; without token_ids and for a model without a fingerprint as
  // Open.
  virtual absl::StatusOr<OpenResult> OpenReusing(absl::string_view tenant, const OpenArgs& args,
                                                 std::span<const uint32_t> token_ids,
                                                 const std::atomic<bool>* cancelled) = 0;
  virtual absl::Status DropSealed(absl::string_view tenant, uint64_t sealed_id) = 0;
  // Ascending ids greater than `after`, at most `count`.
  virtual absl::StatusOr<std::vector<SealedInfo>> ListSealed(absl::string_view tenant,
                                                             uint64_t after, uint32_t count) = 0;
  virtual ArchiveStats archive_stats() const = 0;

  // Ends every lease of a writer: its stream has ended, and no call of it is under way.
  virtual void ReleaseWriter(WriterId writer) = 0;

  virtual Usage usage() const = 0;
  // Waits until no segment is being built and none is due, and no row is audited and none waits for
  // it; for tests and benchmarks.
  virtual void WaitForBackground() = 0;

  // Shutdown step: no new sequences from now on.
  virtual void StopOpening() = 0;
  // Stops the background threads. Steps in flight must have ended.
  virtual void Shutdown() = 0;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ENGINE_H_
