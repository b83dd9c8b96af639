// SPDX-License-Identifier: Apache-2.0
//
// EngineImpl: passes: a step of each layer over the same rows.
#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/engine_impl.h"
#include "glog/logging.h"

namespace attnd::engine {
namespace {

// Of all rows of a pass. More would fall out of the caches again, and would hold up the look for
// the next ring.
constexpr uint64_t kWarmTokensMax = 128;

}  // namespace

// Thread-safety: as Pass's. Sequences are looked up again in each step, so that a pass neither
// keeps a closed one open nor holds a lease between two messages; but for what it has the backend
// prepare, which it keeps for a moment.
class EngineImpl::PassImpl final : public Pass {
 public:
  PassImpl(EngineImpl* engine, absl::string_view tenant, WriterId writer,
           std::span<const DecodeRow> rows, uint32_t layers)
      : engine_(engine), tenant_(tenant), writer_(writer), layers_(layers) {
    rows_.assign(rows.begin(), rows.end());
    state_.resize(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      state_[i].token_ids.assign(rows[i].token_ids.begin(), rows[i].token_ids.end());
      rows_[i].token_ids = state_[i].token_ids;
    }
  }
  ~PassImpl() override { GiveUp(); }

  // Checks and reserves for every row; a row that fails is out of the pass.
  void Begin() {
    std::unordered_set<uint64_t> before;
    for (size_t i = 0; i < rows_.size(); ++i) {
      absl::Status status = DecodeBatch::CheckRowAlone(rows_[i]);
      if (status.ok() && !before.insert(rows_[i].sequence_id).second) {
        status = DecodeBatch::StandsTwice(rows_[i].sequence_id);
      }
      if (status.ok()) status = engine_->WithoutCopies([&] { return BeginRow(i); });
      state_[i].status = std::move(status);
    }
  }

  uint32_t layer() const override { return layer_; }

  absl::Status Step(const DecodeArgs& args, AnswerMemory memory, DecodeResult* result) override {
    CHECK(!given_up_ && layer_ < layers_) << "a step of a pass that is over";
    *result = DecodeResult();
    DecodeArgs step = args;
    step.layer = layer_;
    step.rows = rows_;
    DecodeBatch batch(step, answer_, result);
    const auto prepare = [&](StepSequences* sequences) {
      for (size_t i = 0; i < rows_.size(); ++i) PrepareRow(i, &batch, sequences, result);
    };
    spent_ = std::move(prepared_);
    // Before its tokens are appended, and others may read them.
    if (spent_ != nullptr && spent_->takes_turn() && !HasBegunWith(args)) {
      spent_->GiveUp();
      turned_in_vain_ = true;
    }
    absl::Status status = engine_->RunStep(step, memory, &batch, prepare, result, spent_.get());
    result->told_client = spent_ != nullptr && spent_->has_told();
    expected_ = batch.TakeExpectedRows();
    if (!status.ok()) {
      GiveUp();
      return status;
    }
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (!state_[i].status.ok() || result->rows[i].status.ok()) continue;
      state_[i].status = result->rows[i].status;
      GiveUpRow(i);
    }
    if (layer_ == 0) ForgetTokenIds();
    if (++layer_ == layers_) Complete();
    return status;
  }

  void ExpectFirstLayer(const DecodeArgs& like) override {
    CHECK_EQ(layer_, 0u) << "a first layer is expected before the pass's first step";
    try {
      expected_ = ExpectLayer(like);
    } catch (const std::bad_alloc&) {  // nothing is got ready
      expected_ = {};
    }
  }

  bool PrepareNextLayer(const ClientLayer* client) override {
    spent_.reset();
    if (layer_ == layers_ || expected_.rows.empty()) return false;
    const auto sequence_id = [&](size_t row) { return rows_[expected_.numbers[row]].sequence_id; };
    if (engine_->MayAudit(layer_, expected_.rows, sequence_id)) {
      DecodeBatch::AnswerInFloats(expected_.rows);
    }
    attention::StepRequest request;
    request.layer = layer_;
    request.rows = expected_.rows;
    try {
      std::vector<attention::RowTokens> tokens;
      attention::ClientTurn turn;
      const bool turns = client != nullptr && TakesTurn(*client, &tokens, &turn);
      prepared_ = engine_->backend_->Prepare(request, turns ? &turn : nullptr);
    } catch (const std::bad_alloc&) {
      prepared_ = nullptr;
    }
    if (prepared_ == nullptr) expected_ = {};
    return prepared_ != nullptr;
  }

  void ForgetNextLayer() override {
    spent_.reset();
    prepared_.reset();
    expected_ = {};
  }

