# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# clang-tidy over the project's C++ sources (tidy.py). Sourced by test.sh, after stages.sh.

# tidy_all BUILD CACHE [--full]: checks every source, as BUILD's compile commands say, and counts the sources.
tidy_all() {
  local counts
  counts="$(python3 "${ATTND_ROOT}/scripts/lib/tidy.py" "${ATTND_ROOT}" "$@")" || return
  # shellcheck disable=SC2086
  tally ${counts}
}
