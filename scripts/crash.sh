#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# crash.sh [--cycles N] [--seed S] [--failpoints SHARE] [--pressure SHARE]: kills a real server with SIGKILL N times
# (default 2,000) while clients seal, resume and drop sequences, at random or, in a share of the cycles (default 0.5), at a
# named failpoint; in a share of the cycles (default 0.5) with so little memory that it moves segments to disk. Checks after
# each start that every acknowledged seal is there and answers as it did. Prints how often each failpoint was met and
# `N cycles, 0 lost, 0 wrong`, and exits non-zero otherwise. Needs what scripts/quickstart.sh has built.
set -euo pipefail
# shellcheck source=scripts/lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/setup.sh"
[[ -x "${ATTND_BUILD}/bin/attnd" ]] || die "build/bin/attnd is not built: run scripts/quickstart.sh"
[[ -e "${ATTND_BUILD}/bin/attnd_faults.so" ]] || build_preset release attnd_faults
cd "${ATTND_ROOT}/tests/python"
exec "${ATTND_VENV}/bin/python" crash.py "$@"
