// SPDX-License-Identifier: Apache-2.0
//
// Backend: the seam between the engine and whatever computes attention (docs/DESIGN.md, "Idea 3"):
// one call answers one layer of a batch. Selection, the plan and its execution stay inside, so that
// on a GPU a plan never leaves the device.
#ifndef ATTND_ATTENTION_BACKEND_H_
#define ATTND_ATTENTION_BACKEND_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/policy/policy.h"
#include "attention/policy_state/policy_state.h"
#include "attention/row_stats.h"
#include "attention/segment/device_copy_slot.h"
#include "attention/segment/index_set.h"
#include "attention/segment/pages.h"
#include "attention/segment/segment.h"
#include "common/dtype.h"
#include "common/model_shape.h"
#include "common/shared_device_memory.h"

namespace attnd::attention {

class Backend;

// What is to be built of a segment: all heads of layers [first_layer, end_layer).
struct SegmentPart {
  uint32_t first_layer = 0;
  uint32_t end_layer = 0;
  // Whether a client waits for it, or will at the end of the prompt that it uploads; else all other
  // work may go first.
  bool awaited = false;
  uint32_t layers() const { return end_layer - first_layer; }
};

// What a sequence consists of at one moment. Immutable; a holder of a view pins every page in it,
// so a backend that works asynchronously keeps a reference until the device is done with the step.
struct SequenceView {
  ModelShape shape;
  IndexSet indexes = kClusterIndexes;  // of every segment
  // The backend that has the sequence (Backend::OwnerOf); null: whichever backend is asked.
  const Backend* owner = nullptr;
  // In position order, without gaps, from position 0.
  std::vector<std::shared_ptr<const Segment>> segments;
  // Block i holds positions [64 (b + i), 64 (b + i + 1)), b = tail_begin / 64.
  std::vector<std::shared_ptr<const TailBlock>> tail;
  uint64_t tail_begin = 0;  // first position that no segment covers
  // What the sequence keeps for its policies. Steps write to the recalled blocks, and to
  // device_copy, alone.
  PolicyView state;
  // What a backend with memory of its own has found out about the view.
  DeviceCopySlot device_copy;

