#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# test.sh [STAGE...]: sets up, builds and runs every check, or only the stages named. The last line is
# `N passed, N failed`; the exit status says whether anything failed.
#
#   format         clang-format would change nothing
#   release        optimised build of everything, ctest
#   python         pytest against the release server: clients, model runner, end to end, deployment, scripts
#   asan           address and undefined-behaviour sanitizers: build of everything, ctest
#   asan_python    the end-to-end bad-input tests against the sanitized server
#   tsan           thread sanitizer: in-process tests of common, attention and engine, ctest
#   clang          clang build with thread-safety analysis, warnings are errors
#   tidy           clang-tidy over the project's C++ sources
set -euo pipefail
# shellcheck source=scripts/lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/setup.sh"

all_stages=(format release python asan asan_python tsan clang tidy)
results="${ATTND_BUILD}/test-results"
export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
export TSAN_OPTIONS="second_deadlock_stack=1:${TSAN_OPTIONS:-}"

# tally PASSED FAILED [SKIPPED]: adds to the running stage's counts.
tally() { echo "$1 $2 ${3:-0}" >>"${results}/${stage}.counts"; }

# check NAME COMMAND...: one check, passed or failed. COMMAND runs without -e and so returns its own failures.
check() {
  local name="$1"
  shift
  if "$@"; then
    tally 1 0
  else
    echo "FAILED: ${name}" >&2
    tally 0 1
    return 1
  fi
}

# run_ctest FOLDER [ARGUMENT...]
run_ctest() {
  local folder="$1" report="${results}/ctest-${stage}.xml"
  shift
  ctest --test-dir "${folder}" -j "$(nproc)" --timeout 900 --output-on-failure --output-junit "${report}" "$@" |
    grep -v -E '^ *(Start +[0-9]+:|[0-9]+/[0-9]+ .* Passed )' || true
  # shellcheck disable=SC2046
  tally $(python3 "${ATTND_ROOT}/scripts/lib/count_results.py" "${report}")
}

# run_pytest ARGUMENT...
run_pytest() {
  local report="${results}/pytest-${stage}.xml"
  (cd "${ATTND_ROOT}" && ATTND_REQUIRE_SERVER=1 "${ATTND_VENV}/bin/python" -m pytest -q --junitxml="${report}" "$@") || true
  # shellcheck disable=SC2046
  tally $(python3 "${ATTND_ROOT}/scripts/lib/count_results.py" "${report}")
}

stage_format() { check clang-format "${ATTND_ROOT}/scripts/format.sh" --check; }

stage_release() {
  check "release build" build_preset release
  run_ctest "${ATTND_BUILD}"
}

stage_python() { run_pytest tests/python tests/scripts; }

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

# tidy_one SOURCE: remembers what was clean, by the contents of the source, every header and the configuration.
tidy_one() {
  local source="$1" stamp said
  stamp="${TIDY_CACHE}/$(cat "${source}" <(echo "${source} ${TIDY_KEY}") | sha256sum | cut -d' ' -f1)"
  [[ -e "${stamp}" ]] && return
  if ! said="$(clang-tidy -p build/clang --quiet "${source}" 2>/dev/null)"; then
    printf 'FAILED: clang-tidy %s\n%s\n' "${source}" "${said}" >&2
    return 1
  fi
  touch "${stamp}"
}

stage_tidy() {
  cd "${ATTND_ROOT}"
  [[ -f build/clang/build.ninja ]] || configure_clang
  cmake --build --preset clang --target attnd_proto attnd_archive_proto \
    storage/generated/storage/records.pb.h >/dev/null
  export -f tidy_one
  export TIDY_CACHE="${ATTND_BUILD}/tidy-cache" TIDY_KEY
  mkdir -p "${TIDY_CACHE}"
  local folders=(common attention storage engine gpu server client/cpp ctl)
  TIDY_KEY="$(find "${folders[@]}" proto \( -name '*.h' -o -name '*.proto' \) -print0 | sort -z |
    xargs -0 cat .clang-tidy | sha256sum) $(clang-tidy --version | grep -i version)"
  local checked="${results}/tidy.checked"
  : >"${checked}"
  # Each source leaves a line with its outcome.
  local one='if tidy_one "$1"; then echo ok; else echo bad; fi >>"$2"'
  # What this machine compiles: without CUDA's headers its sources cannot be read.
  find "${folders[@]}" -name '*.cc' | sort | while read -r source; do
    if grep -qF "\"file\": \"${ATTND_ROOT}/${source}\"" build/clang/compile_commands.json; then
      printf '%s\0' "${source}"
    fi
  done | xargs -0 -P "$(nproc)" -I{} bash -c "${one}" tidy {} "${checked}"
  tally "$(grep -c '^ok' "${checked}" || true)" "$(grep -c '^bad' "${checked}" || true)"
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
rm -rf "${results}"
mkdir -p "${results}"
summary=()
summary+=("$(printf '%-12s %5d s' set-up "${SECONDS}")")

passed_all=0 failed_all=0
for stage in "${stages[@]}"; do
  say "Stage ${stage}"
  started=${SECONDS}
  # A stage is a subshell of its own with -e in force, which a command of an if or || list would not have.
  set +e
  (set -e; "stage_${stage}")
  status=$?
  set -e
  read -r passed failed skipped < <(awk '{p += $1; f += $2; s += $3} END {print p + 0, f + 0, s + 0}' \
    "${results}/${stage}.counts" 2>/dev/null || echo 0 0 0)
  if [[ ${status} -ne 0 && ${failed} -eq 0 ]]; then failed=1; fi
  passed_all=$((passed_all + passed))
  failed_all=$((failed_all + failed))
  summary+=("$(printf '%-12s %5d s %6d passed %4d failed %4d skipped' \
    "${stage}" $((SECONDS - started)) "${passed}" "${failed}" "${skipped}")")
done

say "Done"
printf '%s\n' "${summary[@]}"
echo "${passed_all} passed, ${failed_all} failed"
[[ ${failed_all} -eq 0 ]]
