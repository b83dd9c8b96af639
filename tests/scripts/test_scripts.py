# SPDX-License-Identifier: Apache-2.0
"""The scripts, without what takes minutes: syntax, the package list, the quickstart table.

Whole runs of quickstart.sh and test.sh in a clean root are scripts/clean_root_test.sh's work (docs/OPERATIONS.md).
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/lib/*.sh"), ROOT / ".ci" / "run"])
COMMANDS = [path for path in SCRIPTS if path.parent.name != "lib"] + [ROOT / "scripts/lib/runtime_packages.sh"]
sys.path.insert(0, str(ROOT / "scripts"))

import quickstart_table  # noqa: E402


def bash(code, **more):
    return subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, **more)


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_script_parses_and_has_a_licence(path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert "SPDX-License-Identifier: Apache-2.0" in "".join(path.read_text().splitlines()[:2])


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_command_is_executable(path):
    assert os.access(path, os.X_OK)


def packages():
    lists = bash("source scripts/lib/packages.sh; "
                 'printf "%s\\n" "${ATTND_BUILD_PACKAGES[@]}" "${ATTND_PYTHON_PACKAGES[@]}" "${ATTND_CHECK_PACKAGES[@]}"')
    return lists.stdout.split()


def test_packages_are_named_once():
    names = packages()
    assert len(names) > 20
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name) for name in names)


def test_another_compiler_takes_a_fresh_folder(tmp_path):
    """CMake deletes such a folder's cache, and with it all that the preset says but the compiler."""
    done = bash("""
        set -euo pipefail
        source scripts/lib/setup.sh
        ATTND_BUILD="${FOLDER}"
        cmake() {
          echo "$*" >&3
          [[ "$*" == *--fresh* ]] || echo "You have changed variables that require your cache to be deleted."
        }
        configure_preset asan -DA=1 3>&1
        """, env={**os.environ, "FOLDER": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["--preset asan -Wno-dev -DA=1", "--preset asan -Wno-dev --fresh -DA=1"]


def test_nothing_is_installed_when_nothing_is_missing():
    # An apt-get that fails proves that it is not called.
    done = bash("set -euo pipefail; source scripts/lib/setup.sh; apt_get() { exit 9; }; setup_packages dpkg bash")
    assert done.returncode == 0, done.stderr
    assert "packages: all 2 are installed" in done.stdout


def test_only_missing_packages_are_asked_for():
    done = bash("set -euo pipefail; source scripts/lib/setup.sh; missing_packages dpkg no-such-package-of-attnd bash")
    assert done.stdout.split() == ["no-such-package-of-attnd"]


def test_ordinary_user_goes_through_sudo(tmp_path):
    (tmp_path / "sudo").write_text('#!/bin/sh\necho "sudo $*"\n')
    (tmp_path / "sudo").chmod(0o755)
    code = "source scripts/lib/setup.sh; as_root id -u"
    if os.geteuid() == 0:
        tmp_path.chmod(0o755)
        for folder in tmp_path.parents:
            if folder == pathlib.Path("/tmp"):
                break
            folder.chmod(folder.stat().st_mode | 0o011)
        done = subprocess.run(["setpriv", "--reuid", "65534", "--clear-groups", "bash", "-c", code], cwd=ROOT, text=True,
                              capture_output=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60)
    else:
        done = subprocess.run(["bash", "-c", code], cwd=ROOT, text=True, capture_output=True,
                              env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60)
    assert done.stdout == "sudo id -u\n", done.stderr


def test_runtime_packages_of_a_binary():
    done = bash("scripts/lib/runtime_packages.sh $(command -v bash)")
    assert done.returncode == 0, done.stderr
    assert "libc6" in done.stdout.split()


def test_unknown_stage_is_refused_before_anything_runs():
    done = bash("scripts/test.sh no-such-stage")
    assert done.returncode != 0
    assert "no stage no-such-stage" in done.stderr
    assert "Set-up" not in done.stdout


def test_every_folder_with_tests_in_python_is_given_to_pytest():
    """scripts/image_root_test.py is a program of its own: it needs root and minutes."""
    runs = re.findall(r"run_pytest (?:\"\S+\" )?([\w/ ]+)", (ROOT / "scripts/test.sh").read_text())
    given = {folder for run in runs for folder in run.split()}
    found = {path.parent for kind in ("test_*.py", "*_test.py") for folder in ROOT.iterdir() if folder.name != "build"
             for path in folder.rglob(kind)}
    assert {name_of(folder) for folder in found} - {"scripts"} <= given


def result(policy, clear_disagreements=0, agreement=1.0, dtype="fp32"):
    tasks = {task: {"accuracy": 0.5, "answers": 8} for task in quickstart_table.TASKS}
    return {"policy": policy, "length": 8192, "dtype": dtype, "tasks": tasks, "local_dense": tasks,
            "agreement": agreement, "answers": 32, "clear_answers": 30, "clear_disagreements": clear_disagreements,
            "relative_error": 0.1, "read_fraction": 0.02, "predicted_error": None,
            "decode_us": {"p50": 100.0, "p99": 300.0}, "local_decode_us": {"p50": 900.0, "p99": 1100.0}}


@pytest.mark.parametrize("results, status", [
    ([result("dense"), result("error-target", 3, 0.9)], 0),
    ([result("dense", 0, 0.97)], 0),
    (result("dense"), 0),
    ([result("dense", 0, 0.995, "bf16")], 0),
    ([result("dense", 1), result("error-target")], 1),
    ([result("dense", 0, 0.985, "bf16")], 1),
    ([result("error-target")], 1),
], ids=["agrees", "near ties only", "one object", "bf16 agrees", "disagrees", "bf16 disagrees", "no dense"])
def test_quickstart_table(tmp_path, capsys, results, status):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(results))
    assert quickstart_table.main([str(path)]) == status
    table = capsys.readouterr().out
    assert "local dense" in table and "0.500" in table and "900" in table


def test_the_client_is_put_together_elsewhere(tmp_path):
    """What an earlier build left beside the sources would be in the next wheel, too. And it has all that
    NVRTC compiles."""
    sources = shutil.copytree(ROOT / "client" / "python", tmp_path / "python",
                              ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    built = tmp_path / "built"
    subprocess.run([sys.executable, "setup.py", "-q", "build", "--build-lib", built], cwd=sources,
                   check=True, timeout=60)
    assert not (sources / "build").exists()
    for path in (sources / "attnd/cuda").glob("*.cu*"):
        assert (built / "attnd/cuda" / path.name).exists(), path.name


def test_quickstart_builds_what_it_says_is_next():
    """Every program of the build that quickstart names, or README, is one that quickstart builds."""
    named = set()
    for path in ("scripts/quickstart.sh", "README.md"):
        named |= set(re.findall(r"build/bin/(\w+)", (ROOT / path).read_text()))
    done = bash("source scripts/lib/setup.sh; ATTND_BUILD=/nowhere; say() { :; }; die() { exit 0; }; "
                "build_preset() { echo \"$@\"; }; build_release")
    assert {"attnd", "attnctl"} <= named <= set(done.stdout.split()), done.stdout
