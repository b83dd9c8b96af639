#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# quickstart.sh: installs what is missing, builds attnd, attnctl and the C++ client's example, starts the server in a
# temporary folder, and lets a real trained transformer answer long-context questions through it; then seals a text,
# kills the server and brings the text back. Says in the end what to do next.
# Exits non-zero if dense attention through attnd disagrees with dense attention computed locally, or what was sealed is
# not there, bit for bit.
#
# ATTND_QUICKSTART_LIMIT (default 2): sequences for each of the four tasks.
set -euo pipefail
# shellcheck source=scripts/lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/setup.sh"

length=8192
limit="${ATTND_QUICKSTART_LIMIT:-2}"
model="${ATTND_ROOT}/models/nano-llama"
policies=(dense double-p error-target streaming)

folder=
server=
# Ends the server and removes its folder, however this script ends.
clean_up() {
  local status=$?
  trap - EXIT INT TERM
  if [[ -n "${server}" ]] && kill -0 "${server}" 2>/dev/null; then
    kill -TERM "${server}" 2>/dev/null || true
    local waited=0
    while kill -0 "${server}" 2>/dev/null && ((waited < 150)); do
      sleep 0.1
      waited=$((waited + 1))
    done
    kill -KILL "${server}" 2>/dev/null || true
  fi
  if ((status != 0)) && [[ -n "${folder}" && -s "${folder}/attnd.log" ]]; then
    printf '\nattnd said:\n' >&2
    tail -n 60 "${folder}/attnd.log" >&2
  fi
  if [[ -n "${folder}" ]]; then rm -rf "${folder}"; fi
  exit "${status}"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say "attnd quickstart: set-up"
setup_packages "${ATTND_BUILD_PACKAGES[@]}" "${ATTND_PYTHON_PACKAGES[@]}"
setup_venv
build_release

folder="$(mktemp -d "${TMPDIR:-/tmp}/attnd.XXXXXX")"
target="unix:${folder}/run/attnd.sock"
# Starts the server on the folder's data and waits until it is healthy.
start_server() {
  "${ATTND_BUILD}/bin/attnd" --listen "${target}" --data-dir "${folder}/data" >>"${folder}/attnd.log" 2>&1 &
  server=$!
  local attempt
  for attempt in $(seq 100); do
    kill -0 "${server}" 2>/dev/null || die "attnd ended as it started"
    if "${ATTND_BUILD}/bin/attnd" --probe "${target}" >/dev/null 2>&1; then break; fi
    ((attempt < 100)) || die "attnd is not healthy after 20 s"
    sleep 0.2
  done
  echo "attnd is healthy"
}
say "Starting attnd at ${target}"
start_server

say "nano-llama answers questions over ${length} tokens, $((4 * limit)) texts, with: ${policies[*]}"
arguments=()
for policy in "${policies[@]}"; do arguments+=(--policy "${policy}"); done
"${ATTND_VENV}/bin/python" -m attnd.eval --target "${target}" --model "${model}" \
  --eval-set "${model}/nano_eval.npz" --length "${length}" --tasks niah,trace,before,top --limit "${limit}" \
  --cache-dir "${ATTND_BUILD}/eval-cache" "${arguments[@]}" --json "${folder}/result.json"

# resume before|after: a text that outlives its server.
resume() {
  "${ATTND_VENV}/bin/python" "${ATTND_ROOT}/scripts/quickstart_resume.py" "${target}" "${model}" "${length}" \
    "${ATTND_BUILD}/eval-cache" "${folder}/sealed.npz" "$1"
}
say "Sealing a text, killing attnd with SIGKILL, starting it again on the same folder"
resume before
kill -KILL "${server}"
wait "${server}" 2>/dev/null || true
start_server
resume after

say "Result"
"${ATTND_VENV}/bin/python" "${ATTND_ROOT}/scripts/quickstart_table.py" "${folder}/result.json"

say "What next"
cat <<'END'
Start a server that stays (it says where it listens; docs/OPERATIONS.md has every option):
    build/bin/attnd --listen unix:/run/user/$(id -u)/attnd/attnd.sock --data-dir ~/.local/share/attnd
In another terminal, call it:
    build/bin/attnd_example unix:/run/user/$(id -u)/attnd/attnd.sock   # from C++, client/cpp/example.cc
    build/venv/bin/python                                              # from Python, with README.md's example
    build/bin/attnctl list --server unix:/run/user/$(id -u)/attnd/attnd.sock
See what is on disk, and check it:
    build/bin/attnctl list --data-dir ~/.local/share/attnd
    build/bin/attnctl verify --all --data-dir ~/.local/share/attnd
Measure it with your own model of the Llama or Qwen3 family:
    build/venv/bin/python -m attnd.eval --help
END
