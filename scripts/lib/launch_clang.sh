#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# launch_clang.sh CLANG ARGUMENT...: compiles through ccache, so that one cache serves every checkout where CMake has clang
# precompile headers (CMakePresets.json). Clang's precompiled header names files by their whole paths: each checkout
# compiles its own. ccache takes FILE.pch.sum in its place, which says what was precompiled, not where. Sources ask for
# the header by an option whose path ccache makes relative; clang then looks for FILE.pch beside FILE.
set -euo pipefail

arguments=()
header=""  # that is precompiled
depends=""
command=("$@")
while (($# > 0)); do
  case "$1 ${2:-}" in
    "-Xclang -include-pch") shift 4 ;;  # -Xclang -include-pch -Xclang FILE.pch
    "-Xclang -include")                 # -Xclang -include -Xclang FILE
      arguments+=(-include "$4")
      shift 4
      ;;
    *)
      [[ "$1 ${2:-}" != "-o "*.pch ]] || header="$2"
      [[ "$1" != -MF ]] || depends="$2"
      arguments+=("$1")
      shift
      ;;
  esac
done

if [[ -z "${header}" ]]; then
  export CCACHE_PCH_EXTSUM=1
  exec ccache "${arguments[@]}"
fi
"${command[@]}"
sed 's/^[^:]*://; s/\\$//' "${depends}" | xargs sha256sum | cut -d' ' -f1 | sha256sum >"${header}.sum"
