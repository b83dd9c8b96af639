// SPDX-License-Identifier: Apache-2.0
//
// EngineImpl: prefills: appending tokens, observing the prompt's last queries, finishing.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "engine/engine_impl.h"
#include "engine/sequence/latent_values.h"
#include "engine/sequence/magnitude.h"
#include "engine/sequence/prompt_observer.h"
#include "engine/sequence/token_parts.h"

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

}  // namespace

absl::Status EngineImpl::Append(absl::string_view tenant, WriterId writer, uint64_t sequence_id,
                                const AppendChunk& chunk) {
  absl::Status status =
      WithinMemory([&] { return AppendChecked(tenant, writer, sequence_id, chunk); });
  // Whatever was wrong with it, it was not what its client had sent.
  if (!status.ok() && chunk.kept != nullptr && !(*chunk.kept)()) return NotKept();
  return status;
}

absl::Status EngineImpl::AppendChecked(absl::string_view tenant, WriterId writer,
                                       uint64_t sequence_id, const AppendChunk& chunk) {
  ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.FindToWrite(tenant, sequence_id, writer));
  const ModelShape& shape = sequence->shape();
  if (chunk.layer >= shape.layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer is ", chunk.layer, "; the sequence has layers 0..", shape.layers - 1));
  }
  if (chunk.tokens == 0) return absl::InvalidArgumentError("k has no tokens; at least 1 is needed");
  if (!chunk.token_ids.empty() && chunk.token_ids.size() != chunk.tokens) {
    return absl::InvalidArgumentError(absl::StrCat("token_ids has ", chunk.token_ids.size(),
                                                   " entries; allowed are none or ", chunk.tokens));
  }
  ATTND_RETURN_IF_ERROR(
      CheckChunkTensor("k", chunk.k, shape.dtype, chunk.tokens, shape.kv_heads, shape.head_dim));
  ATTND_RETURN_IF_ERROR(CheckValuesSent(chunk.v.elements != 0, shape));
  if (!shape.latent) {
    ATTND_RETURN_IF_ERROR(
        CheckChunkTensor("v", chunk.v, shape.dtype, chunk.tokens, shape.kv_heads, shape.value_dim));
  }
  NewTokens tokens;
  tokens.layer = chunk.layer;
  tokens.first_position = chunk.first_position;
  tokens.tokens = chunk.tokens;
  tokens.keys = chunk.k.data;
  tokens.values = chunk.v.data;
  tokens.token_ids = chunk.token_ids;
  tokens.kept = chunk.kept;
  const auto appended = AppendWithRoom(writer, tokens, chunk, sequence.shared);
  if (absl::IsResourceExhausted(appended.status())) {
    // Nobody shall make room for tokens that would be refused then.
    ATTND_RETURN_IF_ERROR(CheckTokens(shape, tokens));
  }
  ATTND_RETURN_IF_ERROR(appended.status());
  if (chunk.layer == 0) ReportAppended(*appended, /*prefill=*/true);
  segmenter_.OnUploaded(sequence.shared, chunk.prompt_tokens);
  const bool committed = chunk.layer + 1 == shape.layers;
  if (archive_ != nullptr && committed && InUse(kSegmentsMeanwhile)) {
    segmenter_.OnGrown(sequence.shared);
  }
  return absl::OkStatus();
}

// A pool that has no thread free would keep its caller waiting, with the sequence's lock: while an
// upload has it, others are written by the threads that they came on.
absl::StatusOr<uint64_t> EngineImpl::AppendWithWorkers(WriterId writer, const NewTokens& tokens,
                                                       Sequence* sequence) {
  const bool many = tokens.tokens > TokenParts::PartTokens(sequence->shape());
  if (!many || append_workers_busy_.exchange(true)) return sequence->Append(writer, tokens);
  const absl::Cleanup free = [this] { append_workers_busy_.store(false); };
  return sequence->Append(writer, tokens, &append_workers_);
}

absl::StatusOr<uint64_t> EngineImpl::AppendWithRoom(WriterId writer, const NewTokens& tokens,
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
                     [&] { return AppendWithWorkers(writer, tokens, sequence.get()); });
  };
  const uint64_t most = options_.max_sequence_tokens;
  const bool fits = tokens.tokens <= most && tokens.first_position <= most - tokens.tokens;
  if (!fits) return append();
  if (archive_ == nullptr) return WithoutCopies(append);
  const bool segments_first =
      InUse(kSegmentsFirst) && sequence->HasSegment(options_.segment_tokens);
  if (!chunk.may_wait && segments_first) {
    return absl::ResourceExhaustedError(
        "the memory budget has no room before the sequence's tokens are segments");
  }
  if (!chunk.may_wait) return WithoutCopies(append);
  return WithRoom(chunk.cancelled, [&]() -> absl::StatusOr<uint64_t> {
    if (InUse(kSegmentsFirst)) {
      // Building comes first: what the chunk took would be missing for it.
      const absl::Status built = segmenter_.SegmentWholeRuns(sequence.get(), chunk.cancelled);
      if (absl::IsResourceExhausted(built)) return built;
    }
    return append();
  });
}

absl::Status EngineImpl::Observe(absl::string_view tenant, WriterId writer, uint64_t sequence_id,
                                 const ObservedChunk& chunk) {
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

absl::StatusOr<PrefillResult> EngineImpl::FinishPrefill(absl::string_view tenant, WriterId writer,
                                                        uint64_t sequence_id,
                                                        const std::atomic<bool>* cancelled) {
  return WithinMemory([&]() -> absl::StatusOr<PrefillResult> {
    ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.Find(tenant, sequence_id));
    ATTND_RETURN_IF_ERROR(sequence->CompletePrefill(writer));
    const auto start = std::chrono::steady_clock::now();
    ATTND_RETURN_IF_ERROR(
        WithRoom(cancelled, [&] { return segmenter_.SegmentPrefill(sequence.get(), cancelled); }));
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

}  // namespace attnd::engine
