# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check.sh in a folder of stubs: what makes it fail, and what may be left out."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A server that is healthy once it can end well.
ATTND = """
socket="${2#unix:}"
if [[ "$1" == --probe ]]; then [[ -e "${socket}" ]]; exit; fi
trap 'exit 0' TERM
mkdir -p "$(dirname "${socket}")"
touch "${socket}"
while :; do sleep 0.05; done
"""
PARITY = """
echo "[  PASSED  ] ${CASES-76} tests."
[[ -z "${PARITY_SAYS:-}" ]] || echo "${PARITY_SAYS}"
exit "${PARITY_STATUS:-0}"
"""
# Imports of what MISSING names fail. attnd.eval keeps its arguments, and if asked to fails unless AGREEMENT is 1.
PYTHON = """
case "$1 $2" in
  "-c import ${MISSING:-nothing}") echo "ModuleNotFoundError: No module named 'x'" >&2; exit 1 ;;
  "-m attnd.eval")
    printf '%s\\n' "$@" >eval_arguments
    echo "dense (bf16): agreement ${AGREEMENT:-1}"
    [[ "${AGREEMENT:-1}" == 1 || "$*" != *"--require-agreement dense="* ]] && exit
    echo "attnd.eval: dense: ${AGREEMENT} of 224 answers agree" >&2
    exit 1 ;;
esac
"""
# Fails if one of its arguments is FAILING; what it writes lies in an empty folder, which it notes.
DECODE = """
for argument in "$@"; do
  case "${argument}" in
    --data_dir=*) folder="${argument#*=}" ;;
    "${FAILING:-}") exit 1 ;;
  esac
done
[[ -z "$(ls "${folder:?}")" ]] || exit 3
touch "${folder}/file"
echo "${folder}" >>folders
"""
FAILING = """
for argument in "$@"; do
  [[ "${argument}" != "${FAILING:-}" ]] || exit 1
done
"""


@pytest.fixture
def run(tmp_path):
    """Runs the script in a bundle of stubs, with some of the environment changed."""
    bundle = tmp_path / "bundle"
    stubs = {"attnd": ATTND, "attnd_gpu_parity_test": PARITY, "gpu_kernels": "", "gpu_index_check": "", "gpu_steps": "",
             "gpu_paging": FAILING, "gpu_decode": DECODE,
             "gpu_host_time": "", "service_decode": "", "bin/python3": PYTHON}
    for name, code in stubs.items():
        path = bundle / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{code}")
        path.chmod(0o755)
    (bundle / "nano-llama").mkdir()
    shutil.copy(ROOT / "scripts/gpu_check.sh", bundle)

    def done(*arguments, **environment):
        path = f"{bundle / 'bin'}:{os.environ['PATH']}"
        return subprocess.run([bundle / "gpu_check.sh", *arguments], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "PATH": path, **environment})

    done.bundle = bundle
    return done


def test_all_checks_pass(run):
    done = run()
    assert done.returncode == 0, done.stdout
    assert "all checks passed" in done.stdout and "FAILED" not in done.stdout
    arguments = (run.bundle / "eval_arguments").read_text().split()
    assert "dense=0.99" in arguments and "--require-agreement" in arguments
    folders = (run.bundle / "folders").read_text().split()
    assert len(set(folders)) == 4 and not any(os.path.exists(folder) for folder in folders)


@pytest.mark.parametrize("environment, words", [
    ({"AGREEMENT": "0.95"}, "nano-llama             FAILED (1)"),
    ({"PARITY_STATUS": "1"}, "parity                 FAILED (1)"),
    ({"PARITY_SAYS": "[  SKIPPED ] 76 tests"}, "parity was skipped"),
    ({"CASES": "0"}, "parity ran no case"),
    ({"MISSING": "attnd.eval.cli"}, "nano-llama             FAILED, it cannot be run: ModuleNotFoundError"),
    ({"MISSING": "torch"}, "peers                  FAILED, it cannot be run: ModuleNotFoundError"),
    ({"FAILING": "--rows=4"}, "paging_times           FAILED (1)"),
    ({"FAILING": "--policy=error-target:tolerance=off,floor=0.01,on_miss=estimate,miss_wait_us=0"},
     "decode_estimates       FAILED (1)"),
], ids=["wrong answers", "wrong parity", "parity skipped", "no parity", "no packages", "no torch", "wrong paging",
        "rows of the CPU that estimate"])
def test_what_fails(run, environment, words):
    done = run(**environment)
    assert done.returncode == 1, done.stdout
    assert words in done.stdout and "1 checks FAILED" in done.stdout


def test_every_decoding_may_fail(run):
    done = run(FAILING="--all_on_gpu")
    assert done.returncode == 1 and "4 checks FAILED" in done.stdout
    for name in ("decode_times", "decode_file_times", "decode_prefetch_times", "decode_estimates"):
        assert f"{name:22} FAILED (1)" in done.stdout


def test_no_model_fails(run):
    (run.bundle / "nano-llama").rmdir()
    done = run()
    assert done.returncode == 1
    assert "nano-llama             FAILED, it cannot be run: copy models/nano-llama" in done.stdout
    assert "--skip nano-llama leaves it out" in done.stdout


def test_what_is_left_out_does_not_fail(run):
    (run.bundle / "nano-llama").rmdir()
    done = run("--skip", "nano-llama,peers", "results", MISSING="torch")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("left out, as --skip says") == 2
    assert (run.bundle / "results" / "parity.txt").exists()
    assert not (run.bundle / "eval_arguments").exists()


def test_leaving_out_one_leaves_out_no_other(run):
    done = run("--skip", "peers", AGREEMENT="0.5", MISSING="torch")
    assert done.returncode == 1
    assert "nano-llama             FAILED (1)" in done.stdout


@pytest.mark.parametrize("arguments", [["--skip"], ["--skip", "parity"], ["--skip", "nano-llama,x"], ["--what"]])
def test_wrong_arguments_run_nothing(run, arguments):
    done = run(*arguments)
    assert done.returncode == 2 and done.stderr
    assert "Checks" not in done.stdout and not (run.bundle / "gpu_check").exists()
