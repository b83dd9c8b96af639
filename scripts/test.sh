#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# test.sh [--full] [STAGE...]: sets up, builds and runs every check, or only the stages named. The last line is
# `N passed, N failed`; the exit status says whether anything failed.
#
#   format         clang-format would change nothing
#   release        optimised build of everything but the tests that the same run's stage asan has, ctest
#   python         pytest against the release server: clients, model runner, end to end, deployment, scripts, training texts
#   transformers   pytest with PyTorch and Transformers in build/venv-transformers: attnd.transformers
#   asan           address and undefined-behaviour sanitizers: build of everything but the benchmarks, ctest
#   asan_python    the end-to-end bad-input tests against the sanitized server
#   tsan           thread sanitizer: in-process tests of what has threads, ctest
#   clang          clang compiles what is written for single instruction sets; left to the stage asan where that runs
#   tidy           clang-tidy over the product's C++ sources, with clang's warnings and thread-safety analysis
#
# ATTND_TRANSFORMERS_VERSION=4.57.6 chooses the version of Transformers, ATTND_TRANSFORMERS_VERSION=none skips the stage.
#
# --full takes longer and leaves nothing out: docs/TESTING.md lists what it does more.
set -euo pipefail
# shellcheck source=scripts/lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/setup.sh"
# shellcheck source=scripts/lib/stages.sh
source "${ATTND_ROOT}/scripts/lib/stages.sh"
# shellcheck source=scripts/lib/ahead.sh
source "${ATTND_ROOT}/scripts/lib/ahead.sh"

all_stages=(format release python transformers asan asan_python tsan clang tidy)
# Apart from the test-results of build folders, the release build's too, which their stages remove first.
ATTND_RESULTS="${ATTND_BUILD}/test-run"
export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
export TSAN_OPTIONS="second_deadlock_stack=1:${TSAN_OPTIONS:-}"

stage_format() { check clang-format "${ATTND_ROOT}/scripts/format.sh" --check; }

build_asan() { build_locked asan "-DATTND_FULL=${full}" "$@"; }
build_tsan() { build_locked tsan "-DATTND_FULL=${full}"; }

stage_release() {
  local all_tests=true
  # Each test once: what the stage asan has is left to it.
  if ! "${full}" && [[ " ${stages[*]} " == *" asan "* ]]; then all_tests=false; fi
  check "release build" build_preset release "-DATTND_ALL_TESTS=${all_tests}"
  build_ahead "${builds_ahead[@]}"
  run_ctest "${ATTND_BUILD}"
}

# A file of tests runs in one process, as its tests may share a server; files run side by side, in the order that
# tests/python/conftest.py gives. One more process than cores, as tests wait for servers.
pytest_at_once=(-n "$(($(nproc) + 1))" --dist loadfile --no-loadscope-reorder)
# build/venv has no PyTorch, and a skipped test would count as failed.
pytest_without_transformers=("${pytest_at_once[@]}" --ignore-glob='*/test_transformers*')

stage_python() {
  setup_venv
  build_ahead "${builds_ahead[@]}"
  run_pytest "${pytest_without_transformers[@]}" tests/python tests/scripts models/training
}

transformers_version="${ATTND_TRANSFORMERS_VERSION:-5.23.0}"

# Starts to make the Python environments, for which the stages of Python then wait: downloads, and one process that unpacks
# them, would leave the cores idle.
start_venvs() {
  (
    [[ " $* " != *python* ]] || setup_venv >"${ATTND_BUILD}/venv.log" 2>&1
    [[ " $* " == *" transformers "* && "${transformers_version}" != none ]] || exit 0
    setup_transformers_venv "${transformers_version}" >"${ATTND_BUILD}/venv-transformers.log" 2>&1
  ) 9>&- &
}

# Apart from the stage python, because PyTorch takes gigabytes of downloads and not every machine can have it.
stage_transformers() {
  if [[ "${transformers_version}" == none ]]; then
    skip_stage "ATTND_TRANSFORMERS_VERSION=none"
  elif ! setup_transformers_venv "${transformers_version}"; then
    [[ -z "${ATTND_TRANSFORMERS_VERSION:-}" ]] || die "Transformers ${transformers_version} cannot be installed here"
    skip_stage "PyTorch or Transformers cannot be installed here"
  else
    build_ahead "${builds_ahead[@]}"
    ATTND_VENV="${ATTND_TRANSFORMERS_VENV}" run_pytest "${pytest_at_once[@]}" tests/python/test_transformers*.py
  fi
}

