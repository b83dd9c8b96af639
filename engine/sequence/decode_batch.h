// SPDX-License-Identifier: Apache-2.0
//
// DecodeBatch: one Decode step: checks each row, appends its tokens, and hands the accepted rows to
// the backend.
#ifndef ATTND_ENGINE_SEQUENCE_DECODE_BATCH_H_
#define ATTND_ENGINE_SEQUENCE_DECODE_BATCH_H_

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "attention/backend.h"
#include "engine/answer_memory.h"
#include "engine/memory_budget.h"
#include "engine/options.h"
#include "engine/sequence/sequence.h"
#include "engine/types.h"

namespace attnd::engine {

// The one place where a step's message is checked: its limits, its rows, how its tensors divide
// among the rows, and each row against its sequence. Whoever fills DecodeArgs (the server's
// conversions, an embedder) need only ensure that tensors have as many bytes as they say.
//
// Used by one thread, once: Check; for each row CheckAlone, and Prepare if the row passes; then
// Run. The batch reserves the bytes of the answer and of its own lists from the budget until it
// ends; after that the answer's memory is the caller's concern, as the message's is.
//
// A step of a pass: what holds for all layers was checked and reserved when the pass was declared
// (CheckRows, CheckPolicy, AnswerBytes); Prepare checks the rest, and CheckAlone is not called.
class DecodeBatch {
 public:
  DecodeBatch(const DecodeArgs& args, MemoryBudget* budget, DecodeResult* result)
      : args_(args), budget_(budget), result_(result) {}
  // Of a pass, which holds its answers' bytes.
  DecodeBatch(const DecodeArgs& args, const Reservation& answer, DecodeResult* result)
      : args_(args), budget_(nullptr), result_(result), declared_answer_(&answer) {}

  // What a declaration and a message have to check alike.

  // InvalidArgument for a number of rows or of query tokens that is not allowed.
  static absl::Status CheckRows(std::span<const DecodeRow> rows, const EngineOptions& options);
  // What is wrong with a row whatever its sequence and the rows before it are.
  static absl::Status CheckRowAlone(const DecodeRow& row);
  // Whether the row's policy can be answered over the sequence.
  static absl::Status CheckPolicy(const DecodeRow& row, const attention::Backend& backend,
                                  Sequence* sequence);
  // Bytes that a step's answer and lists take. ResourceExhausted if no memory could hold them.
  static absl::StatusOr<uint64_t> AnswerBytes(std::span<const DecodeRow> rows,
                                              const ModelShape& shape);
  static absl::Status StandsTwice(uint64_t sequence_id);

  // Checks for faults of the whole message: limits, and tensors whose sizes contradict the rows or
  // one another.
  absl::Status Check(const EngineOptions& options);

  size_t rows() const { return args_.rows.size(); }
  // What is wrong with row `row` whatever its sequence is. Rows must be checked in their order.
  absl::Status CheckAlone(size_t row);
  // Checks row `row`, which belongs to `sequence`, and appends its tokens. A fault becomes the
  // row's status, also ResourceExhausted if the budget has no room for the step's answer. Returns
  // how many tokens are new.
  uint64_t Prepare(size_t row, WriterId writer, const attention::Backend& backend,
                   const std::shared_ptr<Sequence>& sequence);
  void Refuse(size_t row, absl::Status status) { result_->rows[row].status = std::move(status); }

  // The accepted rows, as the backend gets them.
  std::span<const attention::StepRow> step_rows() const { return step_rows_; }
  uint64_t sequence_id(size_t step_row) const {
    return args_.rows[step_row_numbers_[step_row]].sequence_id;
  }
  // Has the rows answered in floats, whatever the caller's final_dtype is; before Run.
  static void AnswerInFloats(std::span<attention::StepRow> rows);
  void AnswerInFloats() { AnswerInFloats(step_rows_); }
  // Answers the accepted rows, into the caller's memory, for which it asks once. prepared: what the
  // backend has prepared for them, or null.
  absl::Status Run(attention::Backend* backend, AnswerMemory memory,
                   attention::PreparedStep* prepared);

  // Where a row's tokens start in the tensors.
  struct Place {
    uint64_t query_token = 0;
    uint64_t new_token = 0;
    float query_magnitude = 0;  // greatest absolute value, from CheckNumbers
  };

