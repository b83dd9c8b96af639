# SPDX-License-Identifier: Apache-2.0
"""scripts/with_mps.sh, with a control daemon that only writes down what it is told."""

import pathlib
import signal
import subprocess
import time

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/with_mps.sh"

DAEMON = """#!/usr/bin/env bash
told="$(dirname "$0")/told"
if [[ "${1:-}" == -d ]]; then
  [[ ! -e "$(dirname "$0")/refuses" ]] || { echo planted >"$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 1; }
  touch "$CUDA_MPS_PIPE_DIRECTORY/control"
  echo "start $CUDA_MPS_PIPE_DIRECTORY" >>"$told"
else
  echo "$(cat) $CUDA_MPS_PIPE_DIRECTORY" >>"$told"
fi
"""


@pytest.fixture
def run(tmp_path):
    daemon = tmp_path / "daemon"
    daemon.write_text(DAEMON, encoding="utf-8")
    daemon.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}

    def run(*arguments, control=str(daemon)):
        return subprocess.Popen(
            [SCRIPT, *arguments],
            env={**environment, "ATTND_MPS_CONTROL": control},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def told(tmp_path) -> list[list[str]]:
    file = tmp_path / "told"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def test_a_command_runs_under_a_daemon_of_its_own(run, tmp_path):
    process = run("--", "bash", "-c", 'echo "$CUDA_MPS_PIPE_DIRECTORY"; exit 7')
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 7
    pipe = output.strip()
    assert pipe.startswith(str(tmp_path))
    assert told(tmp_path) == [["start", pipe], ["quit", pipe]]
    assert not pathlib.Path(pipe).parent.exists()


def test_a_signal_ends_the_command_and_then_the_daemon(run, tmp_path):
    until = f"until [[ -e {tmp_path}/may_end ]]; do sleep 0.05; done"
    command = f"trap '{until}; echo ended; exit 3' TERM; echo up; while :; do sleep 0.05; done"
    process = run("--", "bash", "-c", command)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert [words[0] for words in told(tmp_path)] == ["start"]
    (tmp_path / "may_end").touch()
    output, _ = process.communicate(timeout=20)
    assert output == "ended\n" and process.returncode == 3
    assert [words[0] for words in told(tmp_path)] == ["start", "quit"]


def test_what_cannot_work_is_refused(run, tmp_path):
    for arguments, control, words in (
        ((), None, "usage"),
        (("true",), None, "usage"),
        (("--",), None, "usage"),
        (("--", "touch", tmp_path / "ran"), "no-such-daemon", "no-such-daemon is missing"),
    ):
        process = run(*arguments, **({"control": control} if control else {}))
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 2 and words in errors
    (tmp_path / "refuses").touch()
    process = run("--", "touch", tmp_path / "ran")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2 and "planted" in errors
    assert not (tmp_path / "ran").exists() and told(tmp_path) == []
