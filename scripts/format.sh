#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# format.sh: formats the project's C++ in place. format.sh --check changes nothing and fails if something would change.
set -euo pipefail
# shellcheck source=scripts/lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/setup.sh"

cd "${ATTND_ROOT}"
one='"${ATTND_CLANG_FORMAT}" --style=file -i "$1"'
case "${1:-}" in
  "") ;;
  --check)
    one='"${ATTND_CLANG_FORMAT}" --style=file --dry-run -Werror "$1" 2>/dev/null ||
      { echo "not formatted: $1 (run scripts/format.sh)"; exit 1; }'
    ;;
  *) die "usage: format.sh [--check]" ;;
esac
export ATTND_CLANG_FORMAT
command -v "${ATTND_CLANG_FORMAT}" >/dev/null || setup_packages "${ATTND_CHECK_PACKAGES[@]}"
folders=()
for folder in common plane attention storage engine gpu server client/cpp client/python/attnd/cuda ctl tests bench; do
  [[ -d "${folder}" ]] && folders+=("${folder}")
done
find "${folders[@]}" -type f \( -name '*.h' -o -name '*.cc' -o -name '*.cuh' -o -name '*.cu' \) -print0 |
  xargs -0 -r -P "$(nproc)" -I{} bash -c "${one}" format {}
