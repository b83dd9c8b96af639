// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/decode_batch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/status.h"
#include "engine/sequence/latent_values.h"
#include "engine/sequence/magnitude.h"
#include "glog/logging.h"

namespace attnd::engine {
namespace {

[[maybe_unused]] bool AllNan(std::span<const float> floats) {
  return std::all_of(floats.begin(), floats.end(), [](float x) { return std::isnan(x); });
}

// Whether the tensors of both are of the same types and extents.
bool AreAlike(const DecodeArgs& a, const DecodeArgs& b) {
  const auto alike = [](const TensorView& x, const TensorView& y) {
    return x.dtype == y.dtype && x.elements == y.elements;
  };
  return alike(a.q, b.q) && alike(a.k, b.k) && alike(a.v, b.v) && a.q_heads == b.q_heads &&
         a.q_head_dim == b.q_head_dim && a.k_heads == b.k_heads && a.k_head_dim == b.k_head_dim &&
         a.v_heads == b.v_heads && a.v_value_dim == b.v_value_dim;
}

}  // namespace

absl::Status DecodeBatch::CheckRows(std::span<const DecodeRow> rows, const EngineOptions& options) {
  if (rows.empty() || rows.size() > options.max_rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows has ", rows.size(), " entries; allowed are 1..", options.max_rows));
  }
  uint64_t before = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint32_t tokens = rows[i].query_tokens;
    if (tokens == 0 || tokens > options.max_query_tokens - before) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rows[", i, "].query_tokens is ", tokens, "; allowed are 1..", options.max_query_tokens,
          " (max_query_tokens) in all rows together, ", before, " are in the rows before"));
    }
    before += tokens;
  }
  return absl::OkStatus();
}

absl::Status DecodeBatch::Check(const EngineOptions& options) {
  ATTND_RETURN_IF_ERROR(CheckRows(args_.rows, options));
  places_.reserve(rows());
  step_rows_.reserve(rows());
  step_row_numbers_.reserve(rows());
  sequences_.reserve(rows());
  for (const DecodeRow& row : args_.rows) {
    places_.push_back({query_tokens_, new_tokens_, 0});
    query_tokens_ += row.query_tokens;
    if (!row.query_only) new_tokens_ += row.query_tokens;
  }
  ATTND_RETURN_IF_ERROR(CheckTensor("q", args_.q, query_tokens_, args_.q_heads, args_.q_head_dim));
  ATTND_RETURN_IF_ERROR(CheckTensor("k", args_.k, new_tokens_, args_.k_heads, args_.k_head_dim));
  if (has_values()) {
    ATTND_RETURN_IF_ERROR(CheckTensor("v", args_.v, new_tokens_, args_.v_heads, args_.v_value_dim));
  }
  result_->rows.assign(args_.rows.size(), DecodeRowResult{});
  result_->value_dim = new_tokens_ > 0 ? args_.v_value_dim : 0;
  return absl::OkStatus();
}

absl::Status DecodeBatch::CheckTensor(const char* name, const TensorView& tensor, uint64_t tokens,
                                      uint64_t heads, uint64_t dim) const {
  if (tokens == 0) {
    if (tensor.elements == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is present, but every row is query_only"));
  }
  const auto expected = CheckedProduct({tokens, heads, dim});
  if (expected.has_value() && *expected != 0 && tensor.elements == *expected) {
    return absl::OkStatus();
  }
  const uint64_t token_elements = CheckedProduct({heads, dim}).value_or(0);
  const bool whole_tokens =
      tensor.elements != 0 && token_elements != 0 && tensor.elements % token_elements == 0;
  if (whole_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, ".shape[0] is ", tensor.elements / token_elements, "; the rows make it ", tokens));
  }
  return absl::InvalidArgumentError(absl::StrCat(name, " has ", tensor.elements,
                                                 " elements; the rows need shape [", tokens, ", ",
                                                 heads, ", ", dim, "]"));
}

absl::Status DecodeBatch::CheckAlone(size_t number) {
  CHECK_EQ(places_.size(), rows()) << "a message's rows are looked at before the message";
  const DecodeRow& row = args_.rows[number];
  ATTND_RETURN_IF_ERROR(CheckRowAlone(row));
  if (checked_.insert(row.sequence_id).second) return absl::OkStatus();
  return StandsTwice(row.sequence_id);
}

absl::Status DecodeBatch::CheckRowAlone(const DecodeRow& row) {
  if (!row.token_ids.empty() && row.token_ids.size() != row.query_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("token_ids has ", row.token_ids.size(),
                                                   " entries; allowed are none or query_tokens (",
                                                   row.query_tokens, ")"));
  }
  return row.precheck;
}

