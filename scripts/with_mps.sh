#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# with_mps.sh -- COMMAND [ARGUMENT...]: runs a command, and all that it starts, under a control daemon of NVIDIA's MPS of
# its own, so that its processes use one GPU at the same time and not in turns (docs/OPERATIONS.md, "Beside a model server
# on one GPU"). The daemon's folders are temporary ones; other daemons of this machine are not touched. The exit status is
# the command's; 2 if the daemon is missing or does not start.
#
# ATTND_MPS_CONTROL names another program in place of nvidia-cuda-mps-control.
set -euo pipefail

die() {
  echo "error: with_mps.sh: $*" >&2
  exit 2
}

[[ "${1:-}" == -- && $# -ge 2 ]] || die "usage: with_mps.sh -- COMMAND [ARGUMENT...]"
shift
control="${ATTND_MPS_CONTROL:-nvidia-cuda-mps-control}"
command -v "${control}" >/dev/null ||
  die "${control} is missing: NVIDIA's driver brings it (Debian and Ubuntu: package nvidia-compute-utils-VERSION)"

folder="$(mktemp -d "${TMPDIR:-/tmp}/attnd-mps.XXXXXX")"
export CUDA_MPS_PIPE_DIRECTORY="${folder}/pipe" CUDA_MPS_LOG_DIRECTORY="${folder}/log"
mkdir "${CUDA_MPS_PIPE_DIRECTORY}" "${CUDA_MPS_LOG_DIRECTORY}"

# The daemon is known by its pipe folder: `quit` reaches no other one. It waits for its clients, so they end first. A daemon
# that does not listen is left as it is, with its folder: nobody can say whether it is at work.
# shellcheck disable=SC2317  # called by a trap
stop_daemon() {
  local status=$?
  trap - EXIT
  if [[ ! -e "${CUDA_MPS_PIPE_DIRECTORY}/control" ]] || timeout 60 "${control}" <<<quit >/dev/null; then
    rm -rf "${folder}"
  else
    echo "warning: with_mps.sh: the daemon of ${CUDA_MPS_PIPE_DIRECTORY} did not end within 60 s" >&2
  fi
  exit "${status}"
}
trap stop_daemon EXIT

"${control}" -d || die "${control} -d failed; its log is: $(cat "${CUDA_MPS_LOG_DIRECTORY}"/* 2>/dev/null)"

# Signals are the command's: the script waits for its end, and stops the daemon after it.
"$@" &
command=$!
trap 'kill -TERM "${command}" 2>/dev/null || true' TERM INT
status=0
wait "${command}" || status=$?
while kill -0 "${command}" 2>/dev/null; do
  status=0
  wait "${command}" || status=$?
done
exit "${status}"
