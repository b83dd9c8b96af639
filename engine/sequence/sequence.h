// SPDX-License-Identifier: Apache-2.0
//
// Sequence: the token history of one model shard: a chain of immutable segments and a tail
// (docs/DESIGN.md, "Idea 2").
#ifndef ATTND_ENGINE_SEQUENCE_SEQUENCE_H_
#define ATTND_ENGINE_SEQUENCE_SEQUENCE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/backend.h"
#include "attention/cpu/observation.h"
#include "attention/cpu/worker_pool.h"
#include "attention/policy_state/policy_state.h"
#include "common/mutex.h"
#include "engine/memory_budget.h"
#include "engine/sequence/early_segments.h"
#include "engine/sequence/held.h"
#include "engine/sequence/new_tokens.h"
#include "engine/sequence/segment_rules.h"
#include "engine/sequence/tail.h"
#include "engine/sequence/token_ids.h"
#include "engine/types.h"

namespace attnd::engine {

// What a step reads.
struct Snapshot {
  std::shared_ptr<const attention::SequenceView> view;
  uint64_t new_tokens = 0;  // that the call appended
};

// Tokens [view->tail_begin, + tokens) that may become a segment, in the tail's place or early.
struct SegmentJob {
  std::shared_ptr<const attention::SequenceView> view;
  uint32_t tokens = 0;
  uint32_t unclustered = 0;
  bool early = false;
  bool cut = false;  // shorter than a run, as the prompt is said to end there
};

enum class BuildKind { kSegment, kEarly };

// A history at one moment, for writing it to disk: its committed positions, whose bytes do not
// change any more.
struct HistorySnapshot {
  std::shared_ptr<const attention::SequenceView> view;  // its tail may go on beyond `committed`
  uint64_t committed = 0;
  std::vector<float> segment_key_bounds;  // [segments][layers] greatest |k|
  std::vector<TokenIds::Run> token_ids;   // of committed positions
};

// The observed queries of one layer of a prompt, with the reservation of their bytes.
struct ObservedLayer {
  Reservation memory;
  DType dtype = DType::kFp32;
  uint32_t tokens = 0;
  std::vector<std::byte> queries;  // [tokens, query_heads, head_dim]
};

// A complete prompt, with its observed queries in every layer.
struct PromptObservation {
  std::shared_ptr<const attention::SequenceView> view;
  uint64_t tokens = 0;                                       // of the prompt
  std::vector<std::shared_ptr<const ObservedLayer>> layers;  // [layers]

  attention::ObservedQueries QueriesOf(uint32_t layer) const {
    const ObservedLayer& observed = *layers[layer];
    return {observed.dtype, observed.tokens, observed.queries.data()};
  }
};

// A segment and its other version, paged or whole, with the same contents.
struct Swap {
  std::shared_ptr<const attention::Segment> before;
  std::shared_ptr<const attention::Segment> after;
};

// Segments from disk or of another sequence, with which a sequence begins.
struct RestoredSegments {
  std::vector<std::shared_ptr<const attention::Segment>> segments;  // from position 0 on
  std::vector<float> key_bounds;                                    // [segments][layers]
  std::vector<TokenIds::Run> token_ids;

  uint64_t tokens() const { return segments.empty() ? 0 : segments.back()->end_position(); }
};

// A sequence of tokens: a chain of immutable segments from position 0 on, a tail behind them
// (Tail), and what its policies keep with it (attention::PolicyState). Steps read early segments in
// place of a long tail's oldest tokens (EarlySegments); nothing else of the sequence knows them.
//
// Ownership: segments, tail blocks and parts of the policy state are shared by pointer with views,
// forks and the archive. A view holds everything that a step reads, for as long as the step lives.
//
// Thread-safety: all methods may be called from any thread. A tail block is written only by the
// sequence that made it, under the lock, at positions that no length has covered so far: a view may
// be read without the lock.
//
// Invariants (CheckInvariants): segments are contiguous from position 0 on, have the sequence's
// shape and indexes, and end where the tail begins; every layer has at least as many tokens as
// segments cover, and the tail has blocks for all others; each segment has a bound of each layer's
// keys. No layer has fewer written positions than tokens, nor more than the tail has blocks for.
// The last `window` committed tokens are in the tail, if there are so many. Early segments
// are contiguous from where the tail begins on, and hold committed tokens.
class Sequence {
 public:
  // A sequence that holds the bytes of its own object in the budget. ResourceExhausted.
  static absl::StatusOr<std::shared_ptr<Sequence>> Create(uint64_t id, absl::string_view tenant,
                                                          OpenArgs args, uint64_t max_tokens,
                                                          MemoryBudget* budget);
  Sequence(uint64_t id, std::string tenant, OpenArgs args, uint64_t max_tokens,
           MemoryBudget* budget);