  // The accepted rows of a batch that has run, as a step of another layer has them before its
  // queries are there, and what they point at.
  struct ExpectedRows {
    std::vector<attention::StepRow> rows;
    std::vector<std::shared_ptr<Sequence>> sequences;  // of the rows
    std::vector<size_t> numbers;                       // of the rows in the message
    std::vector<Place> places;                         // of the message's rows
    DecodeArgs args;  // what the batch's tensors were like; they are gone
  };
  ExpectedRows TakeExpectedRows();
  // In place of CheckAlone, Prepare and Run, behind Check: the rows of a pass's layer whose tensors
  // are still to come, as a batch that had run would leave them. The arguments' tensors say what
  // the layer's will be like; nobody reads their data. None if the tensors are not the sequences',
  // or tokens are there already that any of the rows would append. sequences: of the rows, null of
  // those that have left the pass.
  ExpectedRows Expect(std::span<const std::shared_ptr<Sequence>> sequences);
  // The rows' tokens in the tensors of another layer, which nobody has looked at; empty if these
  // are not like the batch's, which were checked against the rows' sequences.
  static std::vector<attention::RowTokens> TokensOf(const ExpectedRows& expected,
                                                    const DecodeArgs& args);

 private:
  absl::Status CheckTensor(const char* name, const TensorView& tensor, uint64_t tokens,
                           uint64_t heads, uint64_t dim) const;
  absl::Status CheckRow(size_t row, const attention::Backend& backend, Sequence* sequence);
  // Bytes of the budget that hold the answer.
  uint64_t held_bytes() const {
    return declared_answer_ != nullptr ? declared_answer_->bytes() : answer_.bytes();
  }
  // Whether the tensors, and the layer, are those of a sequence of this shape.
  absl::Status CheckSequence(const DecodeRow& row, const ModelShape& shape) const;
  absl::Status CheckShape(const DecodeRow& row, const ModelShape& shape) const;
  absl::Status CheckValuesShape(const ModelShape& shape) const;
  // Checks that the row's numbers are finite, and its values within kValueMax; notes the
  // magnitudes.
  absl::Status CheckNumbers(size_t row, const ModelShape& shape);
  // Reserves the bytes of the whole step's answer; a row's shape has confirmed its extents.
  absl::Status ReserveAnswer(const ModelShape& shape);
  // The caller's memory for the answer, every element NaN. So an element that the backend
  // leaves out is noticed, and no client receives what lay in the memory before.
  absl::StatusOr<AnswerBuffers> TakeMemory(AnswerMemory memory) const;
  // Appends the row's tokens, if it has any, and returns what its step reads.
  absl::StatusOr<Snapshot> Take(size_t row, WriterId writer, Sequence* sequence) const;
  // Without what a message brings and gets.
  static attention::StepRow StepRowOf(const DecodeArgs& args, const DecodeRow& row,
                                      const Sequence& sequence,
                                      std::shared_ptr<const attention::SequenceView> view);
  void AddStepRow(size_t row, const Sequence& sequence, Snapshot snapshot);
  void ClearFaulty();
  void ClearAnswer(const attention::StepRow& row);
  void RefuseOverflow();

  // Whether the message has values: those of latent models have none.
  bool has_values() const {
    return args_.v.elements != 0 || args_.v_heads != 0 || args_.v_value_dim != 0;
  }

  const DecodeArgs& args_;
  MemoryBudget* const budget_;  // null in a pass
  DecodeResult* const result_;
  const Reservation* const declared_answer_ = nullptr;  // of a pass
  Reservation answer_;                    // the answer's bytes and those of the lists below
  std::unordered_set<uint64_t> checked_;  // sequences of the rows that CheckAlone let pass
  std::vector<Place> places_;
  std::vector<float> key_magnitudes_;  // of the row that is being checked, by tail block
  uint64_t query_tokens_ = 0;
  uint64_t new_tokens_ = 0;
  std::vector<attention::StepRow> step_rows_;
  std::vector<size_t> step_row_numbers_;  // row of each step row
  std::vector<std::shared_ptr<Sequence>>
      sequences_;  // of the accepted rows; kept as the step reads their policies
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_DECODE_BATCH_H_
