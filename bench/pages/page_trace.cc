// SPDX-License-Identifier: Apache-2.0
//
// Page traces of a real model: captures (bench/pages/page_trace_capture.py) are segmented and every
// decoded token is stepped under each policy; the plans say which pages it reads.
//
//   page_trace --out=build/page-traces build/page-traces/*.capture
//
// writes CAPTURE.POLICY.trace for each (bench/pages/page_trace_file.h), ':' as '_'; with --index
// CAPTURE.INDEX.POLICY.trace. Only over the index `clusters` does a trace say how near to being
// read the other pages were. What was known of them before the step chose (EarlyMoment) it always
// says.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "attention/cpu/cluster_ranking.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/segment/pages.h"
#include "bench/pages/early_ranks.h"
#include "bench/pages/page_capture.h"
#include "bench/pages/page_ranks.h"
#include "bench/pages/page_trace_file.h"
#include "bench/step_runner.h"
#include "bench/support.h"

ABSL_FLAG(std::string, policies, "double-p clusters-top-k error-target error-target:dense_layers=1",
          "separated by spaces: NAME[:key=value,...]");
ABSL_FLAG(std::string, index, "clusters", "of the sequences: clusters, regression or tree");
ABSL_FLAG(std::string, out, ".", "folder of the traces");
ABSL_FLAG(bool, sections, true, "whether long segments' trees have sections; a GPU's have none");
ABSL_FLAG(uint32_t, threads, 1, "threads that build segments and answer a step");

namespace attnd::bench {
namespace {

using attention::Policy;
using attention::SequenceView;

// One policy's trace of a capture as it grows.
struct Recording {
  std::string name;
  Policy policy;
  PageTrace trace;
  std::unique_ptr<EarlyRanker> early;
  uint64_t read_exactly = 0;  // clusters
  uint64_t misordered = 0;    // of these: read although a better scored one was not
};

// Steps one capture.
class Recorder {
 public:
  Recorder(attention::Backend* backend, const PageCapture& capture)
      : backend_(backend), capture_(capture), view_(*capture.view) {
    const ModelShape& shape = view_.shape;
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      for (uint32_t head = 0; head < shape.kv_heads && HasScores(); ++head) {
        scorers_.emplace_back(view_, layer, head);
      }
    }
    queries_.resize(size_t{shape.query_heads} * shape.head_dim);
    scores_.resize(shape.kv_heads);
    out_.resize(size_t{shape.query_heads} * shape.value_dim);
    lse_.resize(shape.query_heads);
  }

  PageTrace EmptyTrace() const {
    const ModelShape& shape = view_.shape;
    PageTrace trace{capture_.decoded_tokens, shape.layers, LayerPages(view_), 0, 0, {}, {}};
    trace.page_bytes = static_cast<uint32_t>(attention::PageGeometry(shape).page_bytes());
    uint64_t clusters = 0;
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      for (uint32_t head = 0; head < shape.kv_heads; ++head) {
        clusters += attention::CountClusters(view_, layer, head);
      }
    }
    trace.clusters = static_cast<uint32_t>(clusters / (shape.layers * shape.kv_heads));
    trace.ranks.assign(size_t{trace.tokens} * trace.pages(), kPageRankMax);
    for (auto& early : trace.early) early.assign(trace.ranks.size(), kNotLikely);
    return trace;
  }

  void Record(uint32_t token, uint32_t layer, std::vector<Recording>* recordings) {
    const ModelShape& shape = view_.shape;
    ToFloat(shape.dtype, capture_.query(layer, token), queries_.size(), queries_.data());
    const size_t group_floats = size_t{shape.group()} * shape.head_dim;
    for (uint32_t head = 0; head < shape.kv_heads && HasScores(); ++head) {
      scorers_[size_t{layer} * shape.kv_heads + head].Score(
          std::span(queries_).subspan(head * group_floats, group_floats), &scores_[head]);
    }
    for (Recording& recording : *recordings) RecordPolicy(token, layer, &recording);
  }

 private:
  bool HasScores() const { return view_.indexes == attention::kClusterIndexes; }