absl::Status DecodeBatch::StandsTwice(uint64_t sequence_id) {
  return absl::InvalidArgumentError(
      absl::StrCat("sequence_id ", sequence_id, " stands in an earlier row"));
}

uint64_t DecodeBatch::Prepare(size_t row, WriterId writer, const attention::Backend& backend,
                              const std::shared_ptr<Sequence>& sequence) {
  CHECK(declared_answer_ != nullptr || checked_.contains(args_.rows[row].sequence_id))
      << "CheckAlone did not let the row pass";
  absl::Status& status = result_->rows[row].status;
  status = CheckRow(row, backend, sequence.get());
  if (status.ok() && declared_answer_ == nullptr) status = ReserveAnswer(sequence->shape());
  if (!status.ok()) return 0;
  absl::StatusOr<Snapshot> snapshot = Take(row, writer, sequence.get());
  if (!snapshot.ok()) {
    status = std::move(snapshot).status();
    return 0;
  }
  const uint64_t new_tokens = snapshot->new_tokens;
  sequences_.push_back(sequence);
  AddStepRow(row, *sequence, *std::move(snapshot));
  return new_tokens;
}

absl::Status DecodeBatch::CheckRow(size_t number, const attention::Backend& backend,
                                   Sequence* sequence_of_row) {
  const Sequence& sequence = *sequence_of_row;
  const DecodeRow& row = args_.rows[number];
  const ModelShape& shape = sequence.shape();
  ATTND_RETURN_IF_ERROR(CheckSequence(row, shape));
  if (declared_answer_ == nullptr) {
    ATTND_RETURN_IF_ERROR(CheckPolicy(row, backend, sequence_of_row));
  }
  return CheckNumbers(number, shape);
}

absl::Status DecodeBatch::CheckSequence(const DecodeRow& row, const ModelShape& shape) const {
  if (args_.layer >= shape.layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer is ", args_.layer, "; the sequence has layers 0..", shape.layers - 1));
  }
  ATTND_RETURN_IF_ERROR(CheckShape(row, shape));
  // All rows of a reply share one tensor; without v the first row accepted says what it is like.
  if (result_->value_dim == 0 || result_->value_dim == shape.value_dim) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the sequence's value_dim is ", shape.value_dim,
                                                 "; the message's is ", result_->value_dim));
}

absl::Status DecodeBatch::CheckPolicy(const DecodeRow& row, const attention::Backend& backend,
                                      Sequence* sequence) {
  const attention::Policy& own = sequence->policy();
  if (!row.policy.has_value()) return sequence->CheckKeepSet(own);
  if (row.policy->window > own.window || row.policy->sink > own.sink) {
    return absl::InvalidArgumentError(absl::StrCat(
        "policy.parameters sink and window are ", row.policy->sink, " and ", row.policy->window,
        "; allowed are at most the sequence's, ", own.sink, " and ", own.window));
  }
  ATTND_RETURN_IF_ERROR(backend.Supports(*row.policy));
  ATTND_RETURN_IF_ERROR(row.policy->CheckShape(sequence->shape()));
  ATTND_RETURN_IF_ERROR(row.policy->CheckIndexes(sequence->indexes()));
  ATTND_RETURN_IF_ERROR(attention::CheckAnswers(backend, *row.policy, sequence->indexes()));
  return sequence->CheckKeepSet(*row.policy);
}

absl::Status DecodeBatch::CheckShape(const DecodeRow& row, const ModelShape& shape) const {
  if (args_.q_heads != shape.query_heads || args_.q_head_dim != shape.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat("q has shape [.., ", args_.q_heads, ", ",
                                                   args_.q_head_dim, "]; the sequence needs [.., ",
                                                   shape.query_heads, ", ", shape.head_dim, "]"));
  }
  if (row.query_only) return absl::OkStatus();
  if (args_.k_heads != shape.kv_heads || args_.k_head_dim != shape.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat("k has shape [.., ", args_.k_heads, ", ",
                                                   args_.k_head_dim, "]; the sequence needs [.., ",
                                                   shape.kv_heads, ", ", shape.head_dim, "]"));
  }
  if (args_.k.dtype != shape.dtype) {
    return absl::InvalidArgumentError(absl::StrCat(
        "k has dtype ", DTypeName(args_.k.dtype), "; the sequence needs ", DTypeName(shape.dtype)));
  }
  return CheckValuesShape(shape);
}

