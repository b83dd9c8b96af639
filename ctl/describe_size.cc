// SPDX-License-Identifier: Apache-2.0
#include "ctl/describe_size.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "attention/segment/segment.h"
#include "common/dtype.h"

namespace attnd::ctl {
namespace {

using attention::Segment;
using attention::SegmentForm;

Value DescribeModel(const ModelConfig& model) {
  const ModelShape& shape = model.shape;
  return Value::Object()
      .Set("type", model.model_type)
      .Set("layers", shape.layers)
      .Set("query_heads", shape.query_heads)
      .Set("kv_heads", shape.kv_heads)
      .Set("head_dim", shape.head_dim)
      .Set("value_dim", shape.value_dim)
      .Set("latent", shape.latent)
      .Set("dtype", DTypeName(shape.dtype))
      .Set("token_bytes", uint64_t{shape.layers} * shape.kv_heads * shape.token_bytes());
}

// Whether two segments take as much.
bool Alike(const SegmentForm& a, const SegmentForm& b) {
  return a.tokens == b.tokens && a.sections == b.sections &&
         Segment::IndexBytes(a) == Segment::IndexBytes(b);
}

// A row for each run of segments that are alike.
void AddSegments(const std::vector<SegmentForm>& forms, bool early, Value* rows) {
  for (auto first = forms.begin(); first != forms.end();) {
    const auto end = std::find_if(first, forms.end(),
                                  [&](const SegmentForm& form) { return !Alike(form, *first); });
    rows->Add(Value::Object()
                  .Set("segments", static_cast<uint64_t>(end - first))
                  .Set("tokens", first->tokens)
                  .Set("early", early)
                  .Set("sections", first->sections)
                  .Set("payload_bytes", Segment::PayloadBytes(*first))
                  .Set("index_bytes", Segment::IndexBytes(*first)));
    first = end;
  }
}

Value DescribeCut(const engine::SequenceCut& cut) {
  Value rows = Value::List();
  AddSegments(cut.segments, false, &rows);
  AddSegments(cut.early, true, &rows);
  return Value::Object()
      .Set("tokens", cut.length)
      .Set("tail_tokens", cut.length - cut.tail_begin)
      .Set("segments", std::move(rows));
}

// Rows of what lies where.
class Places {
 public:
  Places& Add(const char* what, const char* where, uint64_t bytes) {
    rows_.Add(Value::Object()
                  .Set("what", what)
                  .Set("where", where)
                  .Set("bytes", bytes)
                  .Set("size", BytesText(bytes)));
    return *this;
  }
  Value Take() { return std::move(rows_); }

