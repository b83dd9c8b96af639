#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# runtime_packages.sh BINARY...: prints the distribution packages that own the shared libraries they load, one a line.
# The Dockerfile's runtime stage installs these and no others.
set -euo pipefail

[[ $# -gt 0 ]] || { echo "usage: runtime_packages.sh BINARY..." >&2; exit 2; }
libraries="$(for binary in "$@"; do ldd "${binary}" || exit 1; done)"
if grep -q 'not found' <<<"${libraries}"; then
  grep 'not found' <<<"${libraries}" >&2
  exit 1
fi
# dpkg records some libraries below /lib and some below /usr/lib, whichever path the loader found them by.
awk '$3 ~ /^\// {print $3} $1 ~ /^\// {print $1}' <<<"${libraries}" | while read -r library; do
  owner=
  for path in "${library}" "/usr${library}" "${library#/usr}" "$(readlink -f "${library}")"; do
    if owner="$(dpkg-query -S "${path}" 2>/dev/null)"; then break; fi
  done
  [[ -n "${owner}" ]] || { echo "no package owns ${library}" >&2; exit 1; }
  echo "${owner%%:*}"
done | sort -u
