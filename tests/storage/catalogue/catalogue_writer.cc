// SPDX-License-Identifier: Apache-2.0
//
// A process for the catalogue's tests to kill: opens a catalogue for writing, says "open", then
// takes numbers and commits a sequence under the first one, forever. Says "FIRST COUNT" once both
// are done.
//
//   catalogue_writer FOLDER SEED
#include <cstdio>
#include <cstdlib>

#include "storage/catalogue/catalogue.h"
#include "tests/storage/catalogue/catalogue_support.h"

int main(int argc, char** argv) {
  using namespace attnd::storage;        // NOLINT(google-build-using-namespace)
  using namespace attnd::storage::test;  // NOLINT(google-build-using-namespace)
  if (argc != 3) return 2;
  auto catalogue = Catalogue::Open(argv[1], Catalogue::Mode::kReadWrite);
  if (!catalogue.ok()) {
    std::fprintf(stderr, "%s\n", catalogue.status().ToString().c_str());
    return 1;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::puts("open");
  Random random(std::strtoull(argv[2], nullptr, 10));
  while (true) {
    const uint64_t count = 1 + random.Below(random.Below(10) == 0 ? 10000 : 4);
    const auto first = (*catalogue)->TakeNumbers(count);
    if (!first.ok()) return 1;
    CatalogueChanges changes;
    changes.sequences.push_back(RandomSequence(&random, *first));
    changes.segments.push_back(RandomSegment(&random, ChainOf(*first)));
    if (!(*catalogue)->Commit(changes).ok()) return 1;
    std::printf("%llu %llu\n", static_cast<unsigned long long>(*first),
                static_cast<unsigned long long>(count));
  }
}
