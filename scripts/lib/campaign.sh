# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# What crash.sh and soak.sh share. Callers have `set -euo pipefail`.
# shellcheck source=scripts/lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# run_campaign PROGRAM [ARGUMENT...]: a program of tests/python, with what it starts built from the tree as it is.
run_campaign() {
  local program="$1"
  shift
  [[ -x "${ATTND_VENV}/bin/python" ]] || die "build/venv is missing: run scripts/quickstart.sh"
  build_preset release attnd attnctl attnd_faults
  cd "${ATTND_ROOT}/tests/python" || die "tests/python is missing"
  exec "${ATTND_VENV}/bin/python" "${program}" "$@"
}