  void WarmNextLayer() override {
    uint64_t left = layer_ == layers_ ? 0 : kWarmTokensMax;
    for (size_t i = 0; i < rows_.size() && left > 0; ++i) {
      if (!state_[i].status.ok()) continue;
      const auto sequence = state_[i].sequence.lock();  // none of a row that appends nothing
      if (sequence == nullptr) continue;
      const uint64_t tokens = std::min<uint64_t>(rows_[i].query_tokens, left);
      sequence->WarmTail(layer_, rows_[i].position, tokens);
      left -= tokens;
    }
  }

 private:
  struct RowState {
    absl::Status status;              // not OK: the row is out of the pass
    std::vector<uint32_t> token_ids;  // until layer 0 has them
    // In which the pass is declared; none of a row that appends nothing. A closed sequence need not
    // wait for the pass's end.
    std::weak_ptr<Sequence> sequence;
    uint64_t new_tokens = 0;
  };

  absl::StatusOr<CalledSequence> Find(const DecodeRow& row) const {
    return row.query_only ? engine_->sequences_.Find(tenant_, row.sequence_id)
                          : engine_->sequences_.FindToWrite(tenant_, row.sequence_id, writer_);
  }

  absl::Status BeginRow(size_t number) {
    const DecodeRow& row = rows_[number];
    ATTND_ASSIGN_OR_RETURN(const CalledSequence called, Find(row));
    Sequence* const sequence = called.get();
    const ModelShape& shape = sequence->shape();
    if (shape.layers != layers_) {
      return absl::InvalidArgumentError(absl::StrCat(
          "begin_pass.layers is ", layers_, "; the sequence has ", shape.layers, " layers"));
    }
    ATTND_RETURN_IF_ERROR(DecodeBatch::CheckPolicy(row, *engine_->backend_, sequence));
    ATTND_ASSIGN_OR_RETURN(const uint64_t answer_bytes, DecodeBatch::AnswerBytes(rows_, shape));
    const uint64_t row_bytes = sizeof(DecodeRow) + sizeof(RowState) + Sequence::PassBytes(layers_);
    const uint64_t bytes = answer_bytes + rows_.size() * row_bytes;  // up to some MiB more
    if (bytes > answer_.bytes()) {
      ATTND_RETURN_IF_ERROR(engine_->budget_.Resize(&answer_, bytes, "a pass's answers"));
    }
    if (row.query_only) return absl::OkStatus();
    RowState& state = state_[number];
    ATTND_RETURN_IF_ERROR(sequence->BeginPass(writer_, row.position, row.query_tokens));
    state.sequence = called.shared;
    return absl::OkStatus();
  }

  // Nothing if a row that has not left the pass is gone, or the step would be refused.
  DecodeBatch::ExpectedRows ExpectLayer(const DecodeArgs& like) const {
    DecodeArgs args = like;
    args.layer = layer_;
    args.rows = rows_;
    DecodeResult result;
    DecodeBatch batch(args, answer_, &result);
    if (!batch.Check(engine_->options_).ok()) return {};
    std::vector<std::shared_ptr<Sequence>> sequences(rows_.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (!state_[i].status.ok()) continue;
      auto called = Find(rows_[i]);
      if (!called.ok()) return {};
      sequences[i] = called->shared;
    }
    return batch.Expect(sequences);
  }

  // Whether a device may begin with the client's tokens by itself, before they are checked and
  // appended, which goes on beside it. Not where a row repeats tokens, or brings them where others
  // were given up, or where another stream may still come first: somebody may read those meanwhile,
  // and may be bringing them to the device. Nor again where the device has been in vain for it.
  bool TakesTurn(const ClientLayer& client, std::vector<attention::RowTokens>* tokens,
                 attention::ClientTurn* turn) const {
    if (turned_in_vain_) return false;
    for (size_t i = 0; i < expected_.rows.size(); ++i) {
      const attention::StepRow& row = expected_.rows[i];
      if (row.query_only) continue;
      if (!expected_.sequences[i]->IsNextOf(writer_, layer_, row.past_tokens)) return false;
    }
    *tokens = DecodeBatch::TokensOf(expected_, client.args);
    if (tokens->empty()) return false;
    turn->ring = client.ring;
    turn->epoch = client.epoch;
    turn->memory = client.memory;
    turn->memory_twin = client.memory_twin;
    turn->tokens = *tokens;
    if (!HasPlaceFor(expected_.rows, client)) return true;
    turn->out = client.out.data();
    turn->lse = client.lse.data();
    // The last layer's answer says that the tokens are committed, which they are behind its step.
    if (layer_ + 1 < layers_) turn->answer = client.answer;
    return true;
  }