  // Whether pages of a segment lie in a file.
  bool paged() const;
};

// One sequence's part of a step. Buffers belong to the caller and live until Step returns.
struct StepRow {
  std::shared_ptr<const SequenceView> view;
  const Policy* policy = nullptr;
  uint64_t past_tokens = 0;   // tokens of the layer before the first query token
  uint32_t query_tokens = 0;  // at least 1
  // True: every query token sees past_tokens. False: query token i is itself in the tail and sees
  // past_tokens + i + 1.
  bool query_only = false;
  bool want_kv_head_errors = false;  // in stats
  DType query_dtype = DType::kFp32;
  const std::byte* queries = nullptr;  // [query_tokens, query_heads, head_dim]
  float* out = nullptr;                // [query_tokens, query_heads, value_dim]
  // Where the caller has `out` in the end, if not as floats. A backend may write the whole row
  // there instead, rounded as FromFloat does, and says so; lse is then NaN where a number of out is
  // none.
  struct FinalOut {
    DType dtype = DType::kFp32;  // kFp32: there is no such place
    std::byte* to = nullptr;     // [query_tokens, query_heads, value_dim]
    bool* written = nullptr;     // false before the step
  };
  FinalOut final_out = {};
  float* lse = nullptr;  // [query_tokens, query_heads]; -infinity (and out 0) without tokens
  RowStats* stats = nullptr;
  // Receives why this row alone has no answer (its pages are lost or could not be read); OK
  // otherwise. Null: such an error is then the step's status.
  absl::Status* fault = nullptr;
};

// Names a cluster in a plan.
struct ClusterRef {
  uint32_t segment = 0;
  uint32_t cluster = 0;
  auto operator<=>(const ClusterRef&) const = default;
};
struct Plan {
  uint32_t row = 0;
  uint32_t query_token = 0;
  uint32_t kv_head = 0;
  // Of cluster policies.
  std::vector<ClusterRef> exact;      // ascending
  std::vector<ClusterRef> estimated;  // ascending
  // Groups, and sections, that were estimated as a whole, ascending. A closed section's groups are
  // in no list.
  std::vector<ClusterRef> closed, closed_sections;
  // Of the others: positions of the middle that each query head reads, ascending; one list for the
  // group if its heads share it.
  std::vector<std::vector<uint64_t>> positions;
};

// What a row brings, as the tensors of a message have it.
struct RowTokens {
  const std::byte* queries = nullptr;  // [query_tokens][query_heads][head_dim]
  // Of the tokens that the row appends; null of a row that is query_only.
  const std::byte* keys = nullptr;    // [query_tokens][kv_heads][head_dim]
  const std::byte* values = nullptr;  // [query_tokens][kv_heads][value_dim]
};

// A client's turn, in memory that the backend has mapped (Backend::MapMemory): the tokens of an
// expected step come there, and its answer goes there, with nobody between.
struct ClientTurn {
  // The tokens are there once this word is `epoch`. Any numbers may stand in them. The client may
  // change them at any time: HasBegunWith says what the step has begun with.
  const uint32_t* ring = nullptr;
  uint32_t epoch = 0;
  std::span<const RowTokens> tokens;  // of each row, where they will be
  // Of all rows, one after another, which have the same FinalOut::dtype; null: nowhere. The device
  // may write here from when the client has rung until the step has ended, also if it is given up.
  std::byte* out = nullptr;  // the place that rows' final_out will name
  float* lse = nullptr;      // beside the rows' own
  // A pair of words that become {epoch, 0} behind out and lse: so the client learns of its answer.
  // Null: the caller tells. Not without the two above, but for an lse that the client does not
  // want.
  uint64_t* answer = nullptr;
  // Where the backend's device has the same once more, and the client as well: at memory_twin what
  // is at `memory` here (Backend::ShareMemory). The device then awaits the ring there, takes the
  // tokens from there, and, if there is an answer word, tells there, behind another out and lse,
  // not here. Null: nowhere.
  const std::byte* memory = nullptr;
  std::byte* memory_twin = nullptr;
};

// A step that a backend got ready for before its queries were there (Backend::Prepare). It holds
// what the backend needs for the step, a stream of a GPU for one. Ends before its backend.
class PreparedStep {
 public:
  virtual ~PreparedStep() = default;
  // Whether it takes its tokens from the client's memory once the client rings; a constant.
  virtual bool takes_turn() const = 0;
  // Of such a step, whose client has rung: whether it has begun with just these bytes, for which it
  // may wait a moment. If so Step is asked for the answer as ever, with these queries, once they
  // are checked and appended; else it is given up.
  virtual bool HasBegunWith(std::span<const RowTokens> rows) = 0;
  // Behind Step, if that has answered this step: whether ClientTurn::answer has been written.
  virtual bool has_told() const = 0;
  // Lets go of all that it holds, unless that has been done: the step does not come. May wait for
  // the device as long as a step takes.
  virtual void GiveUp() = 0;
  PreparedStep(const PreparedStep&) = delete;
  PreparedStep& operator=(const PreparedStep&) = delete;

