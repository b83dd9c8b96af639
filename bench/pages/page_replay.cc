// SPDX-License-Identifier: Apache-2.0
//
// Page traces (bench/pages/page_trace.cc) against simulated pools: which eviction rule misses
// least, what prefetch adds, and how much of a step's selection the steps before it knew. Prints
// Markdown; figures are medians over the cases.
//
//   page_replay build/page-traces/16384-*.error-target.trace
//   page_replay --group=2 ...           two sequences that decode together share a pool
//   page_replay --group=4 --turns=8 ... four take turns of 8 tokens
//   page_replay --tables=ahead --windows_us=205,29.3,14.8 --link_gb_s=47 ...  what asking for pages
//                                       before a step has chosen would bring
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "bench/pages/page_ahead_table.h"
#include "bench/pages/page_behind_table.h"
#include "bench/pages/page_cases.h"
#include "bench/pages/page_overlap.h"
#include "bench/pages/page_pools.h"
#include "bench/pages/page_trace_file.h"
#include "bench/statistics.h"
#include "bench/support.h"

ABSL_FLAG(std::string, tables, "rules,prefetch,overlap",
          "what to print, separated by commas; also: ahead, behind");
ABSL_FLAG(uint32_t, group, 1, "sequences that share a pool");
ABSL_FLAG(uint32_t, turns, 0, "tokens of a sequence's turn; 0: all decode together");
ABSL_FLAG(uint32_t, warm, 32, "first tokens of each sequence, which are not counted");
ABSL_FLAG(uint32_t, scan_every, 0, "tokens between dense steps that read every page; 0: none");
ABSL_FLAG(std::vector<std::string>, pools, std::vector<std::string>({"5", "10", "25", "50"}),
          "pool sizes, percent of all pages");
ABSL_FLAG(std::vector<std::string>, windows_us, std::vector<std::string>({"205", "29.3", "14.8"}),
          "ahead: from when the layer before has attended, groups are opened, leaves are scored, "
          "until a step has chosen");
ABSL_FLAG(double, link_gb_s, 47, "ahead: what the link carries");
ABSL_FLAG(uint32_t, rows, 1, "ahead: rows of a step, each like the trace");
ABSL_FLAG(std::vector<std::string>, behind, std::vector<std::string>({"25", "50"}),
          "of the table `behind`: pools behind a GPU's cache, whose sizes --pools has");

namespace attnd::bench {
namespace {

constexpr double kNoPrefetch = -1;

// What one case came to with one pool.
struct Outcome {
  double read = 0;     // pages that counted steps read
  double missed = 0;   // of these, not in the pool
  double runs = 0;     // of missed neighbours: reads, once joined
  double fetched = 0;  // pages that were prefetched
  double useful = 0;   // of these, read before they were evicted
};

// Replays one case. A prefetch comes after each step, for its sequence's next layer: the pages that
// the layer read at its last token, and those of clusters that were within `share` of all clusters
// of being read.
class Replayer {
 public:
  Replayer(const PageCase& page_case, PagePool* pool, double share, const PageTrace& sizes)
      : case_(page_case),
        pool_(pool),
        layers_(sizes.layers),
        rank_max_(share < 0 ? 0 : static_cast<PageRank>(std::ceil(share * sizes.clusters))),
        prefetches_(share >= 0),
        unread_(page_case.pages, false) {}

  Outcome Run() {
    for (uint32_t i = 0; i < case_.steps.size(); ++i) {
      const Step& step = case_.steps[i];
      Count(step);
      pool_->Read(step, i);
      if (!prefetches_) continue;
      // A dense step in between says nothing about the next one.
      if (step.pages.size() < step.ranks.size() || step.counted) Remember(step);
      PrefetchNext(step, i);
    }
    return outcome_;
  }

 private:
  void Count(const Step& step) {
    uint32_t before = kNever;
    for (const uint32_t page : step.pages) {
      const bool missing = !pool_->resident(page);
      if (step.counted) {
        outcome_.read += 1;
        outcome_.missed += missing;
        outcome_.runs += missing && page != before + 1;
        outcome_.useful += !missing && unread_[page];
      }
      unread_[page] = false;
      if (missing) before = page;
    }
  }

  void Remember(const Step& step) {
    const size_t place = size_t{step.sequence} * layers_ + step.layer;
    if (last_.size() <= place) last_.resize(place + 1, nullptr);
    last_[place] = &step;
  }

  void PrefetchNext(const Step& step, uint32_t now) {
    const size_t place = size_t{step.sequence} * layers_ + (step.layer + 1) % layers_;
    if (place >= last_.size() || last_[place] == nullptr) return;
    const Step& last = *last_[place];
    wanted_.clear();
    for (uint32_t i = 0; i < last.ranks.size(); ++i) {
      if (last.ranks[i] <= rank_max_) wanted_.push_back(last.first_page + i);
    }
    if (wanted_.size() > pool_->capacity()) wanted_.resize(pool_->capacity());
    std::erase_if(fetched_ = wanted_, [&](uint32_t page) { return pool_->resident(page); });
    pool_->Prefetch(wanted_, now);
    for (const uint32_t page : fetched_) {
      if (!pool_->resident(page)) continue;  // there was no room
      outcome_.fetched += step.counted;
      unread_[page] = true;
    }
  }

