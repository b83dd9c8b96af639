// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/page_ahead_table.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/pages/page_ahead.h"
#include "bench/pages/page_pool_rules.h"
#include "bench/statistics.h"

namespace attnd::bench {
namespace {

using Source = AheadRule::Source;

constexpr double kMegabyte = 1e6;

std::vector<AheadRule> Rules() {
  constexpr double kAll = std::numeric_limits<double>::infinity();
  return {
      {"nothing", Source::kNothing, kAll, false},
      {"lag 1: last selection", Source::kLastSelection, kAll, false},
      {"lag 1: last selection, what is new in it", Source::kLastSelection, kAll, true},
      {"lag 0: opened, as much as was read last", Source::kOpened, 1, false},
      {"lag 0: opened, all", Source::kOpened, kAll, false},
      {"lag 0: opened, what is new", Source::kOpened, kAll, true},
      {"lag 0: scored, twice the last cut and above", Source::kScored, 0.5, false},
      {"lag 0: scored, the last cut and above", Source::kScored, 1, false},
      {"lag 0: scored, all", Source::kScored, kAll, false},
      {"what is read, known when groups are opened", Source::kReadAtOpened, kAll, false},
      {"what is read, known when leaves are scored", Source::kReadAtScored, kAll, false},
  };
}

// Pages and microseconds of a step, all rows.
struct PerStep {
  double read, missed, in_time, late, asked, wasted;
};

PerStep Replay(const PageCase& page_case, const PoolRule& pool_rule, double pool_share,
               const AheadRule& rule, const AheadLink& link) {
  const auto pages_in = [&](double us) {
    return static_cast<uint64_t>(us * link.gb_s * 1e3 / link.page_bytes / link.rows);
  };
  const AheadRoom room{{pages_in(link.lag0_us[kOpened]), pages_in(link.lag0_us[kScored])},
                       pages_in(link.lag1_us)};
  const auto capacity = static_cast<uint32_t>(std::max(1.0, pool_share * page_case.pages));
  const auto pool = pool_rule.make(page_case.pages, capacity);
  const AheadCounts counts = CountAhead(page_case, rule, room, pool.get());
  double steps = 0;
  for (const Step& step : page_case.steps) steps += step.counted;
  const auto per_step = [&](uint64_t pages) {
    return static_cast<double>(pages) * link.rows / steps;
  };
  return {per_step(counts.read), per_step(counts.missed), per_step(counts.in_time),
          per_step(counts.late), per_step(counts.asked),  per_step(counts.wasted)};
}

// Median over the cases of one figure.
double MedianOf(const std::vector<PerStep>& steps, double PerStep::*figure) {
  std::vector<double> values;
  for (const PerStep& step : steps) values.push_back(step.*figure);
  return Median(values);
}

void PrintLine(const std::vector<const PageCase*>& cases, const PoolRule& pool, double pool_share,
               const AheadRule& rule, const AheadLink& link) {
  std::vector<PerStep> steps;
  for (const PageCase* page_case : cases) {
    steps.push_back(Replay(*page_case, pool, pool_share, rule, link));
  }
  const double missed = MedianOf(steps, &PerStep::missed);
  const double in_time = MedianOf(steps, &PerStep::in_time);
  const double wasted = MedianOf(steps, &PerStep::wasted);
  const double page_us = link.page_bytes / (link.gb_s * 1e3);
  std::printf("| %s | %.0f | %.0f | %.0f | %.0f | %.0f, %.2f MB | %.0f | %.0f (%.0f%%) | %.0f |\n",
              rule.name.c_str(), missed, MedianOf(steps, &PerStep::asked), in_time,
              MedianOf(steps, &PerStep::late), wasted, wasted * link.page_bytes / kMegabyte,
              missed * page_us, in_time * page_us, missed > 0 ? 100 * in_time / missed : 0,
              wasted * page_us);
  std::fflush(stdout);
}

void PrintHead(const std::string& title, double read, const AheadLink& link) {
  std::printf(
      "\n%s: %.0f pages of %u bytes read a step, rows: %u; %.3g GB/s; windows %.3g, %.3g, %.3g "
      "us\n\n"
      "| asked for ahead | misses | asked for | in time | late | wasted | fetch us | hidden us "
      "| wasted us |\n|---|---|---|---|---|---|---|---|---|\n",
      title.c_str(), read, link.page_bytes, link.rows, link.gb_s, link.lag1_us,
      link.lag0_us[kOpened], link.lag0_us[kScored]);
}

}  // namespace

void PrintAhead(const std::vector<const PageCase*>& cases, const std::vector<double>& pool_shares,
                const AheadLink& link) {
  const AheadRule nothing = Rules().front();
  std::vector<PerStep> steps;
  const PoolRule cache = DeviceCache("cache");
  for (const PageCase* page_case : cases) {
    steps.push_back(Replay(*page_case, cache, 1, nothing, link));
  }
  const double read = MedianOf(steps, &PerStep::read);
  for (const double share : pool_shares) {
    PrintHead(absl::StrFormat("cache of %g%%", 100 * share), read, link);
    for (const AheadRule& rule : Rules()) PrintLine(cases, cache, share, rule, link);
  }
  for (const PoolRule& pool : {LastRead("what the last token read, alone"),
                               LastOpened("what the last token opened, alone")}) {
    PrintHead(absl::StrCat("a cache of ", pool.name), read, link);
    for (const AheadRule& rule : Rules()) {
      const bool useful = rule.source == Source::kNothing || rule.source == Source::kOpened;
      if (useful && !rule.changed_only) PrintLine(cases, pool, 1, rule, link);
    }
  }
}

}  // namespace attnd::bench