absl::Status DecodeBatch::CheckValuesShape(const ModelShape& shape) const {
  ATTND_RETURN_IF_ERROR(CheckValuesSent(has_values(), shape));
  if (shape.latent) return absl::OkStatus();
  if (args_.v_heads != shape.kv_heads || args_.v_value_dim != shape.value_dim) {
    return absl::InvalidArgumentError(absl::StrCat("v has shape [.., ", args_.v_heads, ", ",
                                                   args_.v_value_dim, "]; the sequence needs [.., ",
                                                   shape.kv_heads, ", ", shape.value_dim, "]"));
  }
  if (args_.v.dtype == shape.dtype) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("v has dtype ", DTypeName(args_.v.dtype),
                                                 "; the sequence needs ", DTypeName(shape.dtype)));
}

absl::Status DecodeBatch::CheckNumbers(size_t number, const ModelShape& shape) {
  const DecodeRow& row = args_.rows[number];
  Place& place = places_[number];
  const auto data = [](const TensorView& tensor, uint64_t first, uint64_t width) {
    return tensor.data + first * width * DTypeBytes(tensor.dtype);
  };
  const uint64_t q_width = args_.q_heads * args_.q_head_dim;
  place.query_magnitude = Magnitude(args_.q.dtype, data(args_.q, place.query_token, q_width),
                                    row.query_tokens * q_width);
  key_magnitudes_.clear();
  float value_magnitude = 0;
  if (!row.query_only) {
    const uint64_t k_width = args_.k_heads * args_.k_head_dim;
    BlockMagnitudes(args_.k.dtype, data(args_.k, place.new_token, k_width), row.position,
                    row.query_tokens, k_width, &key_magnitudes_);
    if (!shape.latent) {
      const uint64_t v_width = args_.v_heads * args_.v_value_dim;
      value_magnitude = Magnitude(args_.v.dtype, data(args_.v, place.new_token, v_width),
                                  row.query_tokens * v_width);
    }
  }
  const bool keys_finite = std::all_of(key_magnitudes_.begin(), key_magnitudes_.end(),
                                       [](float magnitude) { return std::isfinite(magnitude); });
  const char* bad = !std::isfinite(place.query_magnitude) ? "q"
                    : !keys_finite                        ? "k"
                    : !std::isfinite(value_magnitude)     ? "v"
                                                          : nullptr;
  if (bad != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(bad, " has a NaN or an infinity in this row; allowed are finite numbers"));
  }
  if (row.query_only || !shape.latent) return CheckValueMagnitude(value_magnitude);
  return CheckLatentValues(shape, data(args_.k, place.new_token, shape.head_dim), row.query_tokens);
}

absl::StatusOr<uint64_t> DecodeBatch::AnswerBytes(std::span<const DecodeRow> rows,
                                                  const ModelShape& shape) {
  uint64_t query_tokens = 0;  // within max_query_tokens
  for (const DecodeRow& row : rows) query_tokens += row.query_tokens;
  const uint64_t row_bytes = sizeof(Place) + sizeof(attention::StepRow) + sizeof(DecodeRowResult) +
                             sizeof(size_t) + sizeof(std::shared_ptr<Sequence>);
  const uint64_t lane_bytes = (uint64_t{shape.value_dim} + 1) * sizeof(float);
  const auto lanes_bytes = CheckedProduct({query_tokens, shape.query_heads, lane_bytes});
  if (!lanes_bytes.has_value()) {
    return absl::ResourceExhaustedError("the step's answer is larger than memory can be");
  }
  return rows.size() * row_bytes + *lanes_bytes;
}

absl::Status DecodeBatch::ReserveAnswer(const ModelShape& shape) {
  ATTND_ASSIGN_OR_RETURN(const uint64_t bytes, AnswerBytes(args_.rows, shape));
  if (bytes <= answer_.bytes()) return absl::OkStatus();
  return budget_->Resize(&answer_, bytes, "the step's answer");
}

absl::StatusOr<Snapshot> DecodeBatch::Take(size_t number, WriterId writer,
                                           Sequence* sequence) const {
  const DecodeRow& row = args_.rows[number];
  const Place& place = places_[number];
  if (row.query_only) return sequence->Read(args_.layer, row.position, place.query_magnitude);
  const ModelShape& shape = sequence->shape();
  const uint64_t first = place.new_token * shape.kv_heads;
  NewTokens tokens;
  tokens.layer = args_.layer;
  tokens.first_position = row.position;
  tokens.tokens = row.query_tokens;
  tokens.keys = args_.k.data + first * shape.head_dim * DTypeBytes(shape.dtype);
  if (!shape.latent) {
    tokens.values = args_.v.data + first * shape.value_dim * DTypeBytes(shape.dtype);
  }
  tokens.token_ids = row.token_ids;
  tokens.of_pass = declared_answer_ != nullptr;
  tokens.key_magnitudes = key_magnitudes_;
  return sequence->AppendAndRead(writer, tokens, place.query_magnitude);
}

