#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# gpu_check.sh [--skip CHECK,...] [OUT]: on a GPU host, in the folder that scripts/bundle.sh made: parity of the GPU
# with the CPU, then benchmarks beside PyTorch's, a short table last. Writes everything to OUT (default ./gpu_check).
# Exits non-zero if a check fails or cannot be run.
#
# Two checks need more than the folder has, and --skip leaves them out:
#   nano-llama  answers of a model: models/nano-llama copied into the folder (it would take the bundle beyond its size),
#               and Python with grpcio, protobuf, numpy, safetensors and tqdm
#   peers       PyTorch's times beside attnd's: Python with PyTorch
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
skipped=,
if [[ "${1:-}" == --skip ]]; then
  [[ -n "${2:-}" ]] || { echo "--skip needs names: nano-llama, peers" >&2; exit 2; }
  for name in ${2//,/ }; do
    [[ "${name}" == nano-llama || "${name}" == peers ]] ||
      { echo "--skip ${name}: only nano-llama and peers can be left out" >&2; exit 2; }
  done
  skipped=",$2,"
  shift 2
fi
[[ "${1:-}" != -* ]] || { echo "usage: gpu_check.sh [--skip CHECK,...] [OUT]" >&2; exit 2; }
out="${1:-gpu_check}"
mkdir -p "${out}" || exit 1
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

# skips CHECK: whether it was asked to be left out, which it says then.
skips() {
  [[ "${skipped}" == *",$1,"* ]] || return 1
  printf '  %-22s left out, as --skip says\n' "$1"
}

# cannot_run CHECK WHY: a check that cannot be run has failed.
cannot_run() {
  printf '  %-22s FAILED, it cannot be run: %s; --skip %s leaves it out\n' "$1" "$2" "$1"
  failures=$((failures + 1))
}

# lacks_python MODULE: says why Python cannot import it; false if it can.
lacks_python() {
  local error
  error="$(PYTHONPATH=python python3 -c "import $1" 2>&1)" && return 1
  echo "${error##*$'\n'}"
}

# Parity with the CPU, of every case: one that was skipped was not tested.
parity() {
  ./attnd_gpu_parity_test >"${out}/parity_cases.txt" 2>&1 || { cat "${out}/parity_cases.txt"; return 1; }
  cat "${out}/parity_cases.txt"
  if grep -q SKIPPED "${out}/parity_cases.txt"; then
    echo "parity was skipped: there is no GPU that can be used"
    return 1
  fi
  grep -q 'PASSED  \] [1-9]' "${out}/parity_cases.txt" || { echo "parity ran no case"; return 1; }
}

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

# nano-llama answers through the server, 224 answers for each policy. Dense attention must agree with local attention
# but for near ties; the other policies' shares lie below what docs/QUALITY.md has ("On a GPU": error-target .964,
# double-p .930 of 672 answers) by more than twice what so few answers vary. streaming may answer as it does.
nano_llama() {
  local cache status=0
  cache="$(mktemp -d)"
  PYTHONPATH=python python3 -m attnd.eval --target "${target}" --model nano-llama \
    --eval-set nano-llama/nano_eval.npz --length 8192 --tasks niah,trace,before,top --limit 2 \
    --cache-dir "${cache}" --policy dense --policy double-p --policy error-target --policy streaming \
    --require-agreement dense=0.99 --require-agreement error-target=0.9 --require-agreement double-p=0.85 \
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

# Steps over a part of the pages, whose answers must be those over all of them, bit for bit, and the GPU's alone: a
# quarter and a tenth of the pages, their floors, and fetching beside the ceiling. Random keys, which say little of a
# model's hits (gpu_paging.cc).
paging() {
  ./gpu_paging --rows="$1" --budgets=0.25,0.1 --warm=32 --steps=64 --policies="error-target:tolerance=off,floor=0.01"
}

# decode SUFFIX OPTION...: tokens of an engine whose keys and values (.5 GB) exceed the GPU's page memory four times. The
# CPU may answer no row.
decode() {
  local suffix="$1" folder status=0
  shift
  folder="$(mktemp -d)"
  ./gpu_decode --layers=4 --tokens=32768 --decoded=65 --stretch=32 --device_memory_mib=2000 --page_memory_mib=128 \
    --policy="error-target:tolerance=off,floor=0.01${suffix}" --all_on_gpu --data_dir="${folder}" "$@" || status=$?
  rm -rf "${folder}"
  return "${status}"
}

echo "Checks"
check kernels ./gpu_kernels --check
check indexes ./gpu_index_check
check steps ./gpu_steps --check --rows=2 --tokens=20000
check mixed_steps ./gpu_steps --check --rows=6 --tokens=40000,5000,900 \
  --policies="clusters-top-k+dense@clusters clusters-top-k+error-target@clusters clusters-top-k@clusters"
# Segments of several slices of a tree's groups, and a row so long that its slices are larger.
trees="error-target:tolerance=off,floor=0.01@tree error-target@tree"
check long_steps ./gpu_steps --check --rows=2 --tokens=70000 --policies="${trees}"
check longest_steps ./gpu_steps --check --rows=1 --tokens=300000 --query_heads=4 --kv_heads=1 --policies="${trees}"
check parity parity
if skips nano-llama; then
  :
elif [[ ! -d nano-llama ]]; then
  cannot_run nano-llama "copy models/nano-llama into this folder"
elif why="$(lacks_python attnd.eval.cli)"; then
  cannot_run nano-llama "${why}"
else
  log="${out}/nano_llama_server.txt" check nano-llama with_server nano_llama
fi

echo "Benchmarks"
check kernel_times ./gpu_kernels --bench
check index_times ./gpu_index_check --bench
check step_times ./gpu_steps --rows=1 --policies="dense@tree error-target:tolerance=off,floor=0.01@tree"
check host_times ./gpu_host_time --device=cuda --engine_steps=128
check paging_times paging 4
check paging_times_one paging 1
check decode_times decode ""
# An engine that has memory for half of them, the rest in files.
check decode_file_times decode "" --resume_memory_mib=256
check decode_prefetch_times decode "" --resume_memory_mib=256 --page_prefetch
check decode_estimates decode ",on_miss=estimate,miss_wait_us=0" --resume_memory_mib=256
log="${out}/service_server.txt" check service_times with_server service_steps
if skips peers; then
  :
elif why="$(lacks_python torch)"; then
  cannot_run peers "${why}"
else
  check peers python3 peers/sdpa_decode.py --json "${out}/peers.json"
fi

echo
grep -h "tokens, head_dim\|dense  \|error-target 2%" "${out}/kernel_times.txt" 2>/dev/null | cut -d'|' -f1
grep -h "flash\|cudnn" "${out}/peers.txt" 2>/dev/null
grep -h "calls" "${out}/index_times.txt" 2>/dev/null
cat "${out}/service_times.txt" 2>/dev/null
for name in paging_times paging_times_one decode_times decode_file_times decode_prefetch_times decode_estimates; do
  grep -h "the ceiling\|^|" "${out}/${name}.txt" 2>/dev/null
done
((failures == 0)) && echo "all checks passed" || echo "${failures} checks FAILED"
exit $((failures > 0))
