# SPDX-License-Identifier: Apache-2.0
"""attnctl for tests and campaigns: running it, and what it must say of a data folder."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess

ATTNCTL = (
    pathlib.Path(__file__).resolve().parents[2] / os.environ.get("ATTND_BIN", "build/bin/attnd")
).with_name("attnctl")


def attnctl(*arguments: object, code: int = 0) -> str:
    """Runs it and gives its standard output."""
    status, out, err = _run(*arguments)
    assert status == code, f"{arguments}: {status}\n{out}\n{err}"
    if code != 0:
        assert err or out, "it must say why"
    return out


def report(*arguments: object, code: int = 0) -> dict:
    """The same with --json."""
    return json.loads(attnctl(*arguments, "--json", code=code))


def _run(*arguments: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [ATTNCTL, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout, done.stderr


def copy_data(source: pathlib.Path, to: pathlib.Path) -> None:
    """A copy of a data folder that no server has open. Segment files are never written again and so
    are linked; the copy must be on the same disk."""

    def copy(name: str, copied: str) -> None:
        if name.endswith(".seg"):
            os.link(name, copied)
        else:
            shutil.copy2(name, copied)

    shutil.copytree(source, to, copy_function=copy)


def faults_of(
    data: pathlib.Path, damaged: int | None = None, *, unnamed: bool = True
) -> list[str]:
    """What `attnctl verify` finds in a data folder; `damaged` is a sealed sequence that may be
    reported, as its file was changed. `unnamed`: whether files may be there that no record names,
    as a server that works or was killed has them."""
    status, out, err = _run("verify", "--data-dir", data, "--json")
    try:
        found = json.loads(out)
    except json.JSONDecodeError:
        return [f"attnctl verify ended with {status}: {err or out}"]
    faults = [
        f"verify: {file['path']} is {file['state']}: {file['why']}"
        for file in found["bad_files"]
        if file["needed_by"] != [damaged]
    ]
    faults += [
        f"verify: sealed {sequence['sealed_id']}: {sequence['why']}"
        for sequence in found["broken_sequences"]
        if sequence["sealed_id"] != damaged
    ]
    if not unnamed:
        faults += [f"verify: no record names {path}" for path in found["unnamed_files"]]
    return faults


def rebuild(
    data: pathlib.Path, sequences: int, damaged: int | None = None
) -> tuple[list[str], list[str]]:
    """Makes the catalogue of a data folder again, which has at least so many sealed sequences: what
    is wrong with what it says, and what it put into quarantine. `damaged` is as for faults_of."""
    status, out, err = _run("rebuild-catalogue", "--data-dir", data, "--json")
    try:
        made = json.loads(out)
    except json.JSONDecodeError:
        return [f"attnctl rebuild-catalogue ended with {status}: {err or out}"], []
    if "error" in made:
        return [f"attnctl rebuild-catalogue ended with {status}: {made['error']}"], []
    put_away = [
        f"rebuild: file {file['file']}: {file['why']}" for file in made["quarantined_files"]
    ]
    faults = []
    if not made["old_catalogue"]:
        faults.append("rebuild: it found no catalogue")
    if made["sequences"] < sequences:
        faults.append(f"rebuild: {made['sequences']} sequences of at least {sequences}")
    if status not in (0, 1) or (status == 1 and damaged is None):
        faults.append(f"rebuild: it ended with {status}: {put_away}")
    return faults, put_away
