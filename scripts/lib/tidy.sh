# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# clang-tidy over the project's C++ sources. Sourced by test.sh in the project's folder, after stages.sh.

tidy_folders=(common attention storage engine gpu server client/cpp ctl)

# tidy_one BUILD CACHE KEY SOURCE: checks one source. CACHE remembers what was clean, by the contents of the source and
# KEY, which stands for every header and the configuration.
tidy_one() {
  local build="$1" cache="$2" key="$3" source="$4" stamp said
  stamp="${cache}/$(cat "${source}" <(echo "${source} ${key}") | sha256sum | cut -d' ' -f1)"
  [[ -e "${stamp}" ]] && return
  if ! said="$(clang-tidy -p "${build}" --quiet "${source}" 2>/dev/null)"; then
    printf 'FAILED: clang-tidy %s\n%s\n' "${source}" "${said}" >&2
    return 1
  fi
  touch "${stamp}"
}

# Compiled on machines with CUDA, or on those without.
tidy_elsewhere='^gpu/(cuda/.*|no_cuda_device)\.cc$'

# tidy_all BUILD CACHE OUTCOMES: checks every source, as BUILD's compile commands say. One that they do not name has failed,
# but for those of other machines. Each checked source leaves a line with its outcome in the file OUTCOMES.
tidy_all() {
  local build="$1" cache="$2" outcomes="$3" key source skipped=0 left_out=0 sources=()
  mkdir -p "${cache}"
  key="$(find "${tidy_folders[@]}" proto \( -name '*.h' -o -name '*.proto' \) -print0 | sort -z |
    xargs -0 cat .clang-tidy | sha256sum) $(clang-tidy --version | grep -i version)"
  while read -r source; do
    if grep -qF "\"file\": \"${PWD}/${source}\"" "${build}/compile_commands.json"; then
      sources+=("${source}")
    elif [[ "${source}" =~ ${tidy_elsewhere} ]]; then
      skipped=$((skipped + 1))
    else
      echo "FAILED: clang-tidy ${source}: ${build} does not compile it" >&2
      left_out=$((left_out + 1))
    fi
  done < <(find "${tidy_folders[@]}" -name '*.cc' | sort)
  : >"${outcomes}"
  export -f tidy_one
  # shellcheck disable=SC2016
  local one='if tidy_one "$1" "$2" "$3" "$5"; then echo ok; else echo bad; fi >>"$4"'
  if ((${#sources[@]} > 0)); then
    printf '%s\0' "${sources[@]}" |
      xargs -0 -P "$(nproc)" -I{} bash -c "${one}" tidy "${build}" "${cache}" "${key}" "${outcomes}" {}
  fi
  tally "$(grep -c '^ok' "${outcomes}" || true)" $(($(grep -c '^bad' "${outcomes}" || true) + left_out)) "${skipped}"
  (($(wc -l <"${outcomes}") == ${#sources[@]}))
}
