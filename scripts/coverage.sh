#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# coverage.sh [--python]: how much of the product's code the C++ tests of the release stage run, as lines by folder. Builds
# the preset `coverage`, runs its tests, and prints a table. --python runs the Python tests against its server, too.
# A process that is killed leaves no counts, so the tests that kill servers count for less than they do.
set -euo pipefail
# shellcheck source=scripts/lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/setup.sh"

folder="${ATTND_BUILD}/coverage"
python=false
case "$*" in
  "") ;;
  --python) python=true ;;
  *) die "usage: coverage.sh [--python]" ;;
esac

build_preset coverage
find "${folder}" -name '*.gcda' -delete
failed=0
ctest --test-dir "${folder}" -j "$(nproc)" --timeout 1800 --output-on-failure || failed=1
if "${python}"; then
  setup_prometheus
  setup_venv
  (cd "${ATTND_ROOT}" && ATTND_BIN="${folder}/bin/attnd" "${ATTND_VENV}/bin/python" -m pytest -q tests/python) || failed=1
fi
python3 "${ATTND_ROOT}/scripts/lib/line_coverage.py" "${ATTND_ROOT}" "${folder}"
((failed == 0)) || die "tests failed: the table counts what ran"
