// SPDX-License-Identifier: Apache-2.0
#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/status.h"
#include "engine/archive/archive.h"
#include "engine/archive/paged_segments.h"
#include "engine/archive/pager.h"
#include "engine/audit/auditor.h"
#include "engine/memory_budget.h"
#include "engine/models/feature_map_files.h"
#include "engine/models/label_channel_files.h"
#include "engine/sequence/decode_batch.h"
#include "engine/sequence/latent_values.h"
#include "engine/sequence/magnitude.h"
#include "engine/sequence/prompt_observer.h"
#include "engine/sequence/segmenter.h"
#include "engine/sequence/sequence.h"
#include "engine/sequence/sequence_table.h"

namespace attnd::engine {
namespace {

absl::Status CheckChunkTensor(const char* name, const TensorView& tensor, DType dtype,
                              uint64_t tokens, uint64_t heads, uint64_t dim) {
  if (tensor.dtype != dtype) {
    return absl::InvalidArgumentError(absl::StrCat(name, " has dtype ", DTypeName(tensor.dtype),
                                                   "; the sequence needs ", DTypeName(dtype)));
  }
  const auto expected = CheckedProduct({tokens, heads, dim});
  if (expected.has_value() && tensor.elements == *expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " has ", tensor.elements,
                                                 " elements; the sequence needs shape [", tokens,
                                                 ", ", heads, ", ", dim, "]"));
}

absl::Status CheckFinite(const char* name, float magnitude) {
  if (std::isfinite(magnitude)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has a NaN or an infinity; allowed are finite numbers"));
}

// Finite, and within kValueMax.
absl::Status CheckChunkValues(const AppendChunk& chunk, const ModelShape& shape) {
  if (shape.latent) return CheckLatentValues(shape, chunk.k.data, chunk.tokens);
  const float magnitude = Magnitude(shape.dtype, chunk.v.data, chunk.v.elements);
  ATTND_RETURN_IF_ERROR(CheckFinite("v", magnitude));
  return CheckValueMagnitude(magnitude);
}

// [kv_heads][head_dim] the greatest |q| of each channel, the mean over the heads of a group.
std::vector<float> GroupMagnitudes(const ModelShape& shape, const ObservedLayer& observed) {
  const size_t dim = shape.head_dim;
  std::vector<float> row(dim), greatest(shape.query_heads * dim, 0.0f);
  for (uint64_t i = 0; i < uint64_t{observed.tokens} * shape.query_heads; ++i) {
    ToFloat(observed.dtype, observed.queries.data() + i * dim * DTypeBytes(observed.dtype), dim,
            row.data());
    float* head = greatest.data() + i % shape.query_heads * dim;
    for (size_t c = 0; c < dim; ++c) head[c] = std::max(head[c], std::abs(row[c]));
  }
  std::vector<float> mean(shape.kv_heads * dim, 0.0f);
  for (uint32_t head = 0; head < shape.query_heads; ++head) {
    for (size_t c = 0; c < dim; ++c) {
      mean[head / shape.group() * dim + c] +=
          greatest[head * dim + c] / static_cast<float>(shape.group());
    }
  }
  return mean;
}

// What `call` gives, or ResourceExhausted if the system refuses it memory.
template <typename F>
auto WithinMemory(const F& call) -> decltype(call()) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("the system refused memory");
  }
}

class EngineImpl : public Engine {
 public:
  EngineImpl(const EngineOptions& options, std::unique_ptr<attention::Backend> backend,
             Observer* observer)
      : options_(options),
        backend_(std::move(backend)),
        observer_(observer),
        budget_(options.memory_budget_bytes),
        sequences_(options.max_sequences),
        segmenter_({options.segment_tokens, options.index_threads}, backend_.get(), &budget_,
                   &gate_, observer) {}
  ~EngineImpl() override {
    EngineImpl::Shutdown();
    budget_.SetReclaim(nullptr);
  }

