// SPDX-License-Identifier: Apache-2.0
#include "gpu/prepared_step.h"

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/dtype.h"
#include "common/status.h"

namespace attnd::gpu {
namespace {

using attention::StepRequest;
using attention::StepRow;

// Whether all that a row's part of the input follows from is the same. A view's address names it:
// views do not change, and the prepared step holds its own.
bool AreSame(const StepRow& a, const StepRow& b) {
  return a.view == b.view && a.policy == b.policy && a.past_tokens == b.past_tokens &&
         a.query_tokens == b.query_tokens && a.query_only == b.query_only &&
         a.want_kv_head_errors == b.want_kv_head_errors && a.query_dtype == b.query_dtype &&
         a.final_out.dtype == b.final_out.dtype;
}

// Of a row's final_out.
uint64_t OutBytes(const StepRow& row) {
  const ModelShape& shape = row.view->shape;
  return uint64_t{row.query_tokens} * shape.query_heads * shape.value_dim *
         DTypeBytes(row.final_out.dtype);
}

StepRequest Expected(uint32_t layer, std::span<const StepRow> rows) {
  StepRequest request;
  request.layer = layer;
  request.rows = rows;
  return request;
}

}  // namespace

PreparedDeviceStep::PreparedDeviceStep(const StepRequest& expected, DeviceCopyStore* store,
                                       LeasePool<StreamContext>::Lease context,
                                       bool cooperative_groups)
    : rows_(expected.rows.begin(), expected.rows.end()),
      request_(Expected(expected.layer, rows_)),
      context_(std::move(context)) {
  step_.emplace(request_, store, context_->get(), cooperative_groups, /*timed=*/false);
}

absl::StatusOr<bool> PreparedDeviceStep::Prepare(const attention::ClientTurn* turn) {
  ATTND_ASSIGN_OR_RETURN(const bool prepared, step_->Prepare(turn));
  takes_turn_ = step_->takes_turn();
  if (takes_turn_) client_out_ = turn->out;
  return prepared;
}

bool PreparedDeviceStep::HasBegunWith(std::span<const attention::RowTokens> rows) {
  if (!step_.has_value() || !step_->HasBegunWith(rows)) return false;
  for (size_t row = 0; row < rows_.size(); ++row) rows_[row].queries = rows[row].queries;
  return true;
}

void PreparedDeviceStep::GiveUp() {
  step_.reset();
  context_.reset();
}

bool PreparedDeviceStep::IsFor(const StepRequest& request) const {
  if (!step_.has_value() || request.layer != request_.layer ||
      request.rows.size() != rows_.size() || request.plans != nullptr) {
    return false;
  }
  const std::byte* out = client_out_;
  for (size_t row = 0; row < rows_.size(); ++row) {
    if (!AreSame(request.rows[row], rows_[row])) return false;
    // Of the same message as k and v.
    if (takes_turn_ && request.rows[row].queries != rows_[row].queries) return false;
    if (out == nullptr) continue;
    if (request.rows[row].final_out.to != out) return false;  // the device writes there
    out += OutBytes(request.rows[row]);
  }
  return !takes_turn_ || step_->has_begun();
}

absl::Status PreparedDeviceStep::Run(const StepRequest& request) {
  rows_.assign(request.rows.begin(), request.rows.end());
  request_ = request;
  request_.rows = rows_;
  return step_->RunPrepared();
}

}  // namespace attnd::gpu