  // Bytes that a sequence takes of the budget besides tokens, indexes and token ids: of its own
  // object, and of the lists of its tail blocks and segments, `entries` together.
  static uint64_t ObjectBytes(absl::string_view tenant, const OpenArgs& args);
  static uint64_t ListBytes(const ModelShape& shape, uint64_t entries);

  uint64_t id() const { return id_; }
  const std::string& tenant() const { return tenant_; }
  const OpenArgs& args() const { return args_; }
  const ModelShape& shape() const { return args_.shape; }
  // NOLINTBEGIN(bugprone-unchecked-optional-access): Engine::Open sets them
  const attention::Policy& policy() const { return *args_.policy; }
  const attention::IndexSet& indexes() const { return *args_.indexes; }
  // Whether a device answers the sequence's rows, and builds its segments.
  bool on_device() const { return args_.backend != nullptr && !args_.backend->device().empty(); }
  // Tells a device that has the sequence of a segment that steps will read.
  void Expect(const attention::Segment& segment) const {
    if (on_device()) args_.backend->Expect(segment);
  }
  // NOLINTEND(bugprone-unchecked-optional-access)

  // Appends tokens of an upload, or recognises them as a repeat; returns how many tokens are new.
  // Looks at their keys and values itself, on the workers' threads if the tokens are many; null: on
  // this one. Errors as for Engine::Append; the state is then unchanged.
  absl::StatusOr<uint64_t> Append(WriterId writer, const NewTokens& tokens,
                                  attention::WorkerPool* workers = nullptr);
  // Appends tokens, whose keys and values the caller has looked at, and returns what a step over
  // them reads, atomically: no truncation and no new segment comes in between. FailedPrecondition
  // for a repeat of tokens that a segment covers; OutOfRange, with nothing appended, if queries of
  // this magnitude could have logits beyond kLogitMax.
  absl::StatusOr<Snapshot> AppendAndRead(WriterId writer, const NewTokens& tokens,
                                         float query_magnitude);
  // Declares a pass, which appends tokens to every layer by AppendAndRead (NewTokens::of_pass):
  // checks what does not depend on their bytes and makes room in the tail, so that appending finds
  // it. Errors as for AppendAndRead, and FailedPrecondition if the writer is in a pass; the state
  // is then unchanged. One of the two calls below ends the pass, before ReleaseWriter.
  absl::Status BeginPass(WriterId writer, uint64_t position, uint64_t tokens);
  void CompletePass(WriterId writer);
  // Whether this writer alone appends, `position` is the layer's next one, and nothing has been
  // given up there, which others may still read: so that nobody else has, or comes to have, what
  // comes there. The writer of a stream's first step is not known before it has appended.
  bool IsNextOf(WriterId writer, uint32_t layer, uint64_t position);
  // What a step of a pass that has been declared will read, which appends up to `end`, if its
  // position is the layer's next one and nothing changes until then. Null if it is not, if
  // something was given up there, or if a truncation has taken the room for its tokens.
  std::shared_ptr<const attention::SequenceView> ExpectedView(uint32_t layer, uint64_t position,
                                                              uint64_t end);
  // Of a pass: asks the processor for the memory that tokens of the layer go to.
  void WarmTail(uint32_t layer, uint64_t position, uint64_t tokens);
  // What a declared pass takes, which its caller counts.
  static uint64_t PassBytes(uint32_t layers) {
    return 2 * sizeof(DeclaredPass) + layers * sizeof(uint64_t);
  }
  // Takes back what the writer's pass has appended, and the room that it has left. Never fails: the
  // tokens' bytes stay in the tail behind the layers' lengths. Whoever appends the same bytes there
  // again finds them; other bytes get other blocks.
  void GiveUpPass(WriterId writer);
  // What a query_only step reads. FailedPrecondition unless `position` is the layer's length;
  // OutOfRange as for AppendAndRead.
  absl::StatusOr<Snapshot> Read(uint32_t layer, uint64_t position, float query_magnitude);