stage_asan() {
  check "asan build" build_asan
  build_ahead "${builds_ahead[@]}"
  run_ctest "${ATTND_BUILD}/asan"
}

stage_asan_python() {
  setup_venv
  [[ -x "${ATTND_BUILD}/asan/bin/attnd" ]] || check "asan server build" build_asan attnd
  ATTND_BIN="${ATTND_BUILD}/asan/bin/attnd" run_pytest "${pytest_without_transformers[@]}" tests/python -k bad_input
}

stage_tsan() {
  check "tsan build" build_tsan
  run_ctest "${ATTND_BUILD}/tsan"
}

configure_clang() { configure_preset clang -DATTND_TESTS=OFF -DATTND_BENCH=OFF; }

# What only code generation finds: instructions that a function's instruction set lacks. All else clang-tidy finds.
build_clang() {
  local targets=()
  configure_clang || return 1
  if ! "${full}"; then
    mapfile -t targets < <(cd "${ATTND_ROOT}" && sources_of_instructions)
    ((${#targets[@]} > 0)) || return 1
    targets=(--target "${targets[@]/%/^}")
  fi
  (cd "${ATTND_ROOT}" && cmake --build --preset clang -j "$(build_jobs)" "${targets[@]}")
}

# The sources that are compiled for single instruction sets. Ninja's name for a source's object is SOURCE^.
sources_of_instructions() {
  grep -rlE --include='*.cc' '^#include [<"](hwy/|immintrin\.h)' "${PWD}"/{common,attention,storage,engine,gpu,server}
}

# Not in a short run that has stage asan: that build is clang's, too, and generates all code.
stage_clang() {
  if ! "${full}" && [[ " ${stages[*]} " == *" asan "* ]]; then
    skip_stage "the stage asan compiles with clang"
  else
    check "clang build" build_clang
  fi
}

stage_tidy() {
  local headers
  [[ -f "${ATTND_BUILD}/clang/build.ninja" ]] || configure_clang
  mapfile -t headers < <(ninja -C "${ATTND_BUILD}/clang" -t targets all | sed -n 's/^\(.*\.pb\.h\): .*/\1/p')
  (cd "${ATTND_ROOT}" && cmake --build --preset clang --target "${headers[@]}" >/dev/null)
  # shellcheck source=scripts/lib/tidy.sh
  source "${ATTND_ROOT}/scripts/lib/tidy.sh"
  tidy_all "${ATTND_BUILD}/clang" "${XDG_CACHE_HOME:-${HOME:-${ATTND_BUILD}}/.cache}/attnd-tidy" "${tidy_arguments[@]}"
}

full=false
tidy_arguments=()
if [[ "${1:-}" == --full ]]; then
  full=true
  tidy_arguments=(--full)
  shift
fi
stages=("$@")
[[ ${#stages[@]} -gt 0 ]] || stages=("${all_stages[@]}")
for stage in "${stages[@]}"; do
  [[ " ${all_stages[*]} " == *" ${stage} "* ]] || die "no stage ${stage}; there are: ${all_stages[*]}"
done

builds_ahead=()
for stage in asan tsan; do
  [[ " ${stages[*]} " != *" ${stage} "* ]] || builds_ahead+=("build_${stage}")
done

# Two runs in one checkout would write over each other's builds and results.
mkdir -p "${ATTND_BUILD}"
exec 9>"${ATTND_BUILD}/test.lock"
flock -n 9 || die "another scripts/test.sh is running in this checkout"

say "Set-up"
setup_packages "${ATTND_BUILD_PACKAGES[@]}" "${ATTND_PYTHON_PACKAGES[@]}" "${ATTND_CHECK_PACKAGES[@]}"
setup_packages "$(clang_runtime_package)"
setup_prometheus
start_venvs "${stages[@]}"
trap stop_ahead EXIT
run_stages "${stages[@]}"
