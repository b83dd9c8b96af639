#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# test.sh [STAGE...]: sets up, builds and runs every check, or only the stages named. The last line is
# `N passed, N failed`; the exit status says whether anything failed.
#
#   format         clang-format would change nothing
#   release        optimised build of everything, ctest
#   python         pytest against the release server: clients, model runner, end to end, deployment, scripts, training texts
#   asan           address and undefined-behaviour sanitizers: build of everything, ctest
#   asan_python    the end-to-end bad-input tests against the sanitized server
#   tsan           thread sanitizer: in-process tests of what has threads, ctest
#   clang          clang build with thread-safety analysis, warnings are errors
#   tidy           clang-tidy over the project's C++ sources
set -euo pipefail
# shellcheck source=scripts/lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/setup.sh"
# shellcheck source=scripts/lib/stages.sh
source "${ATTND_ROOT}/scripts/lib/stages.sh"

all_stages=(format release python asan asan_python tsan clang tidy)
ATTND_RESULTS="${ATTND_BUILD}/test-results"
export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
export TSAN_OPTIONS="second_deadlock_stack=1:${TSAN_OPTIONS:-}"

stage_format() { check clang-format "${ATTND_ROOT}/scripts/format.sh" --check; }

stage_release() {
  check "release build" build_preset release
  run_ctest "${ATTND_BUILD}"
}

stage_python() { run_pytest tests/python tests/scripts models/training; }

stage_asan() {
  check "asan build" build_preset asan
  run_ctest "${ATTND_BUILD}/asan"
}

stage_asan_python() {
  [[ -x "${ATTND_BUILD}/asan/bin/attnd" ]] || check "asan server build" build_preset asan attnd
  ATTND_BIN="${ATTND_BUILD}/asan/bin/attnd" run_pytest tests/python -k bad_input
}

stage_tsan() {
  check "tsan build" build_preset tsan
  run_ctest "${ATTND_BUILD}/tsan"
}

configure_clang() { configure_preset clang -DATTND_TESTS=OFF -DATTND_BENCH=OFF; }

build_clang() {
  configure_clang && (cd "${ATTND_ROOT}" && cmake --build --preset clang -j "$(build_jobs)")
}

stage_clang() { check "clang build" build_clang; }

stage_tidy() {
  cd "${ATTND_ROOT}"
  [[ -f build/clang/build.ninja ]] || configure_clang
  cmake --build --preset clang --target attnd_proto attnd_archive_proto \
    storage/generated/storage/catalogue/records.pb.h >/dev/null
  # shellcheck source=scripts/lib/tidy.sh
  source scripts/lib/tidy.sh
  tidy_all build/clang "${ATTND_BUILD}/tidy-cache" "${ATTND_RESULTS}/tidy.checked"
}

stages=("$@")
[[ ${#stages[@]} -gt 0 ]] || stages=("${all_stages[@]}")
for stage in "${stages[@]}"; do
  [[ " ${all_stages[*]} " == *" ${stage} "* ]] || die "no stage ${stage}; there are: ${all_stages[*]}"
done

# Two runs in one checkout would write over each other's builds and results.
mkdir -p "${ATTND_BUILD}"
exec 9>"${ATTND_BUILD}/test.lock"
flock -n 9 || die "another scripts/test.sh is running in this checkout"

say "Set-up"
setup_packages "${ATTND_BUILD_PACKAGES[@]}" "${ATTND_PYTHON_PACKAGES[@]}" "${ATTND_CHECK_PACKAGES[@]}"
setup_prometheus
setup_venv
run_stages "${stages[@]}"