  // Whether the device may leave the answer there. Rows that have left the pass have a place in the
  // client's out, and none in the step's.
  bool HasPlaceFor(std::span<const attention::StepRow> rows, const ClientLayer& client) const {
    const DType dtype = rows.front().final_out.dtype;
    if (client.out.empty() || rows.size() != rows_.size() || dtype == DType::kFp32) return false;
    const ModelShape& shape = rows.front().view->shape;  // in whose extents a message's rows agree
    AnswerExtents extents = {0, shape.query_heads, shape.value_dim};
    for (const attention::StepRow& row : rows) extents.query_tokens += row.query_tokens;
    return extents.out_floats() * DTypeBytes(dtype) <= client.out.size() &&
           (client.lse.empty() || extents.lse_floats() <= client.lse.size());
  }

  // Of what is spent, and takes its client's turn.
  bool HasBegunWith(const DecodeArgs& args) const {
    try {
      const std::vector<attention::RowTokens> tokens = DecodeBatch::TokensOf(expected_, args);
      return !tokens.empty() && spent_->HasBegunWith(tokens);
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  void PrepareRow(size_t number, DecodeBatch* batch, StepSequences* sequences,
                  DecodeResult* result) {
    RowState& state = state_[number];
    if (!state.status.ok()) {
      result->rows[number].told_before = layer_ > 0;
      return batch->Refuse(number, state.status);
    }
    auto called = Find(rows_[number]);
    if (!called.ok()) return batch->Refuse(number, std::move(called).status());
    const std::shared_ptr<Sequence> sequence = called->shared;
    if (called->call.lease() > std::chrono::seconds(0)) {
      sequences->calls.push_back(std::move(called->call));
    }
    uint64_t appended = 0;
    const absl::Status prepared = engine_->WithoutCopies([&] {
      appended = batch->Prepare(number, writer_, *engine_->backend_, sequence);
      const absl::Status& status = result->rows[number].status;
      // Making room may wait for the device, on which what is prepared may stand in the way.
      if (absl::IsResourceExhausted(status) && spent_ != nullptr) spent_->GiveUp();
      return status;
    });
    if (!prepared.ok() || rows_[number].query_only) return;
    if (layer_ == 0) state.new_tokens = appended;
    // A position is committed with its last layer.
    if (layer_ + 1 == layers_) sequences->grown.push_back(sequence);
  }

  void ForgetTokenIds() {
    for (size_t i = 0; i < rows_.size(); ++i) {
      rows_[i].token_ids = {};
      state_[i].token_ids = {};
    }
  }

  void Complete() {
    for (RowState& state : state_) {
      if (!state.status.ok()) continue;
      const std::shared_ptr<Sequence> sequence = state.sequence.lock();
      if (sequence != nullptr) sequence->CompletePass(writer_);
      state.sequence.reset();
      engine_->ReportAppended(state.new_tokens, /*prefill=*/false);
    }
  }

  void GiveUpRow(size_t number) {
    RowState& state = state_[number];
    const std::shared_ptr<Sequence> sequence = state.sequence.lock();
    if (sequence != nullptr) sequence->GiveUpPass(writer_);
    state.sequence.reset();
  }

  void GiveUp() {
    ForgetNextLayer();
    if (layer_ == layers_) return;
    given_up_ = true;
    for (size_t i = 0; i < rows_.size(); ++i) GiveUpRow(i);
  }

  // Constant after Begin.
  EngineImpl* const engine_;
  const std::string tenant_;
  const WriterId writer_;
  const uint32_t layers_;
  std::vector<DecodeRow> rows_;  // token ids until layer 0 has them
  Reservation answer_;           // the greatest answer of a layer, and the lists below

  std::vector<RowState> state_;  // [rows]
  // From a step on until nothing is prepared for them: the rows of the next layer, if they stay as
  // they are.
  DecodeBatch::ExpectedRows expected_;
  // What the backend has got ready for them, and what it had for the step that is under way or was
  // the last one, whose end need not hold up its answer. Null: nothing.
  std::unique_ptr<attention::PreparedStep> prepared_, spent_;
  uint32_t layer_ = 0;
  // A device has not seen the client's ring in time, or not the tokens that came: it is not waited
  // for again.
  bool turned_in_vain_ = false;
  bool given_up_ = false;
};

absl::StatusOr<std::unique_ptr<Pass>> EngineImpl::BeginPass(absl::string_view tenant,
                                                            WriterId writer,
                                                            std::span<const DecodeRow> rows,
                                                            uint32_t layers) {
  return WithinMemory([&]() -> absl::StatusOr<std::unique_ptr<Pass>> {
    ATTND_RETURN_IF_ERROR(DecodeBatch::CheckRows(rows, options_));
    if (layers == 0) return absl::InvalidArgumentError("begin_pass.layers is 0");
    auto pass = std::make_unique<PassImpl>(this, tenant, writer, rows, layers);
    pass->Begin();
    return std::unique_ptr<Pass>(std::move(pass));
  });
}

}  // namespace attnd::engine
