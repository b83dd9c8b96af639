// SPDX-License-Identifier: Apache-2.0
//
// Arguments and results of the engine's calls (engine/engine.h): plain data, without methods. A
// file that only passes this data on needs no other header of the engine.
#ifndef ATTND_ENGINE_TYPES_H_
#define ATTND_ENGINE_TYPES_H_

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
#include "absl/strings/string_view.h"
#include "attention/policy/policy.h"
#include "attention/policy_state/model_parts.h"
#include "attention/row_stats.h"
#include "attention/segment/index_set.h"
#include "common/dtype.h"
#include "common/model_shape.h"
#include "storage/cache/page_cache_stats.h"

namespace attnd::attention {
class Backend;
}  // namespace attnd::attention

namespace attnd::engine {

// Names a writer: a stream that appends. The first writer that appends to a sequence holds the
// sequence until ReleaseWriter.
using WriterId = uint64_t;

// A tensor in the caller's memory, already checked: `data` holds exactly the elements that the
// field's shape says.
struct TensorView {
  DType dtype = DType::kFp32;
  const std::byte* data = nullptr;
  uint64_t elements = 0;
};

// The part of a model that a sequence belongs to, as its client says.
struct Shard {
  enum class Kind { kWhole, kHeads, kContext };
  Kind kind = Kind::kWhole;
  uint32_t index = 0;
  uint32_t count = 1;
  bool operator==(const Shard&) const = default;
};

// What a sequence is opened with.
struct OpenArgs {
  std::string fingerprint;                  // names the model; empty: prefixes are not shared
  ModelShape shape;                         // validated by Open
  Shard shard;                              // kept for listings
  std::optional<attention::Policy> policy;  // absent: EngineOptions::default_policy
  // The indexes of the segments; they decide the order of tokens in a segment. Absent: the indexes
  // that the policy needs, or clusters if the policy needs none or cluster_order asks for them; for
  // a resumed sequence, the indexes that it was sealed with.
  std::optional<attention::IndexSet> indexes;
  bool cluster_order = false;
  // The sizes of the tree among the indexes, which, where absent, are those that the policy needs.
  // Absent: the sizes that `indexes` has; of a resumed sequence those that it was sealed with.
  // InvalidArgument by Open where the indexes have no tree, and by Resume. Of a sequence always
  // absent: the engine moves the sizes to the indexes.
  std::optional<attention::TreeSizes> tree;
  // Time without a call until the sequence is closed, up to kLeaseMax (engine/lease.h); 0: it stays
  // open until Close. Forks have the same lease; sealed sequences have none.
  std::chrono::seconds lease{0};
  // Set by the engine: the parts of the model's files that the indexes need.
  attention::ModelParts model_parts;
  // Set by the engine: the backend that owns the sequence. The backend lives as long as the engine.
  const attention::Backend* backend = nullptr;
};

// An open sequence at one moment.
struct SequenceInfo {
  uint64_t id = 0;
  OpenArgs args;  // policy and indexes are always present
  uint64_t committed_tokens = 0;
  uint64_t segmented_tokens = 0;
  uint32_t segments = 0;
  uint64_t resident_bytes = 0;
  std::vector<uint64_t> layer_tokens;  // [layers]
  // Of a listing: what is left of args.lease; all of it while a call is under way.
  std::chrono::nanoseconds lease_left{0};
};

// One chunk of a prefill: tokens [first_position, + tokens) of one layer.
struct AppendChunk {
  uint32_t layer = 0;
  uint64_t first_position = 0;
  uint64_t tokens = 0;
  TensorView k;                         // [tokens, kv_heads, head_dim]
  TensorView v;                         // [tokens, kv_heads, value_dim]; none of a latent model
  std::span<const uint32_t> token_ids;  // none or [tokens]
  uint64_t prompt_tokens = 0;           // of the sequence at the prompt's end; 0: not known
  // Set if others may write to k and v: then a copy is checked and appended, and this asked, once
  // it is made, whether they have been kept as they were (Cancelled if not). Null: nobody may.
  const std::function<bool()>* kept = nullptr;
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

// One sequence's part of a step.
struct DecodeRow {
  uint64_t sequence_id = 0;
  uint64_t position = 0;
  uint32_t query_tokens = 0;
  std::span<const uint32_t> token_ids;      // none or [query_tokens]
  std::optional<attention::Policy> policy;  // of this step; absent: the sequence's
  bool query_only = false;                  // nothing is appended
  bool want_kv_head_errors = false;         // in the row's statistics
  // Not OK: the row was refused before it came to the engine (for example because its policy did
  // not parse). The row's result has this status, and the row is not run.
  absl::Status precheck;
};

// One layer of a step.
struct DecodeArgs {
  uint32_t layer = 0;
  std::span<const DecodeRow> rows;
  // Shapes as the proto says; all rows' tokens one after the other. The caller has checked that
  // `data` holds as many elements as the view says; the engine checks everything else.
  TensorView q;
  // The tensor's own last two extents; its tokens are the sum of the rows' query_tokens.
  uint64_t q_heads = 0, q_head_dim = 0;
  TensorView k;
  uint64_t k_heads = 0, k_head_dim = 0;
  // None if rows that append are of latent models.
  TensorView v;
  uint64_t v_heads = 0, v_value_dim = 0;
  // What the caller makes of out in the end. If not kFp32, its AnswerMemory has room for that, too.
  DType final_dtype = DType::kFp32;
  std::optional<std::chrono::steady_clock::time_point> deadline;
  const std::atomic<bool>* cancelled = nullptr;
};

struct DecodeRowResult {
  absl::Status status;
  bool told_before =
      false;  // the status is that of an earlier layer, in which the row left its pass
  attention::RowStats stats;
  bool out_is_final = false;  // out is in AnswerBuffers::final_out alone
};

// The results of a step except out and lse, which lie in the caller's AnswerMemory.
struct DecodeResult {
  std::vector<DecodeRowResult> rows;
  uint64_t value_dim = 0;                     // of out; 0 if no row was accepted
  bool told_client = false;                   // ClientLayer::answer says so: all rows have answers
  std::chrono::nanoseconds validate_time{0};  // checks and appending
};

struct SealResult {
  uint64_t sealed_id = 0;  // names the sealed sequence for ever; never 0
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
  absl::string_view backend = "";  // name of the backend that has the sequence
};

// What the archive has done since the engine's start.
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
  uint64_t orphan_files = 0;        // files that no record named at the start
  uint64_t paged_out_segments = 0;  // moved to disk for lack of memory
  uint64_t failed_page_outs = 0;
  uint64_t paged_in_segments = 0;  // moved back, as memory has room again
  uint64_t retired_sequences = 0;  // dropped by the limits of retention
  storage::PageCacheStats pages;
};

// Of the memory budget.
struct Usage {
  uint64_t resident_bytes = 0;
  uint64_t capacity_bytes = 0;
  uint64_t sequences = 0;
  uint64_t leased_sequences = 0;  // those of them that have a lease
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_TYPES_H_