attention::StepRow DecodeBatch::StepRowOf(const DecodeArgs& args, const DecodeRow& row,
                                          const Sequence& sequence,
                                          std::shared_ptr<const attention::SequenceView> view) {
  attention::StepRow step;
  step.view = std::move(view);
  step.policy = row.policy.has_value() ? &*row.policy : &sequence.policy();
  step.past_tokens = row.position;
  step.query_tokens = row.query_tokens;
  step.query_only = row.query_only;
  step.want_kv_head_errors = row.want_kv_head_errors;
  step.query_dtype = args.q.dtype;
  step.final_out.dtype = args.final_dtype;
  return step;
}

void DecodeBatch::AddStepRow(size_t number, const Sequence& sequence, Snapshot snapshot) {
  const DecodeRow& row = args_.rows[number];
  result_->value_dim = sequence.shape().value_dim;
  attention::StepRow step = StepRowOf(args_, row, sequence, std::move(snapshot.view));
  step.queries = args_.q.data + places_[number].query_token * args_.q_heads * args_.q_head_dim *
                                    DTypeBytes(args_.q.dtype);
  step.stats = &result_->rows[number].stats;
  step.fault = &result_->rows[number].status;
  step_rows_.push_back(std::move(step));
  step_row_numbers_.push_back(number);
}

absl::StatusOr<AnswerBuffers> DecodeBatch::TakeMemory(AnswerMemory memory) const {
  // The products do not overflow. Check has found the query tokens times the heads in q's elements;
  // a value_dim other than 0 is an accepted row's, and ReserveAnswer has multiplied it.
  const AnswerExtents extents = {query_tokens_, args_.q_heads, result_->value_dim};
  CHECK_LE(extents.lse_floats(), args_.q.elements);
  CHECK(step_rows_.empty() ||
        held_bytes() >= (extents.out_floats() + extents.lse_floats()) * sizeof(float))
      << "an answer that the memory budget does not hold";
  ATTND_ASSIGN_OR_RETURN(const AnswerBuffers buffers, memory(extents));
  CHECK_EQ(buffers.out.size(), extents.out_floats());
  CHECK_EQ(buffers.lse.size(), extents.lse_floats());
  const uint64_t final_bytes =
      args_.final_dtype == DType::kFp32 ? 0 : extents.out_floats() * DTypeBytes(args_.final_dtype);
  CHECK_EQ(buffers.final_out.size(), final_bytes);
  if (buffers.blank) {
    DCHECK(AllNan(buffers.out) && AllNan(buffers.lse)) << "an answer that was called blank";
    return buffers;
  }
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  std::fill(buffers.out.begin(), buffers.out.end(), kNan);
  std::fill(buffers.lse.begin(), buffers.lse.end(), kNan);
  return buffers;
}

absl::Status DecodeBatch::Run(attention::Backend* backend, AnswerMemory memory,
                              attention::PreparedStep* prepared) {
  // Extents that no accepted row has confirmed must not choose how much memory is taken.
  if (step_rows_.empty()) result_->value_dim = 0;
  ATTND_ASSIGN_OR_RETURN(const AnswerBuffers buffers, TakeMemory(memory));
  for (size_t i = 0; i < step_rows_.size(); ++i) {
    const size_t slot = places_[step_row_numbers_[i]].query_token * args_.q_heads;
    step_rows_[i].out = buffers.out.data() + slot * result_->value_dim;
    step_rows_[i].lse = buffers.lse.data() + slot;
    if (step_rows_[i].final_out.dtype == DType::kFp32) continue;
    step_rows_[i].final_out.to =
        buffers.final_out.data() + slot * result_->value_dim * DTypeBytes(args_.final_dtype);
    step_rows_[i].final_out.written = &result_->rows[step_row_numbers_[i]].out_is_final;
  }
  if (step_rows_.empty()) {
    // The backend is not asked; but it may have begun, and the rows' places are free from here on.
    if (prepared != nullptr) prepared->GiveUp();
    return absl::OkStatus();
  }
  attention::StepRequest request;
  request.layer = args_.layer;
  request.rows = step_rows_;
  request.deadline = args_.deadline;
  request.cancelled = args_.cancelled;
  request.prepared = prepared;
  ATTND_RETURN_IF_ERROR(backend->Step(request));
  ClearFaulty();
  RefuseOverflow();
  return absl::OkStatus();
}

void DecodeBatch::AnswerInFloats(std::span<attention::StepRow> rows) {
  for (attention::StepRow& row : rows) row.final_out = {};
}

