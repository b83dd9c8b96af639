# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Builds of stages to come, made at low priority beside the tests of stages before them: those wait for servers and
# clocks, and the last tests of a stage run alone, so that cores are idle. Sourced after setup.sh by a script that has
# ATTND_RESULTS. What such a build says goes to build/ahead.log; a stage makes its build all the same, and finds it made
# or says again why it fails.

ATTND_AHEAD_NICE=10

# build_locked PRESET [ARGUMENT...]: build_preset, one call for a preset at a time. Whoever waits for a build gives it the
# usual priority, where the system lets it.
build_locked() {
  local preset="$1" ahead="${ATTND_RESULTS}/ahead.pid"
  (
    if ! flock -n 7; then
      [[ ! -s "${ahead}" ]] || renice -n 0 -g "$(cat "${ahead}")" >/dev/null 2>&1 || true
      flock 7
    fi
    build_preset "$@"
  ) 7>"${ATTND_BUILD}/${preset}.lock"
}

# build_ahead BUILD...: starts to call the functions named, one after another, in a process group of its own that is in
# ATTND_RESULTS/ahead.pid. A second call does nothing.
build_ahead() {
  local build
  [[ $# -gt 0 && ! -e "${ATTND_RESULTS}/ahead.pid" ]] || return 0
  : >"${ATTND_RESULTS}/ahead.pid"
  set -m
  (
    echo "${BASHPID}" >"${ATTND_RESULTS}/ahead.pid"
    for build in "$@"; do
      renice -n "${ATTND_AHEAD_NICE}" -p "${BASHPID}" >/dev/null
      "${build}" || echo "${build} failed"
    done
    : >"${ATTND_RESULTS}/ahead.pid"  # which is another's group, if one has this number now
  ) >"${ATTND_BUILD}/ahead.log" 2>&1 9>&- &
  set +m
}

# stop_ahead: ends what build_ahead started and has not ended; for a run that stops before its builds are used.
stop_ahead() {
  [[ -s "${ATTND_RESULTS}/ahead.pid" ]] || return 0
  kill -- "-$(cat "${ATTND_RESULTS}/ahead.pid")" 2>/dev/null || true
}
