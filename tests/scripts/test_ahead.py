# SPDX-License-Identifier: Apache-2.0
"""Builds beside the tests of earlier stages: made once and in order, waited for, at low priority, and ended with the run."""

import os
import pathlib
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(tmp_path, body):
    """Runs BODY with scripts/lib/ahead.sh, where a build of PRESET writes what it does to PRESET's log."""
    (tmp_path / "build").mkdir()
    (tmp_path / "results").mkdir()
    code = f"""set -euo pipefail
        source scripts/lib/setup.sh
        source scripts/lib/ahead.sh
        ATTND_BUILD={tmp_path}/build
        ATTND_RESULTS={tmp_path}/results
        build_preset() {{
          echo "begins $* at $(nice)" >>"{tmp_path}/said"
          sleep "${{SLEEP:-0.5}}"
          echo "ends $1" >>"{tmp_path}/said"
          [[ $1 != broken ]]
        }}
        build_one() {{ build_locked one -DX=Y; }}
        build_two() {{ build_locked two; }}
        build_broken() {{ build_locked broken; }}
        {body}"""
    # In a session of its own, as a terminal's is.
    done = subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, start_new_session=True)
    said = tmp_path / "said"
    return done, said.read_text().splitlines() if said.exists() else []


def test_a_stage_waits_for_its_build(tmp_path):  # which another stage, a subshell, has started
    done, said = run(tmp_path, "(set -e; build_ahead build_one build_two); sleep 0.2; build_one; build_two")
    assert done.returncode == 0, done.stderr
    low = os.nice(0) + 10
    assert said[:2] == [f"begins one -DX=Y at {low}", "ends one"]
    assert [line for line in said if " one" not in line] == [f"begins two at {low}", "ends two",
                                                             f"begins two at {os.nice(0)}", "ends two"]
    # Then the stage itself builds, which has nothing to do.
    assert said.count(f"begins one -DX=Y at {os.nice(0)}") == 1


def test_one_that_fails_does_not_stop_the_next(tmp_path):
    done, said = run(tmp_path, "build_ahead build_broken build_one; sleep 0.1; build_ahead build_two; sleep 1.5; "
                               "cat ${ATTND_BUILD}/ahead.log; build_broken && echo never")
    assert "build_broken failed" in done.stdout
    assert "never" not in done.stdout
    assert [line.split()[1] for line in said if line.startswith("ends")] == ["broken", "one", "broken"]


def test_a_run_that_ends_early_ends_them(tmp_path):
    began = time.monotonic()
    done, said = run(tmp_path, "trap stop_ahead EXIT; SLEEP=30; build_ahead build_one; sleep 0.5; exit 3")
    assert done.returncode == 3
    assert time.monotonic() - began < 20
    assert len(said) == 1


def test_nothing_is_started_without_builds(tmp_path):
    done, said = run(tmp_path, "build_ahead; stop_ahead; ls ${ATTND_RESULTS}")
    assert (done.returncode, done.stdout, said) == (0, "", [])
