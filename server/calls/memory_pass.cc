// SPDX-License-Identifier: Apache-2.0
#include "server/calls/memory_pass.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/dtype.h"
#include "common/mutex.h"
#include "common/status.h"
#include "server/calls/conversions.h"
#include "server/calls/memory_plane.h"

namespace attnd::server {
namespace {

constexpr uint32_t kSpinUsMax = 10'000;
// From when the server waits for a layer's ring until it comes. So long the engine stays ready for
// that layer, which may hold others up.
constexpr std::chrono::milliseconds kPromptRing{1};

plane::Span ToSpan(const v1::PassSpan& proto) { return {proto.offset(), proto.layer_stride()}; }

// Work that another thread does while this one waits for it.
class AwaitedTask final : public StepExecutor::Task {
 public:
  explicit AwaitedTask(absl::FunctionRef<void()> work) : work_(work) {}
  void Run() override {
    work_();
    const MutexLock lock(mutex_);
    done_ = true;
    changed_.NotifyOne();
  }
  void Await() {
    const MutexLock lock(mutex_);
    while (!done_) changed_.Wait(mutex_);
  }

 private:
  const absl::FunctionRef<void()> work_;
  Mutex mutex_;
  CondVar changed_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

absl::Status CheckSpin(absl::string_view field, uint32_t spin_us) {
  if (spin_us <= kSpinUsMax) return absl::OkStatus();
  return Invalid(field, " is ", spin_us, "; allowed are 0..", kSpinUsMax);
}

MemoryPass::MemoryPass(const Stream& stream, const v1::PassMemory& proto, plane::RegionUse region)
    : stream_(stream),
      region_(std::move(region)),
      spin_(proto.spin_us()),
      waiting_(proto.device_rings() ? plane::Waiting::kLooking : plane::Waiting::kWoken),
      in_twin_(proto.in_twin()),
      out_span_(ToSpan(proto.out())),
      lse_span_(ToSpan(proto.lse())),
      q_{.span = ToSpan(proto.q()), .copy = nullptr},
      k_{.span = ToSpan(proto.k()), .copy = nullptr},
      v_{.span = ToSpan(proto.v()), .copy = nullptr},
      turns_(reinterpret_cast<plane::Words*>(region_.data() + proto.words_offset()),
             proto.first_epoch(), stream.options->layers) {
  stats_.Start(stream.step->rows.size());
}

absl::StatusOr<std::unique_ptr<MemoryPass>> MemoryPass::Declare(const Stream& stream,
                                                                const v1::PassMemory& proto) {
  if (stream.options->stats == v1::Pass::STATS_EACH_LAYER) {
    return Invalid("begin_pass.stats",
                   " is STATS_EACH_LAYER; allowed are STATS_OF_PASS and STATS_NONE over memory");
  }
  ATTND_RETURN_IF_ERROR(CheckSpin("begin_pass.memory.spin_us", proto.spin_us()));
  ATTND_ASSIGN_OR_RETURN(plane::RegionUse region,
                         stream.handlers->memory->regions()->Use(
                             "begin_pass.memory.region_id", *stream.tenant, proto.region_id()));
  ATTND_RETURN_IF_ERROR(plane::CheckSpan("begin_pass.memory.words",
                                         {.offset = proto.words_offset(), .layer_stride = 0},
                                         sizeof(plane::Words), 1, region.bytes()));
  if (proto.in_twin() && (!proto.device_rings() || region.twin() == nullptr)) {
    return Invalid("begin_pass.memory.in_twin",
                   " is set; allowed with device_rings and a region that has a twin");
  }
  std::unique_ptr<MemoryPass> pass(new MemoryPass(stream, proto, std::move(region)));
  ATTND_RETURN_IF_ERROR(pass->Check());
  ATTND_RETURN_IF_ERROR(pass->MakeCopies());
  stream.step->args.final_dtype = stream.step->output_dtype;
  return pass;
}

absl::Status MemoryPass::Check() {
  const engine::DecodeArgs& args = stream_.step->args;
  ATTND_RETURN_IF_ERROR(CheckInput("begin_pass.memory.q", args.q, &q_));
  ATTND_RETURN_IF_ERROR(CheckInput("begin_pass.memory.k", args.k, &k_));
  ATTND_RETURN_IF_ERROR(CheckInput("begin_pass.memory.v", args.v, &v_));
  const uint64_t bytes = q_.bytes + k_.bytes + v_.bytes;  // each at most a region's
  const uint64_t bytes_max = stream_.handlers->options->max_message_bytes;
  if (bytes > bytes_max) {
    stream_.handlers->metrics->OnRejected(Rejection::kMessage);
    return absl::ResourceExhaustedError(
        absl::StrCat("max_message_bytes: q, k and v of a layer have ", bytes,
                     " bytes; allowed are ", bytes_max));
  }
  const uint64_t lanes = args.q.elements / args.q_head_dim;
  declared_ = {
      .query_tokens = lanes / args.q_heads, .query_heads = args.q_heads, .value_dim = ValueDim()};
  return CheckOutputs(declared_);
}

absl::Status MemoryPass::CheckInput(absl::string_view field, const engine::TensorView& tensor,
                                    Input* input) const {
  if (tensor.elements == 0) return absl::OkStatus();  // absent
  ATTND_RETURN_IF_ERROR(plane::CheckSpan(field, input->span, Bytes(tensor), stream_.options->layers,
                                         region_.bytes()));
  input->bytes = Bytes(tensor);
  return absl::OkStatus();
}

absl::Status MemoryPass::CheckOutputs(const engine::AnswerExtents& extents) const {
  const auto out_bytes =
      CheckedProduct({extents.query_tokens, extents.query_heads, extents.value_dim,
                      DTypeBytes(stream_.step->output_dtype)});
  const auto lse_bytes = CheckedProduct({extents.query_tokens, extents.query_heads, sizeof(float)});
  const uint64_t bytes_max = stream_.handlers->options->max_message_bytes;
  if (!out_bytes || !lse_bytes || *out_bytes > bytes_max || *lse_bytes > bytes_max - *out_bytes) {
    stream_.handlers->metrics->OnRejected(Rejection::kMessage);
    return absl::ResourceExhaustedError(
        absl::StrCat("max_message_bytes: out and lse of a layer would have more than the ",
                     bytes_max, " bytes allowed"));
  }
  const uint32_t layers = stream_.options->layers;
  ATTND_RETURN_IF_ERROR(
      plane::CheckSpan("begin_pass.memory.out", out_span_, *out_bytes, layers, region_.bytes()));
  if (!stream_.options->want_lse) return absl::OkStatus();
  return plane::CheckSpan("begin_pass.memory.lse", lse_span_, *lse_bytes, layers, region_.bytes());
}

uint64_t MemoryPass::ValueDim() const {
  const engine::DecodeArgs& args = stream_.step->args;
  if (args.v.elements > 0) return args.v_value_dim;
  uint64_t value_dim = 0;
  for (const engine::DecodeRow& row : stream_.step->rows) {
    const auto info = stream_.handlers->engine->Info(*stream_.tenant, row.sequence_id);
    if (info.ok()) value_dim = std::max<uint64_t>(value_dim, info->args.shape.value_dim);
  }
  return value_dim;
}

absl::Status MemoryPass::MakeCopies() {
  engine::DecodeArgs& args = stream_.step->args;
  ATTND_RETURN_IF_ERROR(MakeCopy(&args.q, &q_));
  ATTND_RETURN_IF_ERROR(MakeCopy(&args.k, &k_));
  return MakeCopy(&args.v, &v_);
}

absl::Status MemoryPass::MakeCopy(engine::TensorView* tensor, Input* input) {
  if (input->bytes == 0) return absl::OkStatus();
  input->copy.reset(new (std::nothrow) std::byte[input->bytes]);
  if (input->copy == nullptr) {
    return absl::ResourceExhaustedError("the system refused memory for a layer of the pass");
  }
  tensor->data = input->copy.get();
  return absl::OkStatus();
}

absl::Status MemoryPass::Run(engine::DecodeResult* result) {
  auto pass = stream_.handlers->engine->BeginPass(*stream_.tenant, stream_.writer,
                                                  stream_.step->rows, stream_.options->layers);
  absl::Status status = pass.ok() ? RunLayers(pass->get(), result) : pass.status();
  if (status.ok()) return status;
  // Taken back before the client can know that the pass is over.
  if (pass.ok()) pass->reset();
  // A GPU that has not rung may still be at the pass before, whose last answer the words have.
  if (rung_ || waiting_ == plane::Waiting::kWoken) turns_.GiveUp(failed_rows_);
  return status;
}

absl::Status MemoryPass::RunLayers(engine::Pass* pass, engine::DecodeResult* result) {
  if (*RingIsPrompt()) pass->ExpectFirstLayer(stream_.step->args);
  PrepareLayer(pass);
  while (pass->layer() < stream_.options->layers) {
    ATTND_RETURN_IF_ERROR(AwaitRing(pass));
    rung_ = true;
    const LayerTimes times = AnswerLayer(pass, result);
    // Before the answer wakes the client: the system may put the client on this core, where it
    // would wait for this thread. A GPU would not, and nobody is woken for it.
    const bool tells_first = waiting_ == plane::Waiting::kWoken || !times.status.ok();
    if (tells_first) ReportLayer(times, *result);
    ATTND_RETURN_IF_ERROR(times.status);
    if (result->told_client) {
      turns_.NoteAnswer();
    } else {
      turns_.Answer(failed_rows_);
    }
    PrepareLayer(pass);
    if (!tells_first) ReportLayer(times, *result);
  }
  if (stream_.options->stats == v1::Pass::STATS_OF_PASS) *result = stats_.Total(*result);
  return absl::OkStatus();
}

void MemoryPass::PrepareLayer(engine::Pass* pass) {
  const bool last = pass->layer() == stream_.options->layers;
  const bool prepares = !last && *RingIsPrompt();
  std::optional<engine::ClientLayer> client;
  if (prepares && region_.device_sees()) client = InMemory(pass->layer());
  prepared_ = prepares && pass->PrepareNextLayer(client.has_value() ? &*client : nullptr);
  if (!prepared_) pass->ForgetNextLayer();
  pass->WarmNextLayer();
  if (!last) BlankAnswer();
}

const std::byte* MemoryPass::InRegion(const Input& input, uint32_t layer) const {
  return region_.data() + plane::LayerOffset(input.span, layer);
}

absl::Status MemoryPass::AwaitRing(engine::Pass* pass) {
  const Clock::time_point prompt_until = Clock::now() + kPromptRing;
  if (prepared_) {
    absl::Status status = AwaitRingUntil(prompt_until);
    if (!absl::IsDeadlineExceeded(status)) return status;
    pass->ForgetNextLayer();
    prepared_ = false;
  }
  ATTND_RETURN_IF_ERROR(AwaitRingUntil(Clock::now() + stream_.handlers->options->reply_timeout()));
  *RingIsPrompt() = Clock::now() < prompt_until;
  return absl::OkStatus();
}

absl::Status MemoryPass::AwaitRingUntil(Clock::time_point latest) const {
  return turns_.AwaitRing({.limit = std::min(stream_.options->deadline.value_or(latest), latest),
                           .spin = spin_,
                           .waiting = waiting_,
                           .cancelled = stream_.cancelled,
                           .stopping = stream_.stopping});
}

MemoryPass::LayerTimes MemoryPass::AnswerLayer(engine::Pass* pass, engine::DecodeResult* result) {
  LayerTimes times;
  times.arrival = Clock::now();
  engine::DecodeArgs& args = stream_.step->args;
  const uint32_t layer = pass->layer();
  args.layer = layer;
  args.deadline =
      Earlier(DeadlineAt(times.arrival, stream_.step->deadline_us), stream_.options->deadline);
  CopyIn(layer);
  extents_ = {};
  RunStep([&] {
    times.start = Clock::now();
    times.status = pass->Step(
        args, [this](const engine::AnswerExtents& extents) { return Provide(extents); }, result);
    times.end = Clock::now();
  });
  if (times.status.ok()) {
    // A client that has been told may have rung for the next layer.
    out_untouched_ = result->told_client;
    if (!result->told_client) CopyOut(layer, *result);
    failed_rows_ = static_cast<uint32_t>(
        std::count_if(result->rows.begin(), result->rows.end(),
                      [](const engine::DecodeRowResult& row) { return !row.status.ok(); }));
  }
  times.answered = Clock::now();
  return times;
}

void MemoryPass::ReportLayer(const LayerTimes& times, const engine::DecodeResult& result) {
  queue_time_ += times.start - times.arrival;
  engine_time_ += times.end - times.start;
  const absl::Status& status = times.status;
  if (status.ok()) stats_.Add(result);
  Metrics* const metrics = stream_.handlers->metrics;
  if (absl::IsResourceExhausted(status)) metrics->OnRejected(Rejection::kMemory);
  metrics->OnStep(status.code(), status.ok() ? &result : nullptr,
                  {stream_.step->rows, stream_.handlers->options->max_sequence_tokens});
  metrics->OnStage(Stage::kQueue, times.start - times.arrival);
  metrics->OnStage(Stage::kEngine, times.end - times.start);
  metrics->OnStage(Stage::kRpc, times.answered - times.end);
}

engine::ClientLayer MemoryPass::InMemory(uint32_t layer) const {
  engine::ClientLayer client;
  client.args = stream_.step->args;
  if (q_.bytes > 0) client.args.q.data = InRegion(q_, layer);
  if (k_.bytes > 0) client.args.k.data = InRegion(k_, layer);
  if (v_.bytes > 0) client.args.v.data = InRegion(v_, layer);
  client.ring = turns_.ring();
  client.epoch = turns_.epoch();
  client.memory = region_.data();
  client.memory_twin = in_twin_ ? region_.twin() : nullptr;
  if (stream_.step->output_dtype == DType::kFp32) return client;
  const std::span out(OutOf(layer),
                      declared_.out_floats() * DTypeBytes(stream_.step->output_dtype));
  std::span<float> lse;
  if (stream_.options->want_lse) lse = {LseOf(layer), declared_.lse_floats()};
  // The host reads the tensors beside the device, which may have its answer before that.
  if (IsInInput(layer, out) || IsInInput(layer, std::as_bytes(lse))) return client;
  client.out = out;
  client.lse = lse;
  // Who sleeps until a word changes must be woken.
  if (waiting_ == plane::Waiting::kLooking) client.answer = turns_.answer();
  return client;
}

bool MemoryPass::IsInInput(uint32_t layer, std::span<const std::byte> answer) const {
  return std::ranges::any_of(std::array{&q_, &k_, &v_}, [&](const Input* input) {
    if (input->bytes == 0) return false;  // nobody has checked where it would be
    const std::byte* const at = InRegion(*input, layer);
    return answer.data() < at + input->bytes && at < answer.data() + answer.size();
  });
}

void MemoryPass::CopyIn(uint32_t layer) {
  for (const Input* input : {&q_, &k_, &v_}) {
    if (input->bytes == 0) continue;
    std::memcpy(input->copy.get(), InRegion(*input, layer), input->bytes);
  }
}

absl::StatusOr<engine::AnswerBuffers> MemoryPass::Provide(const engine::AnswerExtents& extents) {
  // Again, as now the sequences themselves have said how wide their values are.
  ATTND_RETURN_IF_ERROR(CheckOutputs(extents));
  extents_ = extents;
  std::span<std::byte> final_out;
  if (const DType dtype = stream_.step->output_dtype; dtype != DType::kFp32) {
    final_out = {OutOf(stream_.step->args.layer), extents.out_floats() * DTypeBytes(dtype)};
  }
  const bool same = out_.size() == extents.out_floats() && lse_.size() == extents.lse_floats();
  const bool blank = std::exchange(blank_, false) && same;
  out_.resize(extents.out_floats());
  lse_.resize(extents.lse_floats());
  return engine::AnswerBuffers{.out = out_, .lse = lse_, .final_out = final_out, .blank = blank};
}

void MemoryPass::BlankAnswer() {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  if (!out_untouched_) std::fill(out_.begin(), out_.end(), kNan);
  std::fill(lse_.begin(), lse_.end(), kNan);
  blank_ = true;
}

void MemoryPass::CopyOut(uint32_t layer, const engine::DecodeResult& result) {
  if (extents_.out_floats() == 0) {  // no row is left, and the engine has written nothing
    extents_ = declared_;
    out_.assign(extents_.out_floats(), std::numeric_limits<float>::quiet_NaN());
    lse_.assign(extents_.lse_floats(), std::numeric_limits<float>::quiet_NaN());
  }
  const DType dtype = stream_.step->output_dtype;
  const uint64_t token_floats = extents_.query_heads * extents_.value_dim;
  uint64_t first = 0;  // of a row's floats
  out_untouched_ = true;
  for (size_t row = 0; row < result.rows.size(); ++row) {
    const uint64_t floats = stream_.step->rows[row].query_tokens * token_floats;
    if (!result.rows[row].out_is_final) {
      FromFloat(dtype, out_.data() + first, floats, OutOf(layer) + first * DTypeBytes(dtype));
      out_untouched_ = false;
    }
    first += floats;
  }
  if (!stream_.options->want_lse) return;
  std::memcpy(LseOf(layer), lse_.data(), extents_.lse_floats() * sizeof(float));
}

std::byte* MemoryPass::OutOf(uint32_t layer) const {
  return region_.data() + plane::LayerOffset(out_span_, layer);
}

float* MemoryPass::LseOf(uint32_t layer) const {
  return reinterpret_cast<float*>(region_.data() + plane::LayerOffset(lse_span_, layer));
}

void MemoryPass::RunStep(absl::FunctionRef<void()> step) const {
  // It has its stream, and waits for the device, unless the engine gives that up: no other step may
  // hold it up. There are fewer such passes than step_workers.
  if (prepared_) return step();
  AwaitedTask task(step);
  // A pass has its place, as one whose layers are messages.
  if (MayReadDisk()) {
    stream_.handlers->disk_steps->Enqueue(&task, StepExecutor::Place::kAlways);
  } else {
    stream_.handlers->steps->Submit(&task, StepExecutor::Place::kAlways);
  }
  task.Await();
}

bool MemoryPass::MayReadDisk() const {
  const auto& rows = stream_.step->rows;
  return std::any_of(rows.begin(), rows.end(), [&](const engine::DecodeRow& row) {
    return stream_.handlers->engine->MayReadDisk(*stream_.tenant, row.sequence_id);
  });
}

}  // namespace attnd::server