  // Before anything else. ResourceExhausted if the system refuses the background thread; what
  // Archive::Open says.
  absl::Status Start() {
    ATTND_ASSIGN_OR_RETURN(feature_maps_, FeatureMapStore::Load(options_.feature_maps));
    ATTND_ASSIGN_OR_RETURN(label_channels_, LabelChannelStore::Load(options_.label_channels));
    if (!options_.archive.data_dir.empty()) {
      ArchiveOptions options = options_.archive;
      if (observer_ != nullptr) {
        options.on_pages_read = [observer = observer_](uint64_t bytes, auto time) {
          observer->OnPagesRead(bytes, time);
        };
        options.on_disk_fault = [observer = observer_](const absl::Status& status) {
          observer->OnDiskFault(status);
        };
      }
      ATTND_ASSIGN_OR_RETURN(archive_, Archive::Open(options, &budget_, nullptr));
      budget_.SetReclaim([this](uint64_t bytes) { return archive_->Reclaim(bytes); });
      pager_ = std::make_unique<Pager>(
          archive_.get(), &budget_, [this] { return sequences_.All(); }, options.retention);
      ATTND_RETURN_IF_ERROR(pager_->Start());
    }
    if (observer_ != nullptr && options_.audit.share > 0) {
      auditor_ = std::make_unique<Auditor>(options_.audit, &budget_, &gate_, observer_);
      ATTND_RETURN_IF_ERROR(auditor_->Start());
    }
    return segmenter_.Start();
  }

  const EngineOptions& options() const override { return options_; }
  const attention::Backend& backend() const override { return *backend_; }
  attention::IndexSet IndexesOf(const attention::Policy& policy) const override {
    return IndexesOn(backend_->OwnerOf({.policy = policy}), policy);
  }

  absl::StatusOr<uint64_t> Open(absl::string_view tenant, const OpenArgs& args) override {
    ATTND_ASSIGN_OR_RETURN(const OpenResult opened, OpenReusing(tenant, args, {}, nullptr));
    return opened.sequence_id;
  }