  // Takes one layer's observed queries, in place of those that it has. Aborted if another writer
  // holds the sequence, OutOfRange as for AppendAndRead.
  absl::Status Observe(WriterId writer, uint32_t layer,
                       std::shared_ptr<const ObservedLayer> queries,
                       std::span<const float> head_magnitudes, float magnitude);
  // The prompt with the observed queries of all layers. Nothing unless every layer has queries, and
  // not for more tokens than the prompt has.
  std::optional<PromptObservation> Observation();
  // Forgets queries that have been evaluated.
  void ForgetObservation(const PromptObservation& observed);
  // Steps from now on read this keep-set. chosen_from: the view that the set was chosen from;
  // tokens that a truncation has taken away since leave the set.
  void SetKeepSet(const std::shared_ptr<const attention::KeepSet>& keep,
                  const attention::SequenceView& chosen_from);
  bool has_keep_set();
  // FailedPrecondition if the policy needs a keep-set that the sequence does not have, and there is
  // a middle to choose from.
  absl::Status CheckKeepSet(const attention::Policy& policy);

  // Returns how many tokens segments cover afterwards. Truncate and ForkInto: Aborted, with nothing
  // changed, if PagedForLength(length) is not empty. Append and AppendAndRead: the same, if tokens
  // are repeated that segments of PagedWithin cover.
  absl::StatusOr<uint64_t> Truncate(uint64_t length);
  // All committed positions.
  HistorySnapshot SnapshotHistory();
  // PagedWithin: the paged segments with positions in [begin, end). PagedForLength: the paged
  // segments that a truncation or fork to `length` turns back into tail, for which they must be
  // whole.
  std::vector<std::shared_ptr<const attention::Segment>> PagedWithin(uint64_t begin, uint64_t end);
  std::vector<std::shared_ptr<const attention::Segment>> PagedForLength(uint64_t length);
  // Replaces each segment of the chain that is the `before` of a swap by the swap's `after`.
  void SwapSegments(std::span<const Swap> swaps);
  // The segments, from the first on, that `fresh` may begin with: those within token_ids whose
  // tokens have these ids. None unless both sequences have the same tenant, model, shard and sink,
  // and the model has a fingerprint. None if they cover no more tokens than `known`; the ids of
  // segments in `known` are not compared again. The result has no token ids, as the caller has
  // them.
  RestoredSegments PrefixFor(const Sequence& fresh, std::span<const uint32_t> token_ids,
                             const RestoredSegments& known);
  // Gives a new sequence, which nobody else knows yet, its segments; its tail is appended
  // afterwards. DataLoss if the segments are no chain of this sequence; ResourceExhausted.
  absl::Status Restore(RestoredSegments restored);
  // Notes token ids of positions of the sequence. ResourceExhausted.
  absl::Status AddTokenIds(std::span<const TokenIds::Run> runs);
  // Fills `child`, a new sequence that nobody else knows yet, with the first `length` (absent: all
  // committed) tokens.
  absl::Status ForkInto(std::optional<uint64_t> length, Sequence* child);

  // The next segment of at least min_tokens and at most max_tokens outside the window, or nothing.
  std::optional<SegmentJob> NextSegment(uint32_t min_tokens, uint32_t max_tokens);
  // Tokens of the segment that a prompt's next ones are to become (attention::RunTokens), at least
  // `least`. Longer runs than `least` are for trees, and for tokens without ids: what has ids is
  // cut alike in every sequence, so that prompts find one another's beginnings.
  uint32_t PromptRun(uint32_t least);
  // Whether NextSegment would return one.
  bool HasSegment(uint32_t min_tokens);
  // While a prompt is uploaded: the segment that its tokens from `begin` on are to become, once the
  // first layer has them; nothing before that, or if steps have come. It is a whole run of
  // PromptRun tokens unless it is known to be the prompt's last (prompt_tokens: what the sequence
  // will have then; 0: not known). Absent: from where the tail begins on. Its view has the tail
  // from there on, and no segments.
  std::optional<SegmentJob> UploadedRun(std::optional<uint64_t> begin, uint32_t least,
                                        uint64_t prompt_tokens);
  // How many layers, from the first on, have all tokens of the job, which do not change any more;
  // 0, too, if others have taken their place.
  uint32_t LayersWith(const SegmentJob& job);
  // The next early segment, of at most max_tokens >= EarlySegments::LeastTokens, or nothing. It may
  // take the place of earlier ones. Only behind a segment, as the first one fixes what all have in
  // common; only over the index `tree`, whose steps read little besides the tail; and not while
  // tokens are uploaded, as the end of the prompt makes segments of them.
  std::optional<SegmentJob> NextEarly(uint32_t max_tokens);
  // What the background is to build: a segment of segment_tokens, else an early segment if that is
  // smaller, else nothing. Also nothing of a kind that DelayBuild holds back, and no early segment
  // in place of a segment that it holds back.
  std::optional<BuildKind> DueBuild(uint32_t segment_tokens);
  // Gives the early segments' memory back, as far as no view holds it; whether there were any.
  bool DropEarly();
  // To be called when a background build has failed: the next one of its kind is due after
  // kBuildDelayMin more tokens, and after twice as many for each further failure, up to
  // kBuildDelayMax. The next segment or truncation ends the delay; that of early segments ends with
  // the next of them, too.
  void DelayBuild(BuildKind kind);
  static constexpr uint64_t kBuildDelayMin = 64;
  static constexpr uint64_t kBuildDelayMax = 8192;
  // Adds a built segment to the chain, or to the early segments. False if the sequence has changed
  // so that the segment no longer fits.
  bool Install(const SegmentJob& job, std::shared_ptr<const attention::Segment> segment);
  // The writer declares its prompt complete: the steps that appended it have been answered, so that
  // their tokens may become segments. FailedPrecondition if layers differ in length, Aborted if
  // another writer holds the sequence; nothing is changed then.
  absl::Status CompletePrefill(WriterId writer);

