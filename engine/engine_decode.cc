// SPDX-License-Identifier: Apache-2.0
//
// EngineImpl: one step.
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/archive/paged_segments.h"
#include "engine/engine_impl.h"

namespace attnd::engine {

absl::Status EngineImpl::Decode(absl::string_view tenant, WriterId writer, const DecodeArgs& args,
                                AnswerMemory memory, DecodeResult* result) {
  *result = DecodeResult();
  DecodeBatch batch(args, &budget_, result);
  const auto prepare = [&](StepSequences* sequences) {
    PrepareRows(tenant, writer, args, &batch, sequences, result);
  };
  return RunStep(args, memory, &batch, prepare, result);
}

absl::Status EngineImpl::RunStep(const DecodeArgs& args, AnswerMemory memory, DecodeBatch* batch,
                                 absl::FunctionRef<void(StepSequences*)> prepare,
                                 DecodeResult* result, attention::PreparedStep* prepared) {
  const auto start = std::chrono::steady_clock::now();
  StepSequences sequences;
  absl::Status status = WithinMemory([&]() -> absl::Status {
    ATTND_RETURN_IF_ERROR(batch->Check(options_));
    // After Check: a message that nobody could answer is told so, however late it is.
    if (args.deadline.has_value() && start > *args.deadline) {
      return absl::DeadlineExceededError("the step's deadline passed before it began");
    }
    std::optional<StepGate::Step> step;
    step.emplace(&gate_);
    prepare(&sequences);
    result->validate_time = std::chrono::steady_clock::now() - start;
    // One that may wait for the disk does not hold builders up.
    if (PrefetchNextLayer(args.layer, batch->step_rows())) step.reset();
    const auto sequence_id = [&](size_t row) { return batch->sequence_id(row); };
    if (MayAudit(args.layer, batch->step_rows(), sequence_id)) batch->AnswerInFloats();
    ATTND_RETURN_IF_ERROR(batch->Run(backend_.get(), memory, prepared));
    PutAwayDamaged(*batch, *result);
    if (auditor_ != nullptr) OfferToAudit(args.layer, *batch);
    return absl::OkStatus();
  });
  for (const auto& sequence : sequences.grown) segmenter_.OnGrown(sequence);
  return status;
}

void EngineImpl::PrepareRows(absl::string_view tenant, WriterId writer, const DecodeArgs& args,
                             DecodeBatch* batch, StepSequences* sequences, DecodeResult* result) {
  for (size_t i = 0; i < batch->rows(); ++i) {
    if (absl::Status fault = batch->CheckAlone(i); !fault.ok()) {
      batch->Refuse(i, std::move(fault));
      continue;
    }
    const DecodeRow& row = args.rows[i];
    auto called = row.query_only ? sequences_.Find(tenant, row.sequence_id)
                                 : sequences_.FindToWrite(tenant, row.sequence_id, writer);
    if (!called.ok()) {
      batch->Refuse(i, std::move(called).status());
      continue;
    }
    const std::shared_ptr<Sequence>& sequence = called->shared;
    if (called->call.lease() > std::chrono::seconds(0)) {
      sequences->calls.push_back(std::move(called->call));
    }
    uint64_t appended = 0;
    const absl::Status prepared = WithoutCopies([&] {
      appended = batch->Prepare(i, writer, *backend_, sequence);
      return result->rows[i].status;
    });
    if (!prepared.ok() || row.query_only) continue;
    if (args.layer == 0) ReportAppended(appended, /*prefill=*/false);
    // A position is committed with its last layer.
    if (args.layer + 1 == sequence->shape().layers) sequences->grown.push_back(sequence);
  }
}

bool EngineImpl::PrefetchNextLayer(uint32_t layer, std::span<const attention::StepRow> rows) const {
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

void EngineImpl::PutAwayDamaged(const DecodeBatch& batch, const DecodeResult& result) {
  const bool any =
      std::any_of(result.rows.begin(), result.rows.end(),
                  [](const DecodeRowResult& row) { return absl::IsDataLoss(row.status); });
  if (!any || archive_ == nullptr) return;
  for (const attention::StepRow& row : batch.step_rows()) archive_->PutAwayDamaged(*row.view);
}

bool EngineImpl::MayAudit(uint32_t layer, std::span<const attention::StepRow> rows,
                          absl::FunctionRef<uint64_t(size_t)> sequence_id) const {
  if (auditor_ == nullptr) return false;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (auditor_->Picks(sequence_id(i), layer, rows[i])) return true;
  }
  return false;
}

void EngineImpl::OfferToAudit(uint32_t layer, const DecodeBatch& batch) {
  const std::span<const attention::StepRow> rows = batch.step_rows();
  for (size_t i = 0; i < rows.size(); ++i) {
    auditor_->Offer(batch.sequence_id(i), layer, rows[i]);
  }
}

}  // namespace attnd::engine