 private:
  Value rows_ = Value::List();
};

Value DescribePlaces(const Load& load, const LoadSize& size) {
  const HostSize& host = size.host;
  Places places;
  places.Add("payload of segments", "memory", host.payload_bytes);
  if (host.disk_bytes != 0) places.Add("payload of segments", "disk alone", host.disk_bytes);
  places.Add("indexes", "memory", host.index_bytes)
      .Add("tails", "memory", host.tail_bytes)
      .Add("early segments (copies)", "memory", host.early_bytes)
      .Add("lists", "memory", host.books_bytes);
  if (host.disk_bytes != 0) places.Add("tables of pages on disk", "memory", host.file_books_bytes);
  if (load.memory_bytes != 0) {
    places.Add("page memory", "memory", host.page_memory_bytes);
  }
  places.Add("building a segment", "memory, at times", host.building_bytes);
  if (size.gpu.has_value()) {
    const bool cached = size.gpu->cache_bytes > 0;
    places
        .Add(cached ? "a cache of pages" : "copies of pages", "GPU",
             cached ? size.gpu->cache_bytes : size.gpu->pages_bytes)
        .Add("copies of tails", "GPU", size.gpu->tail_bytes)
        .Add("copies of indexes", "GPU", size.gpu->index_bytes);
  }
  return places.Take();
}

// mend: which options make it fit.
void AddMissing(const char* what, uint64_t bytes, const char* mend, Value* rows) {
  if (bytes == 0) return;
  rows->Add(Value::Object()
                .Set("where", what)
                .Set("bytes", bytes)
                .Set("size", BytesText(bytes))
                .Set("mend", mend));
}

// Of the segments' keys and values, what the GPU's memory holds at a time.
double GpuShare(const GpuSize& gpu) {
  if (gpu.cache_bytes == 0) return 1;
  return std::min(1.0, static_cast<double>(gpu.cache_bytes) / static_cast<double>(gpu.pages_bytes));
}

Value DescribeFit(const Load& load, const LoadSize& size) {
  Value missing = Value::List();
  AddMissing("memory budget", size.host.missing_bytes, "more --memory", &missing);
  if (size.gpu.has_value()) {
    constexpr char kMoreIndex[] = "more --gpu-memory, or less --gpu-page-memory";
    AddMissing("GPU memory for tails", size.gpu->tail_missing,
               "more --gpu-memory, or more --gpu-page-memory", &missing);
    AddMissing("GPU memory for indexes", size.gpu->index_missing, kMoreIndex, &missing);
    AddMissing("of it, for one sequence: the CPU answers it", size.gpu->one_index_missing,
               kMoreIndex, &missing);
  }
  Value fit = Value::Object();
  if (load.memory_bytes != 0) fit.Set("memory_bytes", load.memory_bytes);
  fit.Set("least_memory_bytes", size.host.needed_bytes);
  if (size.gpu.has_value()) {
    fit.Set("gpu_memory_bytes", load.gpu_memory_bytes)
        .Set("gpu_pages_capacity_bytes", size.gpu->pages_capacity)
        .Set("gpu_pages_share", GpuShare(*size.gpu))
        .Set("gpu_index_capacity_bytes", size.gpu->index_capacity);
  }
  return fit.Set("fits", size.fits)
      .Set("sequences", load.sequences)
      .Set("fitting_sequences", size.fitting_sequences)
      .Set("missing", std::move(missing));
}

Value DescribeStep(const StepSize& step) {
  Places places;
  places.Add("sink, window and tail", "payload", step.zone_bytes)
      .Add("tokens read exactly", "payload", step.exact_bytes)
      .Add("rows", "index", step.row_bytes)
      .Add("axes and slopes", "index", step.axes_bytes)
      .Add("all", "", step.bytes())
      .Add("dense attention", "payload", step.dense_bytes);
  return Value::Object()
      .Set("policy", kMeasuredPolicy)
      .Set("read_share", step.shares.tokens)
      .Set("index_share", step.shares.rows)
      .Set("zone_tokens", step.zone_tokens)
      .Set("exact_tokens", step.exact_tokens)
      .Set("reads", places.Take())
      .Set("shares", kMeasuredSource);
}

Value DescribeTime(const Load& load, const engine::SequenceCut& cut, const IndexTime& time) {
  double tokens = 0;
  for (const SegmentForm& form : cut.segments) tokens += form.tokens;
  const double heads = static_cast<double>(load.shape.layers) * load.shape.kv_heads;
  const double one = time.seconds / time.tokens * tokens * heads;
  return Value::Object()
      .Set("measured_tokens", time.tokens)
      .Set("measured_seconds", time.seconds)
      .Set("threads", 1u)
      .Set("one_sequence_seconds", one)
      .Set("all_sequences_seconds", one * static_cast<double>(load.sequences))
      .Set("estimate",
           load.gpu_memory_bytes == 0
               ? "from random keys, on this machine; the server's index_threads divide it"
               : "from random keys, on this machine's CPU; the GPU takes less");
}

}  // namespace

Value DescribeSize(const ModelConfig& model, const Load& load, const LoadSize& size,
                   const std::optional<IndexTime>& time) {
  Value report = Value::Object();
  report.Set("model", DescribeModel(model))
      .Set("index", load.indexes.ToString())
      .Set("sequence", DescribeCut(size.sequence.cut))
      .Set("places", DescribePlaces(load, size))
      .Set("fit", DescribeFit(load, size));
  if (size.step.has_value()) {
    report.Set("step_of_one_sequence", DescribeStep(*size.step));
  }
  if (time.has_value()) report.Set("indexing", DescribeTime(load, size.sequence.cut, *time));
  return report;
}

}  // namespace attnd::ctl