  void RecordPolicy(uint32_t token, uint32_t layer, Recording* recording) {
    const std::span<PageRank> ranks = recording->trace.Step(token, layer);
    const Policy& policy = recording->policy;
    if (policy.SelectorFor(layer) == attention::Selector::kAll) {
      std::fill(ranks.begin(), ranks.end(), kPageRead);
      return;
    }
    const bool by_error = policy.cut == attention::Cut::kErrorBudget;
    const size_t group_floats = size_t{view_.shape.group()} * view_.shape.head_dim;
    for (const attention::Plan& plan : Plans(token, layer, policy)) {
      const auto queries = std::span(queries_).subspan(plan.kv_head * group_floats, group_floats);
      recording->early->Rank(layer, plan, queries,
                             {recording->trace.Early(kOpened, token, layer),
                              recording->trace.Early(kScored, token, layer)});
      const ClusterScores& scores = scores_[plan.kv_head];
      recording->read_exactly += plan.exact.size();
      recording->misordered +=
          RankPages(view_, layer, plan, by_error ? scores.optimistic : scores.mass, ranks);
    }
  }

  std::vector<attention::Plan> Plans(uint32_t token, uint32_t layer, const Policy& policy) {
    attention::RowStats stats;
    attention::StepRow row;
    row.view = capture_.view;
    row.policy = &policy;
    row.past_tokens = uint64_t{capture_.prompt_tokens} + token + 1;
    row.query_tokens = 1;
    row.query_only = true;
    row.query_dtype = view_.shape.dtype;
    row.queries = capture_.query(layer, token);
    row.out = out_.data();
    row.lse = lse_.data();
    row.stats = &stats;
    std::vector<attention::Plan> plans;
    attention::StepRequest request;
    request.layer = layer;
    request.rows = {&row, 1};
    request.plans = &plans;
    Must(backend_->Step(request));
    return plans;
  }

  attention::Backend* const backend_;
  const PageCapture& capture_;
  const SequenceView& view_;
  std::vector<ClusterScorer> scorers_;  // [layers][kv_heads]; none without scores
  std::vector<ClusterScores> scores_;   // [kv_heads]
  std::vector<float> queries_, out_, lse_;
};

void TraceCapture(attention::Backend* backend, const std::string& path) {
  const std::string index = absl::GetFlag(FLAGS_index);
  const PageCapture capture = Must(ReadPageCapture(
      path, ParseIndexText(index), absl::GetFlag(FLAGS_threads), absl::GetFlag(FLAGS_sections)));
  Recorder recorder(backend, capture);
  std::vector<Recording> recordings;
  for (const auto text : absl::StrSplit(absl::GetFlag(FLAGS_policies), ' ', absl::SkipEmpty())) {
    const std::string name(text);
    recordings.push_back({name, ParsePolicyText(name), recorder.EmptyTrace(), nullptr, 0, 0});
  }
  for (Recording& recording : recordings) {
    recording.early = std::make_unique<EarlyRanker>(*capture.view, recording.policy);
  }
  for (uint32_t token = 0; token < capture.decoded_tokens; ++token) {
    for (uint32_t layer = 0; layer < capture.view->shape.layers; ++layer) {
      recorder.Record(token, layer, &recordings);
    }
  }
  const std::filesystem::path folder(absl::GetFlag(FLAGS_out));
  for (const Recording& recording : recordings) {
    const std::string file =
        folder / absl::StrCat(std::filesystem::path(path).stem().string(), ".",
                              index == "clusters" ? "" : index + ".",
                              absl::StrReplaceAll(recording.name, {{":", "_"}}), ".trace");
    Must(WritePageTrace(file, recording.trace));
    std::printf(
        "%s: %u tokens, %u pages, %u clusters a head; %llu clusters read, %llu of them "
        "scored below one that was not\n",
        file.c_str(), recording.trace.tokens, recording.trace.pages(), recording.trace.clusters,
        static_cast<unsigned long long>(recording.read_exactly),
        static_cast<unsigned long long>(recording.misordered));
    std::fflush(stdout);
  }
}

int Main(const std::vector<char*>& arguments) {
  if (arguments.size() < 2) {
    std::fprintf(stderr, "usage: page_trace [--out=FOLDER] [--policies=...] CAPTURE...\n");
    return 2;
  }
  attention::CpuBackendOptions options;
  options.threads = absl::GetFlag(FLAGS_threads);
  const auto backend = attention::MakeCpuBackend(options);
  for (size_t i = 1; i < arguments.size(); ++i) TraceCapture(backend.get(), arguments[i]);
  return 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) { return attnd::bench::Main(absl::ParseCommandLine(argc, argv)); }
