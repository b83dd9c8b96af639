// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/page_cases.h"

#include <algorithm>
#include <numeric>

namespace attnd::bench {
namespace {

class CaseMaker {
 public:
  CaseMaker(std::span<const PageTrace* const> traces, const CaseOptions& options)
      : traces_(traces), options_(options) {
    for (const PageTrace* trace : traces) {
      base_.push_back(result_.pages);
      result_.pages += trace->pages();
    }
  }

  PageCase Make() {
    const uint32_t tokens = traces_[0]->tokens;
    const bool turns = options_.order == Order::kTurns;
    const uint32_t stride = turns ? std::min(options_.turn_tokens, tokens) : 1;
    for (uint32_t begin = 0; begin < tokens; begin += stride) {
      if (turns) {
        AddTurns(begin, std::min(begin + stride, tokens));
      } else {
        AddBatch(begin);
      }
    }
    FindNextReads();
    return std::move(result_);
  }

 private:
  void AddTurns(uint32_t begin, uint32_t end) {
    for (uint32_t sequence = 0; sequence < traces_.size(); ++sequence) {
      for (uint32_t token = begin; token < end; ++token) {
        for (uint32_t layer = 0; layer < traces_[0]->layers; ++layer) Add(sequence, token, layer);
        EndToken(sequence, token);
      }
    }
  }

  void AddBatch(uint32_t token) {
    for (uint32_t layer = 0; layer < traces_[0]->layers; ++layer) {
      for (uint32_t sequence = 0; sequence < traces_.size(); ++sequence) {
        Add(sequence, token, layer);
      }
    }
    for (uint32_t sequence = 0; sequence < traces_.size(); ++sequence) EndToken(sequence, token);
  }

  Step& Add(uint32_t sequence, uint32_t token, uint32_t layer) {
    const PageTrace& trace = *traces_[sequence];
    Step& step = result_.steps.emplace_back();
    step.token = tokens_;
    step.sequence = sequence;
    step.layer = layer;
    step.first_page = base_[sequence] + layer * trace.layer_pages;
    step.ranks = trace.Step(token, layer);
    for (const EarlyMoment moment : {kOpened, kScored}) {
      step.early[moment] = trace.Early(moment, token, layer);
    }
    for (uint32_t page = 0; page < trace.layer_pages; ++page) {
      if (step.ranks[page] == kPageRead) step.pages.push_back(step.first_page + page);
    }
    step.counted = token >= options_.warm_tokens;
    return step;
  }

  void EndToken(uint32_t sequence, uint32_t token) {
    result_.counted_tokens += token >= options_.warm_tokens;
    ++tokens_;
    if (options_.scan_every == 0 || (token + 1) % options_.scan_every != 0) return;
    for (uint32_t layer = 0; layer < traces_[0]->layers; ++layer) {
      Step& step = Add(sequence, token, layer);
      step.counted = false;
      step.pages.resize(traces_[sequence]->layer_pages);
      std::iota(step.pages.begin(), step.pages.end(), step.first_page);
    }
  }

  void FindNextReads() {
    std::vector<uint32_t> next(result_.pages, kNever);
    for (size_t i = result_.steps.size(); i-- > 0;) {
      Step& step = result_.steps[i];
      for (const uint32_t page : step.pages) {
        step.next.push_back(next[page]);
        next[page] = static_cast<uint32_t>(i);
      }
    }
  }

  const std::span<const PageTrace* const> traces_;
  const CaseOptions options_;
  std::vector<uint32_t> base_;  // [sequences] first page of each
  uint32_t tokens_ = 0;
  PageCase result_;
};

}  // namespace

PageCase MakeCase(std::span<const PageTrace* const> traces, const CaseOptions& options) {
  return CaseMaker(traces, options).Make();
}

}  // namespace attnd::bench
