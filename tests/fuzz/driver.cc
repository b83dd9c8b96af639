// SPDX-License-Identifier: Apache-2.0
//
// Drives a fuzz target where there is no libFuzzer: inputs that are good by a seed, damaged one to
// eight times; and writes inputs for libFuzzer to begin with.
//
//   attnd_fuzz_... --runs=1000000 --seed=7
//   attnd_fuzz_... --write_corpus=FOLDER --runs=100
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "tests/fuzz/target.h"

ABSL_FLAG(uint64_t, runs, 100000, "how many inputs are tried");
ABSL_FLAG(uint64_t, seed, 0, "0: ATTND_TEST_SEED, or a fixed one");
ABSL_FLAG(std::string, write_corpus, "", "a folder: good inputs are written there, none is tried");

namespace attnd::fuzz {
namespace {

uint64_t Seed() {
  if (absl::GetFlag(FLAGS_seed) != 0) return absl::GetFlag(FLAGS_seed);
  const char* text = std::getenv("ATTND_TEST_SEED");
  return text == nullptr ? 20240607 : std::strtoull(text, nullptr, 10);
}

// Numbers at which sizes and signs turn.
uint64_t Awkward(std::mt19937_64* random) {
  const uint64_t power = uint64_t{1} << Below(random, 64);
  return power + Below(random, 3) - 1;
}

void Overwrite(std::mt19937_64* random, size_t at, std::string* bytes) {
  const uint64_t number = Awkward(random);
  const size_t width = size_t{1} << Below(random, 4);
  std::memcpy(bytes->data() + at, &number, std::min(width, bytes->size() - at));
}

void Damage(std::mt19937_64* random, std::string* bytes) {
  if (bytes->empty()) bytes->assign(1 + Below(random, 64), '\0');
  const size_t at = Below(random, bytes->size());
  const size_t run = std::min<size_t>(1 + Below(random, 16), bytes->size() - at);
  switch (Below(random, 7)) {
    case 0:
      (*bytes)[at] = static_cast<char>((*bytes)[at] ^ (1 << Below(random, 8)));
      return;
    case 1:
      (*bytes)[at] = static_cast<char>(Below(random, 256));
      return;
    case 2:
      bytes->replace(at, run, std::string(run, Below(random, 2) == 0 ? '\0' : '\xff'));
      return;
    case 3:
      bytes->resize(at);
      return;
    case 4:
      bytes->insert(at, bytes->substr(Below(random, bytes->size()), run));
      return;
    case 5:
      bytes->erase(at, run);
      return;
    default:
      Overwrite(random, at, bytes);
  }
}

void Try(const std::string& bytes) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

void Run(std::mt19937_64* random, uint64_t runs) {
  for (uint64_t run = 0; run < runs; ++run) {
    std::string bytes = GoodInput(random);
    Try(bytes);
    for (uint64_t left = 1 + Below(random, 8); left > 0; --left) Damage(random, &bytes);
    Try(bytes);
  }
  std::printf("%" PRIu64 " runs\n", runs);
}

void WriteCorpus(std::mt19937_64* random, const std::string& folder, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    std::ofstream(folder + "/" + std::to_string(i), std::ios::binary) << GoodInput(random);
  }
}

}  // namespace
}  // namespace attnd::fuzz

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const uint64_t seed = attnd::fuzz::Seed(), runs = absl::GetFlag(FLAGS_runs);
  std::printf("seed %" PRIu64 "\n", seed);
  std::mt19937_64 random(seed);
  const std::string corpus = absl::GetFlag(FLAGS_write_corpus);
  if (corpus.empty()) {
    attnd::fuzz::Run(&random, runs);
  } else {
    attnd::fuzz::WriteCorpus(&random, corpus, runs);
  }
  return 0;
}
