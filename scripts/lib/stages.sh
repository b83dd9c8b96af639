# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Runs the stages of a test run and counts what they did. Sourced after setup.sh by a script that has
# `set -euo pipefail`, defines a function stage_NAME for each stage, and calls run_stages.
#
# A stage's counts are lines `PASSED FAILED SKIPPED` in ATTND_RESULTS/NAME.counts. Nothing passes by being left out: a
# runner that ends with an error has failed even if every test that it counted passed; so has a stage that passed
# nothing, but for one that says why (skip_stage), and a test that was skipped for a reason that is not in may_skip.txt.

# tally PASSED FAILED [SKIPPED]: adds to the running stage's counts.
tally() { echo "$1 $2 ${3:-0}" >>"${ATTND_RESULTS}/${stage}.counts"; }

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

# skip_stage REASON: the running stage says that it runs nothing; it has not failed.
skip_stage() {
  echo "SKIPPED: stage ${stage}: $*"
  touch "${ATTND_RESULTS}/${stage}.skipped"
}

# tally_results STATUS REPORT [CASES]: counts the JUnit file of a runner that ended with STATUS. CASES is a folder with a
# JUnit file by each of its tests, named NAME.xml.
tally_results() {
  local counts said
  said="$(mktemp)"
  counts="$(python3 "${ATTND_ROOT}/scripts/lib/count_results.py" "$@" 2>"${said}")" || counts="0 1 0"
  cat "${said}" >&2
  sed -nE "s/^( *[0-9.]+ s )/\\1 ${stage}: /p" "${said}" >>"${ATTND_RESULTS}/longest"
  rm "${said}"
  # shellcheck disable=SC2086
  tally ${counts}
}

# run_ctest FOLDER [ARGUMENT...]: the tests of a build folder. A test is a shard of a binary, which counts its cases in
# FOLDER/test-results (tests/CMakeLists.txt). One more runs than there are cores, as some wait for processes and clocks.
run_ctest() {
  local folder="$1" report="${ATTND_RESULTS}/ctest-${stage}.xml" status=0
  shift
  rm -rf "${folder}/test-results"
  ctest --test-dir "${folder}" -j "$(($(nproc) + 1))" --timeout 900 --output-on-failure --output-junit "${report}" "$@" || status=$?
  tally_results "${status}" "${report}" "${folder}/test-results"
}

# run_pytest ARGUMENT...: pytest against the built server.
run_pytest() {
  local report="${ATTND_RESULTS}/pytest-${stage}.xml" status=0
  (cd "${ATTND_ROOT}" && "${ATTND_VENV}/bin/python" -m pytest -q --junitxml="${report}" "$@") || status=$?
  tally_results "${status}" "${report}"
}

# ninja_logs: the logs of the build folders, as arguments of longest_compilations.py.
ninja_logs() { find "${ATTND_BUILD}" -maxdepth 2 -name .ninja_log 2>/dev/null | sort; }

# longest: the ten longest tests and the ten longest compilations of all stages.
longest() {
  local logs
  if [[ -s "${ATTND_RESULTS}/longest" ]]; then
    echo "The longest tests:"
    sort -rn "${ATTND_RESULTS}/longest" | head -10 || true
  fi
  mapfile -t logs < <(ninja_logs)
  python3 "${ATTND_ROOT}/scripts/lib/longest_compilations.py" "${ATTND_RESULTS}/ninja-before" "${logs[@]}"
}

# run_stages STAGE...: runs them, prints what took longest, a table and, last, `N passed, N failed`. Returns 1 if anything failed.
run_stages() {
  local stage started status passed failed skipped passed_all=0 failed_all=0 summary=()
  rm -rf "${ATTND_RESULTS}"
  mkdir -p "${ATTND_RESULTS}"
  ninja_logs | xargs -r -d '\n' cat >"${ATTND_RESULTS}/ninja-before"
  summary+=("$(printf '%-12s %5d s' set-up "${SECONDS}")")
  for stage in "$@"; do
    say "Stage ${stage}"
    started=${SECONDS}
    # A stage is a subshell of its own with -e in force, which a command of an if or || list would not have.
    set +e
    (set -e; "stage_${stage}")
    status=$?
    set -e
    read -r passed failed skipped < <(awk '{p += $1; f += $2; s += $3} END {print p + 0, f + 0, s + 0}' \
      "${ATTND_RESULTS}/${stage}.counts" 2>/dev/null || echo 0 0 0)
    if ((status != 0 && failed == 0)); then
      echo "FAILED: stage ${stage} ended with ${status}" >&2
      failed=1
    elif ((passed == 0 && failed == 0)) && [[ ! -e "${ATTND_RESULTS}/${stage}.skipped" ]]; then
      echo "FAILED: stage ${stage} ran nothing" >&2
      failed=1
    fi
    passed_all=$((passed_all + passed))
    failed_all=$((failed_all + failed))
    summary+=("$(printf '%-12s %5d s %6d passed %4d failed %4d skipped%s' "${stage}" $((SECONDS - started)) \
      "${passed}" "${failed}" "${skipped}" "$([[ ! -e "${ATTND_RESULTS}/${stage}.skipped" ]] || echo ': not run')")")
  done
  say "Done"
  longest || echo "FAILED: the lists of what took longest" >&2
  printf '%s\n' "${summary[@]}"
  echo "${passed_all} passed, ${failed_all} failed"
  ((failed_all == 0))
}