  // Tells builders that nobody wants the sequence any more.
  void Close() { closed_.store(true, std::memory_order_relaxed); }
  bool closed() const { return closed_.load(std::memory_order_relaxed); }

  // When the sequence was last appended to or read.
  std::chrono::steady_clock::time_point last_used() const {
    return std::chrono::steady_clock::time_point(
        std::chrono::steady_clock::duration(last_used_.load(std::memory_order_relaxed)));
  }
  // Whether any segment is paged; whether any is whole.
  bool has_paged_segments() const { return paged_segments_.load(std::memory_order_relaxed) > 0; }
  bool has_whole_segments() const { return whole_segments_.load(std::memory_order_relaxed) > 0; }

  void ReleaseWriter(WriterId writer);

  SequenceInfo Info();

 private:
  // The parts of a shorter history.
  struct Prefix {
    size_t segments = 0;  // of the chain
    Tail tail;
  };
  // A pass that is neither complete nor given up.
  struct DeclaredPass {
    WriterId writer;
    uint64_t end;                   // of the positions that it has room for
    std::vector<uint64_t> lengths;  // [layers] when it was declared
    bool appended;                  // then its writer is the sequence's until the pass is over
  };
  // Holds builds back after failures.
  struct BuildDelay {
    uint64_t from = 0;    // the committed length at which the next build is due
    uint64_t tokens = 0;  // grows with each failure
  };
  static constexpr uint64_t kNoStep = std::numeric_limits<uint64_t>::max();