DecodeBatch::ExpectedRows DecodeBatch::TakeExpectedRows() {
  ExpectedRows expected;
  expected.rows = std::move(step_rows_);
  expected.sequences = std::move(sequences_);
  expected.numbers = std::move(step_row_numbers_);
  expected.places = std::move(places_);
  expected.args = args_;
  expected.args.rows = {};
  for (attention::StepRow& row : expected.rows) {
    row.queries = nullptr;
    row.out = row.lse = nullptr;
    row.final_out = {.dtype = args_.final_dtype};  // this layer's may have been audited
    row.stats = nullptr;
    row.fault = nullptr;
  }
  return expected;
}

DecodeBatch::ExpectedRows DecodeBatch::Expect(
    std::span<const std::shared_ptr<Sequence>> sequences) {
  CHECK_EQ(sequences.size(), rows());
  CHECK_EQ(places_.size(), rows()) << "rows are expected of a message that has been checked";
  for (size_t i = 0; i < rows(); ++i) {
    if (sequences[i] == nullptr) continue;
    const DecodeRow& row = args_.rows[i];
    // The device plans by the sequence's shape what it reads of the tensors.
    if (!CheckSequence(row, sequences[i]->shape()).ok()) return {};
    const uint64_t end = row.position + (row.query_only ? 0 : row.query_tokens);
    auto view = sequences[i]->ExpectedView(args_.layer, row.position, end);
    if (view == nullptr) return {};
    result_->value_dim = sequences[i]->shape().value_dim;
    step_rows_.push_back(StepRowOf(args_, row, *sequences[i], std::move(view)));
    step_row_numbers_.push_back(i);
    sequences_.push_back(sequences[i]);
  }
  return TakeExpectedRows();
}

std::vector<attention::RowTokens> DecodeBatch::TokensOf(const ExpectedRows& expected,
                                                        const DecodeArgs& args) {
  if (!AreAlike(expected.args, args)) return {};
  const auto at = [](const TensorView& tensor, uint64_t token, uint64_t heads, uint64_t dim) {
    return tensor.data + token * heads * dim * DTypeBytes(tensor.dtype);
  };
  std::vector<attention::RowTokens> tokens(expected.rows.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Place& place = expected.places[expected.numbers[i]];
    tokens[i].queries = at(args.q, place.query_token, args.q_heads, args.q_head_dim);
    if (expected.rows[i].query_only) continue;
    tokens[i].keys = at(args.k, place.new_token, args.k_heads, args.k_head_dim);
    tokens[i].values = at(args.v, place.new_token, args.v_heads, args.v_value_dim);
  }
  return tokens;
}

// A row whose pages are lost has no answer.
void DecodeBatch::ClearFaulty() {
  for (size_t i = 0; i < step_rows_.size(); ++i) {
    if (!result_->rows[step_row_numbers_[i]].status.ok()) ClearAnswer(step_rows_[i]);
  }
}

void DecodeBatch::ClearAnswer(const attention::StepRow& row) {
  const size_t lanes = size_t{row.query_tokens} * args_.q_heads;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::fill_n(row.out, lanes * result_->value_dim, nan);
  std::fill_n(row.lse, lanes, nan);
  if (row.final_out.written != nullptr) *row.final_out.written = false;
  *row.stats = attention::RowStats();
}

// Bounds of q, k and v keep every sum within float32 (CheckLogits, kValueMax). Should one not be,
// the row has no answer rather than a wrong one.
void DecodeBatch::RefuseOverflow() {
  for (size_t i = 0; i < step_rows_.size(); ++i) {
    const attention::StepRow& row = step_rows_[i];
    if (!result_->rows[step_row_numbers_[i]].status.ok()) continue;
    const size_t lanes = size_t{row.query_tokens} * args_.q_heads;
    const auto* out = reinterpret_cast<const std::byte*>(row.out);
    const attention::RowStats& stats = *row.stats;
    const bool empty = stats.zone_tokens + stats.exact_tokens + stats.estimated_tokens == 0;
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const bool is_final = row.final_out.written != nullptr && *row.final_out.written;
    const bool finite = (is_final || AllFinite(DType::kFp32, out, lanes * result_->value_dim)) &&
                        std::all_of(row.lse, row.lse + lanes, [empty](float lse) {
                          return std::isfinite(lse) || (empty && lse == -kInfinity);
                        });
    if (finite) continue;
    ClearAnswer(row);
    Refuse(step_row_numbers_[i],
           absl::OutOfRangeError("sums of weighted v exceed the range of float32"));
  }
}

}  // namespace attnd::engine