 protected:
  PreparedStep() = default;
};

struct StepRequest {
  uint32_t layer = 0;
  std::span<const StepRow> rows;
  // Checked before each piece of work; DeadlineExceeded past it.
  std::optional<std::chrono::steady_clock::time_point> deadline;
  // Checked before each piece of work; Cancelled when set. May be null.
  const std::atomic<bool>* cancelled = nullptr;
  // From when the time counts for which policies wait for pages (miss_wait_us). None: from when a
  // backend is asked.
  std::optional<std::chrono::steady_clock::time_point> begun;
  // If not null, receives the plans of the rows whose policies select, ordered by (row, query
  // token, KV head).
  std::vector<Plan>* plans = nullptr;
  // What Prepare gave, once; null: nothing. If this is another step than the one prepared, that is
  // given up, and this one answered as if there were nothing.
  PreparedStep* prepared = nullptr;
};

// The request, begun now if it has not begun before: for a backend that may ask another one.
StepRequest Begun(const StepRequest& request);

// Cancelled or DeadlineExceeded if nobody waits for the step's answer any more.
absl::Status CheckAlive(const StepRequest& request);

// Why the CPU answered a row in a device's place.
enum class Fallback : uint8_t {
  kFailed,   // the device has failed
  kIndexes,  // no room for the indexes of the row's segments
  kPages,    // no room for keys and values, and host memory could not be mapped in their place; or
             // none for a cache of the pages of files, or for pages that come with a step
  kScratch,  // no room for the step: a stream's memory, or the device's own for launching
  kPaged,    // pages of a segment are on disk: a row that only the CPU reads from there, or whose
             // pages could not be read
};
inline constexpr size_t kFallbacks = 5;

// What a backend with memory of its own has done and holds. All zero for a backend without.
struct BackendStats {
  struct Arena {
    uint64_t capacity_bytes = 0;
    uint64_t used_bytes = 0;
  };
  Arena pages;    // keys and values
  Arena index;    // what selection reads
  Arena scratch;  // of steps and of building; all of it in use from the start
  uint64_t bytes_to_device = 0;
  uint64_t bytes_to_host = 0;
  uint64_t evictions = 0;  // copies given up to make room
  // Of the cache of pages whose segments' payload lies in host memory or in files. A page that is
  // used several times in a step may count several times.
  struct PageCache {
    uint64_t lookups = 0;        // pages of chosen tokens
    uint64_t fetched = 0;        // of them, that were missed and copied into the cache
    uint64_t in_place = 0;       // of them, that found no frame and were read where they lie
    uint64_t carried = 0;        // of them, of files, that the host handed to the step
    uint64_t host_tokens = 0;    // chosen tokens (of a KV head) of the last three
    uint64_t fetched_bytes = 0;  // copied into the cache, also by waves that were not answered
    uint64_t bytes = 0;          // of the cache now; 0 while everything fits the device
  };
  PageCache cache;
  // Of steps over segments in files.
  struct Files {
    uint64_t waves = 0;       // that were answered
    uint64_t runs_again = 0;  // of waves: each for want of pages that the host then looked for
    uint64_t pages = 0;       // that it brought, also for waves that were not answered
    uint64_t disk_pages = 0;  // of them, that were read from disk for it
    uint64_t bytes = 0;       // of all
  };
  Files files;
  uint64_t steps = 0;           // answered, by the device or by the CPU
  uint64_t fallback_steps = 0;  // steps with a row that the CPU answered in the device's place
  std::array<uint64_t, kFallbacks> fallback_rows{};  // these rows, by Fallback
  // What the index arena lacks for the indexes of one sequence: the most of any step; 0: all fit.
  uint64_t index_missing_bytes = 0;
  uint64_t graph_launches = 0;  // launches that repeated a whole earlier step's graph
  // Steps that were launched before their queries were there (Prepare): answered; in vain, as
  // another step came, or none for a while.
  uint64_t steps_ahead = 0;
  uint64_t steps_told = 0;  // of steps_ahead: the device has told the client
  uint64_t steps_in_vain = 0;
  // Device time by stage, over the steps where it was measured.
  uint64_t timed_steps = 0;
  double score_seconds = 0;
  double select_seconds = 0;
  double attend_seconds = 0;
  double merge_seconds = 0;
  double fetch_seconds = 0;  // of attend_seconds: finding and fetching pages, beside estimates
};

// What the link between host and device carries, of all processes, in bytes a second.
struct LinkRates {
  double to_device = 0;
  double to_host = 0;
};

class SegmentBuilder;

// What a sequence asks of the backend that is to own it.
struct SequenceNeeds {
  const Policy& policy;
  const ModelShape* shape = nullptr;  // null: a shape that every backend can run
  const IndexSet* indexes = nullptr;  // null: the indexes that the backend has for the policy
};

// Thread-safety: all methods may be called from any thread, several at once.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual absl::string_view name() const = 0;
  // Names of the backends that may own a sequence, the preferred one first.
  virtual std::vector<absl::string_view> names() const { return {name()}; }
  // The backend that is to answer for such a sequence for all its life: this one, or a part of it.
  // If no backend can run the sequence, there is an owner all the same, and its Supports says why
  // not.
  virtual const Backend& OwnerOf(const SequenceNeeds&) const { return *this; }
  // Name of the instruction set that the kernels on the CPU chose.
  virtual absl::string_view target() const = 0;
  // Unimplemented, naming the preset, if the backend cannot run `policy`.
  virtual absl::Status Supports(const Policy& policy) const = 0;
  // Unimplemented, naming what the model has and what the backend can run, if it cannot run models
  // of this shape, which is valid.
  virtual absl::Status Supports(const ModelShape& shape) const = 0;
  // Unimplemented, naming what the backend can read, if it cannot read segments with these.
  virtual absl::Status Supports(const IndexSet& indexes) const = 0;
  // Whether it runs the policy over these indexes, which the policy can read.
  virtual bool Answers(const Policy& policy, const IndexSet& indexes) const {
    return Supports(policy).ok() && Supports(indexes).ok();
  }
  // Whether segments that are read from files for the backend are to be whole where memory has room
  // for them, as it answers rows over paged ones more slowly.
  virtual bool PrefersWhole() const { return false; }
  // Name of the device that answers; empty if it is the CPU.
  virtual absl::string_view device() const { return {}; }
  // Why the backend answers more slowly than it was made to; OK if it does not.
  virtual absl::Status Health() const { return absl::OkStatus(); }
  virtual BackendStats stats() const { return BackendStats(); }
  // Measured now, which may take 40 ms. Unavailable, saying why, without a device, or where nothing
  // measures it.
  virtual absl::StatusOr<LinkRates> link_rates() const {
    return absl::UnavailableError("the CPU answers");
  }
  // Has the device run a kernel that does nothing; how long that took, from its launch until its
  // end was seen. Calls take turns, and the time that one waits for its turn is not part of that;
  // nor do they wait for steps. Unimplemented without a device; Unavailable if it has failed.
  virtual absl::StatusOr<std::chrono::nanoseconds> RunEmpty() const {
    return absl::UnimplementedError("the backend has no GPU");
  }
  // Steps will read the segment, which is whole in memory: the backend may get ready for them in
  // the background, as long as the segment lives. Returns at once.
  virtual void Expect(const Segment& /*segment*/) const {}
  // Gets ready for a step that is expected at once, so that its answer comes sooner: the rows'
  // views have room for the tokens that they append, which need not have been written, and there
  // are no queries and buffers yet. Null: there is nothing to get ready, or no room. The caller
  // gives up what it does not use within a few milliseconds: it may hold up others. turn: where
  // the step may find its tokens and leave its answer by itself; null: nowhere. All of it must stay
  // until the step has ended.
  virtual std::unique_ptr<PreparedStep> Prepare(const StepRequest& /*request*/,
                                                const ClientTurn* /*turn*/) {
    return nullptr;
  }
  // Lets a device read and write memory of the host's, whole pages of the system's, until what it
  // gives is gone; the backend must outlive that. It takes some 0.3 s a GiB. Null: there is no
  // device, or it cannot.
  virtual std::shared_ptr<const void> MapMemory(std::byte* /*memory*/, uint64_t /*bytes*/) const {
    return nullptr;
  }
  // The 16 bytes of the UUID of the device whose memory ShareMemory gives; empty: none's.
  virtual std::string sharing_device() const { return {}; }
  // Memory of the backend's device that another process may map, too; `bytes` is a multiple of
  // kSharedDeviceUnitBytes. It may outlive the backend. Unimplemented if there is no device, or one
  // that cannot; ResourceExhausted if it has no room; Unavailable if it has failed.
  virtual absl::StatusOr<SharedDeviceMemory> ShareMemory(uint64_t /*bytes*/) const {
    return absl::UnimplementedError("the backend has no GPU that shares memory");
  }
  // Fills out, lse and stats of every row without a fault. A row's answer does not depend on the
  // other rows, bit for bit. On error the buffers' content is undefined.
  virtual absl::Status Step(const StepRequest& request) = 0;
  // Builds a part of a segment, of which nothing is built yet; other layers need not have the
  // segment's tokens. Calls `proceed` between pieces of work of some milliseconds; `proceed` may
  // wait, and the building ends with its error if it is not OK. After any error nothing of the part
  // is built; HeadBuilders may build the segment instead if no other part of it is. Unimplemented
  // if the backend builds no segments.
  virtual absl::Status BuildSegment(SegmentBuilder* /*segment*/, SegmentPart /*part*/,
                                    absl::FunctionRef<absl::Status()> /*proceed*/) {
    return absl::UnimplementedError("this backend builds no segments");
  }
};

// Unimplemented, naming both, if the backend does not run the policy over these indexes.
absl::Status CheckAnswers(const Backend& backend, const Policy& policy, const IndexSet& indexes);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_BACKEND_H_