  bool HasEarly() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool InstallEarly(const SegmentJob& job, std::shared_ptr<const attention::Segment> segment);
  bool StillFits(const SegmentJob& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasBlocksOf(const SegmentJob& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where the window of a history of `length` tokens begins.
  uint64_t WindowBegin(uint64_t length) const {
    return engine::WindowBegin(length, policy().window);
  }
  // The position up to which segments may reach: outside the window, and before the newest step.
  uint64_t SegmentsEnd() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What can be said of new tokens without their keys and values.
  absl::Status CheckPlace(WriterId writer, const NewTokens& tokens) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // FailedPrecondition, naming the position expected: of a step that a segment covers, and of
  // tokens that would leave a gap. ResourceExhausted beyond max_tokens_.
  absl::Status CheckStepPosition(uint32_t layer, uint64_t position) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckGap(uint32_t layer, uint64_t position) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckLength(uint64_t position, uint64_t tokens) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<DeclaredPass>::iterator PassOf(WriterId writer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool NothingIsAt(uint32_t layer, uint64_t position) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The end of the positions that passes have room for; 0 without passes.
  uint64_t PassesEnd() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops the tail's blocks that no layer has come to, and no pass has room in.
  void DropUnwritten() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Replaces the tail's blocks in which passes wrote tokens and gave them up. ResourceExhausted.
  absl::Status ForgetGivenUp() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<TokenIds::Room> MakeRoom(const NewTokens& tokens)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WriteNew(const NewTokens& tokens, attention::WorkerPool* workers,
                        float* key_magnitudes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t Take(WriterId writer, const NewTokens& tokens, TokenIds::Room room) noexcept
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status HoldBooks(size_t blocks, size_t segments) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // OutOfRange if logits could be beyond kLogitMax. Forgets what passes gave up before it says so,
  // ResourceExhausted.
  absl::Status CheckLogits(uint32_t layer, float query_magnitude, float key_magnitude)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LogitsWithBounds(uint32_t layer, float query_magnitude, float key_magnitude) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Aborted if a segment with positions in [begin, end) is paged.
  absl::Status CheckWhole(uint64_t begin, uint64_t end) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckAligned() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckWriter(WriterId writer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckRepeat(const NewTokens& tokens) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status GrowTail(uint64_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool SegmentsHold(const NewTokens& tokens, uint64_t end) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t CommittedTokens() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The committed tokens that no open pass may take back, whose last layer has them before it is
  // answered.
  uint64_t KeptTokens() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What steps read; and the same with the whole tail in place of early segments.
  std::shared_ptr<const attention::SequenceView> View() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<const attention::SequenceView> HistoryView()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<attention::SequenceView> MakeView(const EarlySegments& early)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A view without segments, whose tail begins at `begin`, which is in the tail.
  std::shared_ptr<attention::SequenceView> TailView(uint64_t begin)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Stops the process if an invariant of the class is broken. After each change of the chain.
  void CheckInvariants() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t SegmentsKept(uint64_t length) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // FailedPrecondition beyond the committed length, ResourceExhausted.
  absl::StatusOr<Prefix> PrefixOf(uint64_t length) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Touch() {
    last_used_.store(std::chrono::steady_clock::now().time_since_epoch().count(),
                     std::memory_order_relaxed);
  }
  // After a change of segments_.
  void CountSegments() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SumUpKeyBounds() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant.
  const uint64_t id_;
  const std::string tenant_;
  const OpenArgs args_;  // with a policy and indexes
  const uint64_t max_tokens_;
  MemoryBudget* const budget_;
  Reservation object_;  // set by Create

  std::atomic<bool> closed_{false};
  std::atomic<std::chrono::steady_clock::rep> last_used_{0};
  // Set under mutex_.
  std::atomic<uint32_t> paged_segments_{0};
  std::atomic<uint32_t> whole_segments_{0};

  Mutex mutex_;
  std::vector<std::shared_ptr<const attention::Segment>> segments_ ABSL_GUARDED_BY(mutex_);
  Tail tail_ ABSL_GUARDED_BY(mutex_);
  EarlySegments early_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> layer_tokens_ ABSL_GUARDED_BY(mutex_);  // [layers]
  // [layers] Positions of the tail below this one have been written, at least layer_tokens_; the
  // positions between the two were given up.
  std::vector<uint64_t> layer_written_ ABSL_GUARDED_BY(mutex_);
  // Position at which the newest step began. Its tokens stay out of segments, however many they
  // are, so that the step can be repeated.
  uint64_t newest_step_ ABSL_GUARDED_BY(mutex_) = kNoStep;
  BuildDelay segment_delay_ ABSL_GUARDED_BY(mutex_);
  BuildDelay early_delay_ ABSL_GUARDED_BY(mutex_);
  // Greatest |k| of each segment, [segments][layers], and of all tokens, [layers]. Kept by segment
  // so that a bound goes with the segment that is dropped.
  std::vector<float> segment_key_bounds_ ABSL_GUARDED_BY(mutex_);
  std::vector<float> key_bounds_ ABSL_GUARDED_BY(mutex_);
  TokenIds token_ids_ ABSL_GUARDED_BY(mutex_);
  Reservation books_ ABSL_GUARDED_BY(mutex_);  // for the lists of segments and blocks
  std::optional<WriterId> writer_ ABSL_GUARDED_BY(mutex_);
  std::vector<DeclaredPass> passes_ ABSL_GUARDED_BY(mutex_);  // counted by who declared them
  // [layers] queries of the prompt's last tokens; null where there are none.
  std::vector<std::shared_ptr<const ObservedLayer>> observed_ ABSL_GUARDED_BY(mutex_);
  attention::PolicyState state_ ABSL_GUARDED_BY(mutex_);
  // View(), made when it is asked for. Null after a change of segments or blocks; out of date if
  // the policy state's version is not view_state_version_.
  std::shared_ptr<const attention::SequenceView> view_ ABSL_GUARDED_BY(mutex_);
  uint64_t view_state_version_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_SEQUENCE_H_
