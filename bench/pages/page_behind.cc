// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/page_behind.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/pages/page_pool_rules.h"
#include "bench/statistics.h"

namespace attnd::bench {
namespace {

// Guesses at what a layer's step will find in no memory.
enum Guess : size_t {
  kBrought,   // what the host brought for the layer's last step
  kSelected,  // what the layer's last step read
  kGuesses
};

struct Outcome {
  double cache_misses = 0;  // of counted steps
  double misses = 0;        // of these, not in the pool either
  double first = 0;         // of these, never read before
  std::array<double, kGuesses> guessed = {}, right = {};
};

class BehindReplayer {
 public:
  BehindReplayer(const CaseBehind& of, double cache_share, double pool_share)
      : case_(*of.page_case),
        layers_(of.layers),
        cache_(Make(DeviceCache(""), cache_share)),
        pool_(Make(StoragePool(""), pool_share)),
        known_(case_.pages, false) {}

  Outcome Run() {
    for (uint32_t i = 0; i < case_.steps.size(); ++i) {
      const Step& step = case_.steps[i];
      const size_t place = size_t{step.sequence} * layers_ + step.layer;
      if (last_.size() <= place) last_.resize(place + 1);
      Step missed = step;
      std::erase_if(missed.pages, [&](uint32_t page) { return cache_->resident(page); });
      if (step.counted) Count(missed, last_[place]);
      for (const uint32_t page : step.pages) known_[page] = true;
      cache_->Read(step, i);
      pool_->Read(missed, i);
      // A dense step in between says nothing about the next one.
      const bool dense = !step.counted && step.pages.size() == step.ranks.size();
      if (!dense) last_[place] = {&step, std::move(missed.pages)};
    }
    return outcome_;
  }

 private:
  struct Last {
    const Step* step = nullptr;
    std::vector<uint32_t> brought;
  };

  std::unique_ptr<PagePool> Make(const PoolRule& rule, double share) const {
    return rule.make(case_.pages, static_cast<uint32_t>(std::max(1.0, share * case_.pages)));
  }
  bool InNoMemory(uint32_t page) const { return !cache_->resident(page) && !pool_->resident(page); }

  void Count(const Step& missed, const Last& last) {
    outcome_.cache_misses += static_cast<double>(missed.pages.size());
    for (const uint32_t page : missed.pages) {
      if (!InNoMemory(page)) continue;
      outcome_.misses += 1;
      outcome_.first += known_[page] ? 0 : 1;
    }
    if (last.step == nullptr) return;
    for (const uint32_t page : last.brought) Judge(kBrought, page, missed);
    for (const uint32_t page : last.step->pages) Judge(kSelected, page, missed);
  }
  void Judge(size_t guess, uint32_t page, const Step& missed) {
    if (!InNoMemory(page)) return;
    outcome_.guessed[guess] += 1;
    outcome_.right[guess] +=
        std::binary_search(missed.pages.begin(), missed.pages.end(), page) ? 1 : 0;
  }

  const PageCase& case_;
  const uint32_t layers_;
  const std::unique_ptr<PagePool> cache_, pool_;
  std::vector<bool> known_;  // pages that some step has read
  std::vector<Last> last_;   // [sequences][layers]
  Outcome outcome_;
};

}  // namespace

void PrintBehind(std::span<const CaseBehind> cases, std::span<const double> cache_shares,
                 std::span<const double> pool_shares) {
  std::printf(
      "\n| cache, pool | not in the cache | in no memory | of these for the first time | brought "
      "last "
      "time: right of read ahead | selected last time |\n|---|---|---|---|---|---|\n");
  for (const double cache : cache_shares) {
    for (const double pool : pool_shares) {
      std::vector<std::pair<double, Outcome>> outcomes;
      for (const CaseBehind& of : cases) {
        outcomes.push_back({of.page_case->counted_tokens, BehindReplayer(of, cache, pool).Run()});
      }
      const auto median = [&](const auto& figure) {
        std::vector<double> values;
        for (const auto& [tokens, outcome] : outcomes) values.push_back(figure(outcome) / tokens);
        return Median(values);
      };
      std::string line =
          absl::StrFormat("| %g%%, %g%% | %.0f | %.1f | %.1f |", cache * 100, pool * 100,
                          median([](const Outcome& o) { return o.cache_misses; }),
                          median([](const Outcome& o) { return o.misses; }),
                          median([](const Outcome& o) { return o.first; }));
      for (size_t g = 0; g < kGuesses; ++g) {
        absl::StrAppendFormat(&line, " %.1f of %.1f |",
                              median([g](const Outcome& o) { return o.right[g]; }),
                              median([g](const Outcome& o) { return o.guessed[g]; }));
      }
      std::printf("%s\n", line.c_str());
    }
  }
}

}  // namespace attnd::bench
