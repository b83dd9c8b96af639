#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# gpu_check.sh [OUT]: on a GPU host, in the folder that scripts/bundle.sh made: parity of the GPU with the CPU, then
# benchmarks beside PyTorch's, a short table last. Writes everything to OUT (default ./gpu_check). Exits non-zero if a
# check fails. Python with PyTorch is used for the peers, and with grpcio and numpy for nano-llama, where they are there;
# the model itself is to be copied into the folder (models/nano-llama), as it would take the bundle beyond its size.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
out="${1:-gpu_check}"
mkdir -p "${out}"
failures=0

# check NAME COMMAND...: runs it, its output to OUT/NAME.txt.
check() {
  local name="$1" status=0
  shift
  "$@" >"${out}/${name}.txt" 2>&1 || status=$?
  if ((status == 0)); then
    printf '  %-22s ok\n' "${name}"
  else
    printf '  %-22s FAILED (%d), see %s\n' "${name}" "${status}" "${out}/${name}.txt"
    tail -5 "${out}/${name}.txt"
    failures=$((failures + 1))
  fi
}

has_python() { python3 -c "import $1" >/dev/null 2>&1; }

# with_server COMMAND...: runs it beside a server on the GPU that listens at $target; its log goes to $log.
with_server() {
  local folder server=0 status=0 healthy=no
  folder="$(mktemp -d)"
  target="unix:${folder}/run/attnd.sock"
  ./attnd --listen "${target}" --backend cuda --data-dir "${folder}/data" >"${log}" 2>&1 &
  server=$!
  for _ in $(seq 100); do
    if ./attnd --probe "${target}" >/dev/null 2>&1; then
      healthy=yes
      break
    fi
    sleep 0.2
  done
  if [[ "${healthy}" == yes ]]; then
    "$@" || status=$?
  else
    echo "the server is not healthy after 20 s"
    status=1
  fi
  kill -TERM "${server}"
  wait "${server}" || status=$?
  rm -rf "${folder}"
  return "${status}"
}

# nano-llama answers through the server; dense attention must agree with local attention.
nano_llama() {
  local cache status=0
  cache="$(mktemp -d)"
  PYTHONPATH=python python3 -m attnd.eval --target "${target}" --model nano-llama \
    --eval-set nano-llama/nano_eval.npz --length 8192 --tasks niah,trace,before,top --limit 2 \
    --cache-dir "${cache}" --policy dense --policy double-p --policy error-target --policy streaming \
    --json "${out}/nano_llama.json" || status=$?
  rm -rf "${cache}"
  # A server that has lost its GPU answers, too, from the CPU.
  PYTHONPATH=python python3 - "${target}" <<'PYTHON' || status=$?
import sys
import attnd

with attnd.Client(sys.argv[1]) as client:
    sys.exit(client.get_server_info().backend_status or 0)
PYTHON
  return "${status}"
}

# One step of one layer of 131,072 tokens, over the socket.
service_steps() {
  local status=0
  ./service_decode --target="${target}" --policy=error-target --parameters=tolerance=off,floor=0.02 || status=$?
  ./service_decode --target="${target}" --policy=dense --parameters= || status=$?
  return "${status}"
}

echo "Checks"
check kernels ./gpu_kernels --check
check indexes ./gpu_index_check
check parity ./attnd_gpu_parity_test
if grep -q SKIPPED "${out}/parity.txt"; then
  echo "  parity was skipped: there is no GPU that can be used"
  failures=$((failures + 1))
fi
if [[ ! -d nano-llama ]]; then
  echo "  nano-llama             skipped: copy models/nano-llama into this folder to have it answer through the GPU"
elif has_python grpc && has_python numpy && has_python safetensors; then
  log="${out}/nano_llama_server.txt" check nano-llama with_server nano_llama
fi

echo "Benchmarks"
check kernel_times ./gpu_kernels --bench
check index_times ./gpu_index_check --bench
log="${out}/service_server.txt" check service_times with_server service_steps
if has_python torch; then check peers python3 peers/sdpa_decode.py --json "${out}/peers.json"; fi

echo
grep -h "tokens, head_dim\|dense  \|error-target 2%" "${out}/kernel_times.txt" 2>/dev/null | cut -d'|' -f1
grep -h "flash\|cudnn" "${out}/peers.txt" 2>/dev/null
grep -h "calls" "${out}/index_times.txt" 2>/dev/null
cat "${out}/service_times.txt" 2>/dev/null
((failures == 0)) && echo "all checks passed" || echo "${failures} checks FAILED"
exit $((failures > 0))