  absl::Status Append(absl::string_view tenant, WriterId writer, uint64_t sequence_id,
                      const AppendChunk& chunk) override {
    return WithinMemory([&]() -> absl::Status {
      ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.FindToWrite(tenant, sequence_id, writer));
      const ModelShape& shape = sequence->shape();
      if (chunk.layer >= shape.layers) {
        return absl::InvalidArgumentError(absl::StrCat(
            "layer is ", chunk.layer, "; the sequence has layers 0..", shape.layers - 1));
      }
      if (chunk.tokens == 0)
        return absl::InvalidArgumentError("k has no tokens; at least 1 is needed");
      if (!chunk.token_ids.empty() && chunk.token_ids.size() != chunk.tokens) {
        return absl::InvalidArgumentError(absl::StrCat("token_ids has ", chunk.token_ids.size(),
                                                       " entries; allowed are none or ",
                                                       chunk.tokens));
      }
      ATTND_RETURN_IF_ERROR(CheckChunkTensor("k", chunk.k, shape.dtype, chunk.tokens,
                                             shape.kv_heads, shape.head_dim));
      ATTND_RETURN_IF_ERROR(CheckValuesSent(chunk.v.elements != 0, shape));
      if (!shape.latent) {
        ATTND_RETURN_IF_ERROR(CheckChunkTensor("v", chunk.v, shape.dtype, chunk.tokens,
                                               shape.kv_heads, shape.value_dim));
      }
      std::vector<float> key_magnitudes;
      BlockMagnitudes(shape.dtype, chunk.k.data, chunk.first_position, chunk.tokens,
                      uint64_t{shape.kv_heads} * shape.head_dim, &key_magnitudes);
      for (const float magnitude : key_magnitudes) {
        ATTND_RETURN_IF_ERROR(CheckFinite("k", magnitude));
      }
      ATTND_RETURN_IF_ERROR(CheckChunkValues(chunk, shape));
      NewTokens tokens;
      tokens.layer = chunk.layer;
      tokens.first_position = chunk.first_position;
      tokens.tokens = chunk.tokens;
      tokens.keys = chunk.k.data;
      tokens.values = chunk.v.data;
      tokens.token_ids = chunk.token_ids;
      tokens.key_magnitudes = key_magnitudes;
      ATTND_ASSIGN_OR_RETURN(const uint64_t appended,
                             AppendWithRoom(writer, tokens, chunk, sequence));
      if (chunk.layer == 0) ReportAppended(appended, /*prefill=*/true);
      const bool committed = chunk.layer + 1 == shape.layers;
      if (archive_ != nullptr && committed && InUse(kEarlySegments)) segmenter_.OnGrown(sequence);
      return absl::OkStatus();
    });
  }

  absl::Status Observe(absl::string_view tenant, WriterId writer, uint64_t sequence_id,
                       const ObservedChunk& chunk) override {
    return WithinMemory([&]() -> absl::Status {
      ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.FindToWrite(tenant, sequence_id, writer));
      const ModelShape& shape = sequence->shape();
      if (chunk.layer >= shape.layers) {
        return absl::InvalidArgumentError(absl::StrCat(
            "layer is ", chunk.layer, "; the sequence has layers 0..", shape.layers - 1));
      }
      const bool fits = chunk.tokens >= 1 && chunk.tokens <= attention::kObservedTokensMax &&
                        chunk.heads == shape.query_heads && chunk.head_dim == shape.head_dim;
      if (!fits) {
        return absl::InvalidArgumentError(
            absl::StrCat("observed_queries has shape [", chunk.tokens, ", ", chunk.heads, ", ",
                         chunk.head_dim, "]; allowed are 1..", attention::kObservedTokensMax,
                         " tokens of [", shape.query_heads, ", ", shape.head_dim, "]"));
      }
      const uint64_t bytes = chunk.queries.elements * DTypeBytes(chunk.queries.dtype);
      auto observed = std::make_shared<ObservedLayer>();
      const auto with_room = [&](const auto& call) {
        return chunk.may_wait ? WithRoom(chunk.cancelled, call) : call();
      };
      ATTND_ASSIGN_OR_RETURN(observed->memory,
                             with_room([&] { return budget_.Reserve(bytes, "observed queries"); }));
      observed->dtype = chunk.queries.dtype;
      observed->tokens = static_cast<uint32_t>(chunk.tokens);
      observed->queries.assign(chunk.queries.data, chunk.queries.data + bytes);
      const float magnitude =
          Magnitude(chunk.queries.dtype, chunk.queries.data, chunk.queries.elements);
      ATTND_RETURN_IF_ERROR(CheckFinite("observed_queries", magnitude));
      const std::vector<float> channels = GroupMagnitudes(shape, *observed);
      return with_room(
          [&] { return sequence->Observe(writer, chunk.layer, observed, channels, magnitude); });
    });
  }

  absl::StatusOr<PrefillResult> FinishPrefill(absl::string_view tenant, WriterId writer,
                                              uint64_t sequence_id,
                                              const std::atomic<bool>* cancelled) override {
    return WithinMemory([&]() -> absl::StatusOr<PrefillResult> {
      ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.Find(tenant, sequence_id));
      ATTND_RETURN_IF_ERROR(sequence->CompletePrefill(writer));
      const auto start = std::chrono::steady_clock::now();
      ATTND_RETURN_IF_ERROR(WithRoom(
          cancelled, [&] { return segmenter_.SegmentPrefill(sequence.get(), cancelled); }));
      ATTND_RETURN_IF_ERROR(WithRoom(cancelled, [&] {
        return ObservePrompt(
            options_.index_threads, &budget_,
            [&] {
              gate_.YieldToSteps();
              return UnlessCancelled(cancelled)();
            },
            sequence.get());
      }));
      PrefillResult result;
      result.build_time = std::chrono::steady_clock::now() - start;
      const SequenceInfo info = sequence->Info();
      result.committed_tokens = info.committed_tokens;
      result.segmented_tokens = info.segmented_tokens;
      return result;
    });
  }

  absl::StatusOr<SequenceInfo> Info(absl::string_view tenant, uint64_t sequence_id) override {
    ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.Find(tenant, sequence_id));
    return sequence->Info();
  }

  absl::Status Decode(absl::string_view tenant, WriterId writer, const DecodeArgs& args,
                      DecodeResult* result) override {
    const auto start = std::chrono::steady_clock::now();
    *result = DecodeResult();
    if (args.deadline.has_value() && start > *args.deadline) {
      return absl::DeadlineExceededError("the step's deadline passed before it began");
    }
    std::vector<std::shared_ptr<Sequence>> grown;
    absl::Status status = WithinMemory([&]() -> absl::Status {
      DecodeBatch batch(args, &budget_, result);
      ATTND_RETURN_IF_ERROR(batch.Check(options_));
      std::optional<StepGate::Step> step;
      step.emplace(&gate_);
      PrepareRows(tenant, writer, args, &batch, &grown, result);
      result->validate_time = std::chrono::steady_clock::now() - start;
      // One that may wait for the disk does not hold builders up.
      if (PrefetchNextLayer(args.layer, batch.step_rows())) step.reset();
      ATTND_RETURN_IF_ERROR(batch.Run(backend_.get()));
      PutAwayDamaged(batch, *result);
      if (auditor_ != nullptr) OfferToAudit(args.layer, batch);
      return absl::OkStatus();
    });
    for (const auto& sequence : grown) segmenter_.OnGrown(sequence);
    return status;
  }

  absl::StatusOr<uint64_t> Truncate(absl::string_view tenant, uint64_t sequence_id,
                                    uint64_t length) override {
    return WithinMemory([&]() -> absl::StatusOr<uint64_t> {
      ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.Find(tenant, sequence_id));
      return WithWhole(
          sequence.get(), nullptr, [&] { return sequence->PagedForLength(length); },
          [&] { return sequence->Truncate(length); });
    });
  }

  absl::StatusOr<SequenceInfo> Fork(absl::string_view tenant, uint64_t sequence_id,
                                    std::optional<uint64_t> length) override {
    return WithinMemory([&]() -> absl::StatusOr<SequenceInfo> {
      ATTND_ASSIGN_OR_RETURN(auto parent, sequences_.Find(tenant, sequence_id));
      ATTND_ASSIGN_OR_RETURN(auto child, Make(tenant, parent->Info().args));
      ATTND_RETURN_IF_ERROR(WithWhole(
          parent.get(), nullptr,
          [&] { return parent->PagedForLength(length.value_or(parent->Info().committed_tokens)); },
          [&] { return parent->ForkInto(length, child.get()); }));
      absl::StatusOr<SequenceInfo> info = child->Info();  // nothing may fail once others know it
      ATTND_RETURN_IF_ERROR(sequences_.Publish(std::move(child)));
      return info;
    });
  }

  absl::Status Close(absl::string_view tenant, uint64_t sequence_id) override {
    ATTND_ASSIGN_OR_RETURN(const auto closed, sequences_.Remove(tenant, sequence_id));
    closed->Close();
    return absl::OkStatus();
  }

  std::vector<SequenceInfo> List(absl::string_view tenant, uint64_t after,
                                 uint32_t count) override {
    std::vector<SequenceInfo> infos;
    for (const auto& sequence : sequences_.List(tenant, after, count)) {
      infos.push_back(sequence->Info());
    }
    return infos;
  }

  absl::StatusOr<SealResult> Seal(absl::string_view tenant, uint64_t sequence_id,
                                  const std::atomic<bool>* cancelled) override {
    return WithinMemory([&]() -> absl::StatusOr<SealResult> {
      ATTND_ASSIGN_OR_RETURN(Archive* const archive, GetArchive());
      ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.Find(tenant, sequence_id));
      return archive->Seal(sequence.get(), UnlessCancelled(cancelled));
    });
  }

  absl::StatusOr<OpenResult> Resume(absl::string_view tenant, const OpenArgs& args,
                                    uint64_t sealed_id,
                                    const std::atomic<bool>* cancelled) override {
    return WithinMemory([&]() -> absl::StatusOr<OpenResult> {
      ATTND_ASSIGN_OR_RETURN(Archive* const archive, GetArchive());
      ATTND_ASSIGN_OR_RETURN(const Archive::Sealed sealed, archive->OpenSealed(tenant, sealed_id));
      const OpenArgs& before = sealed.tail.metadata.args;
      OpenArgs wanted = args;
      if (!wanted.policy.has_value()) wanted.policy = before.policy;
      if (!wanted.indexes.has_value()) wanted.indexes = before.indexes;
      if (wanted.cluster_order && wanted.indexes->token_order()) {
        return absl::FailedPreconditionError(
            "layout is cluster order; the sealed sequence is in token order");
      }
      ATTND_RETURN_IF_ERROR(SetFeatureMaps(&wanted));
      ATTND_RETURN_IF_ERROR(CheckResumes(wanted, before));
      return WithRoom(cancelled, [&]() -> absl::StatusOr<OpenResult> {
        ATTND_ASSIGN_OR_RETURN(auto sequence, MakeNew(tenant, wanted));
        ATTND_RETURN_IF_ERROR(archive->Resume(sealed, sequence.get(), UnlessCancelled(cancelled)));
        return PublishWith(std::move(sequence));
      });
    });
  }

  absl::StatusOr<OpenResult> OpenReusing(absl::string_view tenant, const OpenArgs& args,
                                         std::span<const uint32_t> token_ids,
                                         const std::atomic<bool>* cancelled) override {
    const auto open = [&]() -> absl::StatusOr<OpenResult> {
      ATTND_ASSIGN_OR_RETURN(auto sequence, MakeNew(tenant, args));
      if (!token_ids.empty()) {
        ATTND_RETURN_IF_ERROR(BeginWithKnown(token_ids, cancelled, sequence.get()));
      }
      return PublishWith(std::move(sequence));
    };
    return WithinMemory([&]() -> absl::StatusOr<OpenResult> {
      // A sequence that begins with nothing needs no room.
      return token_ids.empty() ? open() : WithRoom(cancelled, open);
    });
  }

  absl::Status DropSealed(absl::string_view tenant, uint64_t sealed_id) override {
    return WithinMemory([&]() -> absl::Status {
      ATTND_ASSIGN_OR_RETURN(Archive* const archive, GetArchive());
      return archive->Drop(tenant, sealed_id);
    });
  }

  absl::StatusOr<std::vector<SealedInfo>> ListSealed(absl::string_view tenant, uint64_t after,
                                                     uint32_t count) override {
    return WithinMemory([&]() -> absl::StatusOr<std::vector<SealedInfo>> {
      ATTND_ASSIGN_OR_RETURN(Archive* const archive, GetArchive());
      return archive->List(tenant, after, count);
    });
  }

  ArchiveStats archive_stats() const override {
    ArchiveStats stats = archive_ != nullptr ? archive_->stats() : ArchiveStats{};
    stats.reused_tokens = reused_tokens_.load(std::memory_order_relaxed);
    return stats;
  }

  void ReleaseWriter(WriterId writer) override { sequences_.ReleaseWriter(writer); }

  Usage usage() const override { return {budget_.used(), budget_.capacity(), sequences_.size()}; }

  void WaitForBackground() override {
    segmenter_.WaitUntilIdle();
    if (auditor_ != nullptr) auditor_->WaitUntilIdle();
  }

  void StopOpening() override { sequences_.StopOpening(); }

  // Shutdown: 1. no new sequences, 2. no segments are built, 3. no rows are audited, 4. no segments
  // are moved to disk.
  void Shutdown() override {
    EngineImpl::StopOpening();
    segmenter_.Shutdown();
    if (auditor_ != nullptr) auditor_->Shutdown();
    if (pager_ != nullptr) pager_->Shutdown();
  }

  bool MayReadDisk(absl::string_view tenant, uint64_t sequence_id) override {
    if (archive_ == nullptr) return false;
    const auto sequence = sequences_.Find(tenant, sequence_id);
    return sequence.ok() && (*sequence)->has_paged_segments();
  }
  bool MayMakeRoom() const override { return archive_ != nullptr; }

 private:
  static constexpr uint32_t kShardsMax = 4096;
  static constexpr attention::IndexSet kClusters = attention::kClusterIndexes;

  // Refuses or appends each row; adds to `grown` the sequences that have newly committed tokens.
  void PrepareRows(absl::string_view tenant, WriterId writer, const DecodeArgs& args,
                   DecodeBatch* batch, std::vector<std::shared_ptr<Sequence>>* grown,
                   DecodeResult* result) {
    std::unordered_set<uint64_t> seen;
    for (size_t i = 0; i < batch->rows(); ++i) {
      const DecodeRow& row = args.rows[i];
      if (!row.precheck.ok()) {
        batch->Refuse(i, row.precheck);
        continue;
      }
      if (!seen.insert(row.sequence_id).second) {
        batch->Refuse(i, absl::InvalidArgumentError(absl::StrCat("sequence_id ", row.sequence_id,
                                                                 " stands in an earlier row")));
        continue;
      }
      auto sequence = row.query_only ? sequences_.Find(tenant, row.sequence_id)
                                     : sequences_.FindToWrite(tenant, row.sequence_id, writer);
      if (!sequence.ok()) {
        batch->Refuse(i, std::move(sequence).status());
        continue;
      }
      const uint64_t appended = batch->Prepare(i, writer, *backend_, *sequence);
      if (!result->rows[i].status.ok() || row.query_only) continue;
      if (args.layer == 0) ReportAppended(appended, /*prefill=*/false);
      // A position is committed with its last layer.
      if (args.layer + 1 == (*sequence)->shape().layers) grown->push_back(*std::move(sequence));
    }
  }

  static absl::Status StatusOf(const absl::Status& status) { return status; }
  template <typename T>
  static absl::Status StatusOf(const absl::StatusOr<T>& result) {
    return result.status();
  }

  // Whether so many eighths of the budget are in use, not counting what can be had back at once.
  bool InUse(uint64_t eighths) const {
    const uint64_t used = budget_.used();
    return used - std::min(used, archive_->ReclaimableBytes()) > budget_.capacity() / 8 * eighths;
  }
  // A prompt that could outgrow memory does not wait for its end to become segments...
  static constexpr uint64_t kEarlySegments = 4;
  // ... and waits for them when it would take the room that building them needs.
  static constexpr uint64_t kSegmentsFirst = 6;

  // Repeats `call` while it finds no room in the budget and segments can be moved to disk.
  template <typename F>
  auto WithRoom(const std::atomic<bool>* cancelled, const F& call) -> decltype(call()) {
    const auto until = std::chrono::steady_clock::now() + kRoomWait;
    // Rounds of the pager that moved nothing: room may have come meanwhile, made by other rounds or
    // by the call itself.
    constexpr int kFruitlessMax = 3;
    for (int fruitless = 0;;) {
      auto result = call();
      if (archive_ == nullptr || !absl::IsResourceExhausted(StatusOf(result))) return result;
      const bool gone = cancelled != nullptr && cancelled->load(std::memory_order_relaxed);
      const bool late = std::chrono::steady_clock::now() > until;
      if (fruitless == kFruitlessMax || gone || late) return result;
      fruitless = pager_->MakeRoom(until, cancelled) ? 0 : fruitless + 1;
    }
  }

  // Repeats `call` until none of the segments that it needs whole is paged.
  template <typename Needed, typename F>
  auto WithWhole(Sequence* sequence, const std::atomic<bool>* cancelled, const Needed& needed,
                 const F& call) -> decltype(call()) {
    constexpr int kTries = 4;
    for (int tries = 1;; ++tries) {
      if (const auto paged = needed(); !paged.empty()) {
        const auto swaps = WithRoom(
            cancelled, [&] { return archive_->BringWhole(paged, UnlessCancelled(cancelled)); });
        ATTND_RETURN_IF_ERROR(swaps.status());
        sequence->SwapSegments(*swaps);
      }
      auto result = call();
      if (!absl::IsAborted(StatusOf(result)) || tries == kTries) return result;
    }
  }

  absl::StatusOr<uint64_t> AppendWithRoom(WriterId writer, const NewTokens& tokens,
                                          const AppendChunk& chunk,
                                          const std::shared_ptr<Sequence>& sequence) {
    const auto paged = [&] {
      return sequence->PagedWithin(tokens.first_position, tokens.first_position + tokens.tokens);
    };
    if (archive_ != nullptr && !chunk.may_wait && !paged().empty()) {
      return absl::ResourceExhaustedError("the chunk repeats tokens that lie on disk");
    }
    const auto append = [&] {
      return WithWhole(sequence.get(), chunk.cancelled, paged,
                       [&] { return sequence->Append(writer, tokens); });
    };
    const uint64_t most = options_.max_sequence_tokens;
    const bool fits = tokens.tokens <= most && tokens.first_position <= most - tokens.tokens;
    if (archive_ == nullptr || !fits) return append();
    const bool segments_first =
        InUse(kSegmentsFirst) && sequence->HasSegment(options_.segment_tokens);
    if (!chunk.may_wait && segments_first) {
      return absl::ResourceExhaustedError(
          "the memory budget has no room before the sequence's tokens are segments");
    }
    if (!chunk.may_wait) return append();
    return WithRoom(chunk.cancelled, [&]() -> absl::StatusOr<uint64_t> {
      if (InUse(kSegmentsFirst)) {
        // Building comes first: what the chunk took would be missing for it.
        const absl::Status built = segmenter_.SegmentWholeRuns(sequence.get(), chunk.cancelled);
        if (absl::IsResourceExhausted(built)) return built;
      }
      return append();
    });
  }

  // Of rows whose sequences are paged, begins to read what the next layer wanted last; whether
  // there are any.
  bool PrefetchNextLayer(uint32_t layer, std::span<const attention::StepRow> rows) const {
    bool any = false;
    for (const attention::StepRow& row : rows) {
      for (const auto& segment : row.view->segments) {
        if (!segment->paged()) continue;
        any = true;
        if (!options_.archive.prefetch) continue;
        FilePayloadOf(*segment).Prefetch((layer + 1) % row.view->shape.layers);
      }
    }
    return any;
  }

  void PutAwayDamaged(const DecodeBatch& batch, const DecodeResult& result) {
    const bool any =
        std::any_of(result.rows.begin(), result.rows.end(),
                    [](const DecodeRowResult& row) { return absl::IsDataLoss(row.status); });
    if (!any || archive_ == nullptr) return;
    for (const attention::StepRow& row : batch.step_rows()) archive_->PutAwayDamaged(*row.view);
  }

  void OfferToAudit(uint32_t layer, const DecodeBatch& batch) {
    const std::span<const attention::StepRow> rows = batch.step_rows();
    for (size_t i = 0; i < rows.size(); ++i) {
      auditor_->Offer(batch.sequence_id(i), layer, rows[i]);
    }
  }

  absl::StatusOr<Archive*> GetArchive() {
    if (archive_ != nullptr) return archive_.get();
    return absl::FailedPreconditionError(
        "the server keeps no sequences on disk: it was started without a data folder");
  }
  static storage::Proceed UnlessCancelled(const std::atomic<bool>* cancelled) {
    return [cancelled] {
      const bool stop = cancelled != nullptr && cancelled->load(std::memory_order_relaxed);
      return stop ? absl::CancelledError("the caller has gone") : absl::OkStatus();
    };
  }
  // What was sealed can only go on as it was.
  static absl::Status CheckResumes(const OpenArgs& wanted, const OpenArgs& sealed) {
    if (wanted.fingerprint != sealed.fingerprint || wanted.shape != sealed.shape ||
        wanted.shard != sealed.shard) {
      return absl::FailedPreconditionError(
          "model is not the one that the sealed sequence was made with");
    }
    if (wanted.indexes != sealed.indexes) {
      return absl::FailedPreconditionError(
          absl::StrCat("indexes are ", wanted.indexes->ToString(), "; the sealed sequence has ",
                       sealed.indexes->ToString(), ": leave them out, or ask for these"));
    }
    if (!wanted.model_parts.CanReadSegmentsOf(sealed.model_parts)) {
      return absl::FailedPreconditionError(
          "the sealed sequence's summaries were made with other feature maps than the server's");
    }
    const attention::Policy& policy = wanted.policy.value();
    if (policy.sink == sealed.policy->sink && policy.window <= sealed.policy->window) {
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError(
        absl::StrCat("policy has sink ", policy.sink, " and window ", policy.window,
                     "; the sealed sequence allows sink ", sealed.policy->sink,
                     " and windows up to ", sealed.policy->window));
  }

  absl::StatusOr<OpenResult> PublishWith(std::shared_ptr<Sequence> sequence) {
    const OpenResult result = {sequence->id(), sequence->Info().committed_tokens,
                               sequence->args().backend->name()};
    ATTND_RETURN_IF_ERROR(sequences_.Publish(std::move(sequence)));
    return result;
  }

  // Gives a new sequence the longest prefix of these tokens that another one has or that lies on
  // disk, and that leaves its window free.
  absl::Status BeginWithKnown(std::span<const uint32_t> token_ids,
                              const std::atomic<bool>* cancelled, Sequence* fresh) {
    const uint64_t window = std::min<uint64_t>(fresh->policy().window, token_ids.size());
    const auto reusable = token_ids.first(token_ids.size() - window);
    RestoredSegments longest;
    const storage::Proceed proceed = UnlessCancelled(cancelled);
    for (const auto& other : sequences_.List(fresh->tenant(), 0, options_.max_sequences)) {
      ATTND_RETURN_IF_ERROR(proceed());
      RestoredSegments prefix = other->PrefixFor(*fresh, reusable, longest);
      if (prefix.tokens() > 0) longest = std::move(prefix);
    }
    const auto shared = reusable.first(longest.tokens());
    longest.token_ids = {{0, {shared.begin(), shared.end()}}};
    if (archive_ != nullptr) {
      auto stored = archive_->FindPrefix(reusable, *fresh, longest.tokens(), proceed);
      // What is in memory needs no disk.
      if (longest.tokens() == 0) ATTND_RETURN_IF_ERROR(stored.status());
      if (stored.ok() && stored->tokens() > 0) longest = *std::move(stored);
    }
    const uint64_t tokens = longest.tokens();
    if (tokens == 0) return absl::OkStatus();
    ATTND_RETURN_IF_ERROR(fresh->Restore(std::move(longest)));
    reused_tokens_.fetch_add(tokens, std::memory_order_relaxed);
    return absl::OkStatus();
  }

  // A sequence as a caller asks for it, that nobody can find yet.
  absl::StatusOr<std::shared_ptr<Sequence>> MakeNew(absl::string_view tenant,
                                                    const OpenArgs& args) {
    ATTND_RETURN_IF_ERROR(args.shape.Validate());
    if (args.shard.count == 0 || args.shard.count > kShardsMax ||
        args.shard.index >= args.shard.count) {
      return absl::InvalidArgumentError(absl::StrCat(
          "model.shard is ", args.shard.index, " of ", args.shard.count, "; allowed are up to ",
          kShardsMax, " shards and an index below their number"));
    }
    OpenArgs complete = args;
    if (!complete.policy.has_value()) complete.policy = options_.default_policy;
    const attention::Backend& owner =
        backend_->OwnerOf({.policy = *complete.policy,
                           .shape = &complete.shape,
                           .indexes = complete.indexes.has_value() ? &*complete.indexes : nullptr});
    complete.backend = &owner;
    ATTND_RETURN_IF_ERROR(owner.Supports(complete.shape));
    ATTND_RETURN_IF_ERROR(owner.Supports(*complete.policy));
    if (!complete.indexes.has_value()) {
      complete.indexes = IndexesFor(complete);
    }
    ATTND_RETURN_IF_ERROR(complete.indexes->Validate());
    ATTND_RETURN_IF_ERROR(owner.Supports(*complete.indexes));
    ATTND_RETURN_IF_ERROR(complete.policy->CheckIndexes(*complete.indexes));
    ATTND_RETURN_IF_ERROR(complete.policy->CheckShape(complete.shape));
    ATTND_RETURN_IF_ERROR(SetFeatureMaps(&complete));
    ATTND_RETURN_IF_ERROR(SetLabelChannels(&complete));
    return Make(tenant, std::move(complete));
  }

  // What a policy asks for of one backend, as IndexesOf says.
  static attention::IndexSet IndexesOn(const attention::Backend& backend,
                                       const attention::Policy& policy) {
    const attention::IndexSet needed = policy.Indexes();
    return needed.clustered() && !backend.Supports(needed).ok() ? kClusters : needed;
  }

  // What a sequence is opened with if nothing was said. Of a latent shape no regression: the axes
  // of its long keys would take more memory than the clusters do.
  attention::IndexSet IndexesFor(const OpenArgs& args) const {
    const attention::IndexSet asked = IndexesOn(*args.backend, *args.policy);
    if (args.cluster_order && !asked.clustered()) return kClusters;
    if (args.shape.latent && asked.Has(attention::IndexKind::kRegression)) return kClusters;
    return asked.empty() && args.policy->CheckIndexes(kClusters).ok() ? kClusters : asked;
  }

  // Those of the model, if its indexes need any.
  absl::Status SetFeatureMaps(OpenArgs* args) const {
    attention::ModelParts& parts = args->model_parts;
    parts.feature_maps = nullptr;
    parts.feature_maps_id.clear();
    if (!args->indexes.has_value() || !args->indexes->Needs(attention::ModelPart::kFeatureMaps)) {
      return absl::OkStatus();
    }
    ATTND_ASSIGN_OR_RETURN(parts.feature_maps, feature_maps_.Of(args->fingerprint));
    parts.feature_maps_id = parts.feature_maps->identity();
    return parts.feature_maps->CheckShape(args->shape);
  }

  // Those of the model, if its indexes have labels and there is a file.
  absl::Status SetLabelChannels(OpenArgs* args) const {
    attention::ModelParts& parts = args->model_parts;
    parts.label_channels = nullptr;
    parts.label_channels_id.clear();
    if (!args->indexes.has_value() || !args->indexes->Needs(attention::ModelPart::kLabelChannels)) {
      return absl::OkStatus();
    }
    const auto model = label_channels_.Of(args->fingerprint);
    if (model == nullptr) return absl::OkStatus();
    parts.label_channels = model->choice;
    parts.label_channels_id = model->identity;
    return model->CheckShape(args->shape);
  }

  // A sequence that nobody can find yet.
  absl::StatusOr<std::shared_ptr<Sequence>> Make(absl::string_view tenant, OpenArgs args) {
    ATTND_ASSIGN_OR_RETURN(const uint64_t id, sequences_.NewId());
    return Sequence::Create(id, tenant, std::move(args), options_.max_sequence_tokens, &budget_);
  }

  void ReportAppended(uint64_t tokens, bool prefill) {
    if (observer_ != nullptr && tokens > 0) observer_->OnAppended(tokens, prefill);
  }

  // Constant.
  const EngineOptions options_;
  const std::unique_ptr<attention::Backend> backend_;
  Observer* const observer_;

  FeatureMapStore feature_maps_;      // set by Start
  LabelChannelStore label_channels_;  // set by Start

  // Thread-safe by themselves.
  MemoryBudget budget_;
  StepGate gate_;
  SequenceTable sequences_;
  std::unique_ptr<Archive> archive_;  // set by Start; null without a data folder
  std::unique_ptr<Pager> pager_;      // as archive_
  std::unique_ptr<Auditor> auditor_;  // set by Start; null where nothing is audited
  std::atomic<uint64_t> reused_tokens_{0};

  Segmenter segmenter_;  // last: its thread uses everything above
};

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options,
                                                       std::unique_ptr<attention::Backend> backend,
                                                       Observer* observer) {
  ATTND_RETURN_IF_ERROR(options.Validate());
  ATTND_RETURN_IF_ERROR(backend->Supports(options.default_policy));
  return WithinMemory([&]() -> absl::StatusOr<std::unique_ptr<Engine>> {
    auto engine = std::make_unique<EngineImpl>(options, std::move(backend), observer);
    ATTND_RETURN_IF_ERROR(engine->Start());
    return std::unique_ptr<Engine>(std::move(engine));
  });
}

}  // namespace attnd::engine
