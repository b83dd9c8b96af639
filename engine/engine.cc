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
#include "engine/decode_batch.h"
#include "engine/magnitude.h"
#include "engine/memory_budget.h"
#include "engine/segmenter.h"
#include "engine/sequence.h"
#include "engine/sequence_table.h"

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
  ~EngineImpl() override { segmenter_.Shutdown(); }

  // Before anything else. ResourceExhausted if the system refuses the background thread.
  absl::Status Start() { return segmenter_.Start(); }

  const EngineOptions& options() const override { return options_; }
  const attention::Backend& backend() const override { return *backend_; }

  absl::StatusOr<uint64_t> Open(absl::string_view tenant, const OpenArgs& args) override {
    return WithinMemory([&]() -> absl::StatusOr<uint64_t> {
      ATTND_RETURN_IF_ERROR(args.shape.Validate());
      if (args.shard.count == 0 || args.shard.count > kShardsMax ||
          args.shard.index >= args.shard.count) {
        return absl::InvalidArgumentError(absl::StrCat(
            "model.shard is ", args.shard.index, " of ", args.shard.count, "; allowed are up to ",
            kShardsMax, " shards and an index below their number"));
      }
      ATTND_RETURN_IF_ERROR(backend_->Supports(args.shape));
      OpenArgs complete = args;
      if (!complete.policy.has_value()) complete.policy = options_.default_policy;
      ATTND_RETURN_IF_ERROR(backend_->Supports(*complete.policy));
      ATTND_ASSIGN_OR_RETURN(auto sequence, Make(tenant, std::move(complete)));
      ATTND_RETURN_IF_ERROR(sequences_.Publish(sequence));
      return sequence->id();
    });
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
      ATTND_RETURN_IF_ERROR(CheckChunkTensor("v", chunk.v, shape.dtype, chunk.tokens,
                                             shape.kv_heads, shape.value_dim));
      std::vector<float> key_magnitudes;
      BlockMagnitudes(shape.dtype, chunk.k.data, chunk.first_position, chunk.tokens,
                      uint64_t{shape.kv_heads} * shape.head_dim, &key_magnitudes);
      for (const float magnitude : key_magnitudes) {
        ATTND_RETURN_IF_ERROR(CheckFinite("k", magnitude));
      }
      const float value_magnitude = Magnitude(shape.dtype, chunk.v.data, chunk.v.elements);
      ATTND_RETURN_IF_ERROR(CheckFinite("v", value_magnitude));
      ATTND_RETURN_IF_ERROR(CheckValueMagnitude(value_magnitude));
      NewTokens tokens;
      tokens.layer = chunk.layer;
      tokens.first_position = chunk.first_position;
      tokens.tokens = chunk.tokens;
      tokens.keys = chunk.k.data;
      tokens.values = chunk.v.data;
      tokens.token_ids = chunk.token_ids;
      tokens.key_magnitudes = key_magnitudes;
      ATTND_ASSIGN_OR_RETURN(const uint64_t appended, sequence->Append(writer, tokens));
      if (chunk.layer == 0) ReportAppended(appended, /*prefill=*/true);
      return absl::OkStatus();
    });
  }

  absl::StatusOr<PrefillResult> FinishPrefill(absl::string_view tenant, WriterId writer,
                                              uint64_t sequence_id,
                                              const std::atomic<bool>* cancelled) override {
    return WithinMemory([&]() -> absl::StatusOr<PrefillResult> {
      ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.Find(tenant, sequence_id));
      ATTND_RETURN_IF_ERROR(sequence->CompletePrefill(writer));
      const auto start = std::chrono::steady_clock::now();
      ATTND_RETURN_IF_ERROR(segmenter_.SegmentPrefill(sequence.get(), cancelled));
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
      const StepGate::Step step(&gate_);
      PrepareRows(tenant, writer, args, &batch, &grown, result);
      result->validate_time = std::chrono::steady_clock::now() - start;
      return batch.Run(backend_.get());
    });
    for (const auto& sequence : grown) segmenter_.OnGrown(sequence);
    return status;
  }

  absl::StatusOr<uint64_t> Truncate(absl::string_view tenant, uint64_t sequence_id,
                                    uint64_t length) override {
    return WithinMemory([&]() -> absl::StatusOr<uint64_t> {
      ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.Find(tenant, sequence_id));
      return sequence->Truncate(length);
    });
  }

  absl::StatusOr<SequenceInfo> Fork(absl::string_view tenant, uint64_t sequence_id,
                                    std::optional<uint64_t> length) override {
    return WithinMemory([&]() -> absl::StatusOr<SequenceInfo> {
      ATTND_ASSIGN_OR_RETURN(auto parent, sequences_.Find(tenant, sequence_id));
      ATTND_ASSIGN_OR_RETURN(auto child, Make(tenant, parent->Info().args));
      ATTND_RETURN_IF_ERROR(parent->ForkInto(length, child.get()));
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

  void ReleaseWriter(WriterId writer) override { sequences_.ReleaseWriter(writer); }

  Usage usage() const override { return {budget_.used(), budget_.capacity(), sequences_.size()}; }

  void WaitForBackground() override { segmenter_.WaitUntilIdle(); }

  void StopOpening() override { sequences_.StopOpening(); }

  void Shutdown() override {
    StopOpening();
    segmenter_.Shutdown();
  }

 private:
  static constexpr uint32_t kShardsMax = 4096;

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

  // Thread-safe by themselves.
  MemoryBudget budget_;
  StepGate gate_;
  SequenceTable sequences_;

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