  const PageCase& case_;
  PagePool* const pool_;
  const uint32_t layers_;
  const PageRank rank_max_;
  const bool prefetches_;
  std::vector<bool> unread_;       // fetched and not read since
  std::vector<const Step*> last_;  // [sequences][layers]
  std::vector<uint32_t> wanted_, fetched_;
  Outcome outcome_;
};

// A case with the sizes of its traces.
struct NamedCase {
  PageCase page_case;
  const PageTrace* sizes = nullptr;
};

Outcome Replay(const NamedCase& named, const PoolRule& rule, double pool_share, double prefetch) {
  const uint32_t pages = named.page_case.pages;
  const auto capacity = static_cast<uint32_t>(std::max(1.0, pool_share * pages));
  const auto pool = rule.make(pages, capacity);
  return Replayer(named.page_case, pool.get(), prefetch, *named.sizes).Run();
}

std::vector<Outcome> ReplayAll(const std::vector<NamedCase>& cases, const PoolRule& rule,
                               double pool_share, double prefetch) {
  std::vector<Outcome> outcomes(cases.size());
  for (size_t i = 0; i < cases.size(); ++i) {
    outcomes[i] = Replay(cases[i], rule, pool_share, prefetch);
  }
  return outcomes;
}

// Median over the cases of what `figure` makes of (case, outcome).
template <typename Figure>
double MedianOf(const std::vector<NamedCase>& cases, const std::vector<Outcome>& outcomes,
                const Figure& figure) {
  std::vector<double> values;
  for (size_t i = 0; i < cases.size(); ++i) {
    values.push_back(figure(static_cast<double>(cases[i].page_case.counted_tokens), outcomes[i]));
  }
  return Median(values);
}

std::vector<double> PoolShares(const absl::Flag<std::vector<std::string>>& flag = FLAGS_pools) {
  const std::vector<std::string> texts = absl::GetFlag(flag);
  std::vector<double> shares(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    double percent = 0;
    if (!absl::SimpleAtod(texts[i], &percent) || !(percent > 0 && percent <= 100)) {
      std::fprintf(stderr, "pool sizes: %s is not within 0 .. 100\n", texts[i].c_str());
      std::exit(2);
    }
    shares[i] = percent / 100;
  }
  return shares;
}

void PrintHead(const std::string& first, const std::string& rest) {
  std::string line = absl::StrCat("| ", first, " |"), rule = "|---|";
  for (const double share : PoolShares()) {
    absl::StrAppendFormat(&line, " pool %g%%%s |", share * 100, rest);
    rule += "---|";
  }
  std::printf("\n%s\n%s\n", line.c_str(), rule.c_str());
}

void PrintRules(const std::vector<NamedCase>& cases) {
  PrintHead("rule", ": hits, misses a token");
  const std::vector<double> shares = PoolShares();
  const std::vector<PoolRule> rules = PoolRules();
  for (const PoolRule& rule : rules) {
    std::string line = absl::StrCat("| ", rule.name, " |");
    for (const double share : shares) {
      const std::vector<Outcome> outcomes = ReplayAll(cases, rule, share, kNoPrefetch);
      absl::StrAppendFormat(
          &line, " %.1f%%, %.0f |",
          100 * MedianOf(cases, outcomes,
                         [](double, const Outcome& o) { return 1 - o.missed / o.read; }),
          MedianOf(cases, outcomes,
                   [](double tokens, const Outcome& o) { return o.missed / tokens; }));
    }
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }
}

void PrintPrefetch(const std::vector<NamedCase>& cases) {
  const std::vector<std::string> names = {"LRU", "LFU of 8, half-life 4",
                                          "LFU of 8, half-life 4, admitting"};
  PrintHead("rule, prefetch", ": waited for (in reads) + fetched ahead (useful)");
  for (const PoolRule& rule : PoolRules()) {
    if (std::find(names.begin(), names.end(), rule.name) == names.end()) continue;
    for (const double prefetch : {kNoPrefetch, 0.0, 0.01, 0.02, 0.05}) {
      std::string line = absl::StrFormat("| %s, ", rule.name);
      line += prefetch < 0 ? "none |" : absl::StrFormat("last selection + %g%% |", 100 * prefetch);
      for (const double share : PoolShares()) {
        const std::vector<Outcome> outcomes = ReplayAll(cases, rule, share, prefetch);
        absl::StrAppendFormat(
            &line, " %.0f (%.0f) + %.0f (%.0f%%) |",
            MedianOf(cases, outcomes,
                     [](double tokens, const Outcome& o) { return o.missed / tokens; }),
            MedianOf(cases, outcomes,
                     [](double tokens, const Outcome& o) { return o.runs / tokens; }),
            MedianOf(cases, outcomes,
                     [](double tokens, const Outcome& o) { return o.fetched / tokens; }),
            MedianOf(cases, outcomes, [](double, const Outcome& o) {
              return o.fetched == 0 ? 0 : 100 * o.useful / o.fetched;
            }));
      }
      std::printf("%s\n", line.c_str());
    }
  }
}

std::vector<NamedCase> MakeCases(const std::vector<PageTrace>& traces) {
  const size_t group = std::max(1u, absl::GetFlag(FLAGS_group));
  CaseOptions options;
  options.order = absl::GetFlag(FLAGS_turns) == 0 ? Order::kBatch : Order::kTurns;
  options.turn_tokens = std::max(1u, absl::GetFlag(FLAGS_turns));
  options.warm_tokens = absl::GetFlag(FLAGS_warm);
  options.scan_every = absl::GetFlag(FLAGS_scan_every);
  std::vector<NamedCase> cases;
  for (size_t i = 0; i + group <= traces.size(); i += group) {
    std::vector<const PageTrace*> members;
    for (size_t j = i; j < i + group; ++j) members.push_back(&traces[j]);
    cases.push_back({MakeCase(members, options), members[0]});
  }
  return cases;
}

AheadLink LinkOf(const std::vector<PageTrace>& traces) {
  const PageTrace& trace = traces[0];
  for (const PageTrace& other : traces) {
    if (other.page_bytes == trace.page_bytes) continue;
    Must(absl::InvalidArgumentError("ahead: traces of pages of different sizes"));
  }
  AheadLink link;
  link.gb_s = absl::GetFlag(FLAGS_link_gb_s);
  link.page_bytes = trace.page_bytes;
  link.rows = absl::GetFlag(FLAGS_rows);
  const std::vector<std::string> texts = absl::GetFlag(FLAGS_windows_us);
  double* const windows[] = {&link.lag1_us, &link.lag0_us[kOpened], &link.lag0_us[kScored]};
  bool is_valid =
      texts.size() == std::size(windows) && link.gb_s > 0 && link.rows > 0 && link.page_bytes > 0;
  for (size_t i = 0; is_valid && i < texts.size(); ++i) {
    is_valid = absl::SimpleAtod(texts[i], windows[i]) && *windows[i] >= 0;
  }
  if (!is_valid) {
    std::fprintf(
        stderr,
        "--windows_us are three numbers from 0 on, --link_gb_s and --rows are above 0, and "
        "traces name the bytes of a page\n");
    std::exit(2);
  }
  return link;
}

std::vector<const PageCase*> PageCases(const std::vector<NamedCase>& cases) {
  std::vector<const PageCase*> page_cases;
  for (const NamedCase& named : cases) page_cases.push_back(&named.page_case);
  return page_cases;
}

std::vector<PageTrace> ReadTraces(const std::vector<char*>& arguments) {
  std::vector<PageTrace> traces;
  for (size_t i = 1; i < arguments.size(); ++i) {
    traces.push_back(Must(ReadPageTrace(arguments[i])));
    const PageTrace& trace = traces.back();
    if (trace.tokens != traces[0].tokens || trace.layers != traces[0].layers) {
      std::fprintf(stderr, "%s has other sizes than %s\n", arguments[i], arguments[1]);
      std::exit(2);
    }
  }
  return traces;
}

int Main(const std::vector<char*>& arguments) {
  const std::vector<PageTrace> traces = ReadTraces(arguments);
  if (!traces.empty() && std::max(absl::GetFlag(FLAGS_warm), 16u) >= traces[0].tokens) {
    std::fprintf(stderr, "--warm: traces have %u tokens\n", traces[0].tokens);
    return 2;
  }
  const std::vector<NamedCase> cases = MakeCases(traces);
  if (cases.empty()) {
    std::fprintf(stderr, "usage: page_replay [--tables=...] TRACE..., at least --group of them\n");
    return 2;
  }
  std::vector<double> reads;
  for (const NamedCase& named : cases) {
    double read = 0;
    for (const Step& step : named.page_case.steps) {
      if (step.counted) read += static_cast<double>(step.pages.size());
    }
    reads.push_back(read / named.page_case.counted_tokens);
  }
  std::printf("%zu cases of %zu sequences, %u pages in the first, %.0f pages read a token\n",
              cases.size(), traces.size() / cases.size(), cases[0].page_case.pages, Median(reads));
  for (const auto table : absl::StrSplit(absl::GetFlag(FLAGS_tables), ',')) {
    if (table == "rules") PrintRules(cases);
    if (table == "prefetch") PrintPrefetch(cases);
    if (table == "ahead") PrintAhead(PageCases(cases), PoolShares(), LinkOf(traces));
    if (table == "behind") PrintBehind(PageCases(cases), PoolShares(), PoolShares(FLAGS_behind));
    if (table == "overlap") PrintOverlap(traces, absl::GetFlag(FLAGS_warm));
  }
  return 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) { return attnd::bench::Main(absl::ParseCommandLine(argc, argv)); }
