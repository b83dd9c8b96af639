# SPDX-License-Identifier: Apache-2.0
"""The commit at which something was measured, and how far behind it has fallen.

A commit is its hexadecimal name, with a "+" behind it if tracked files other than docs/, which
measuring writes, had changes that were not committed. It is that of the checkout in which the
program runs: whether the server was built from the same one is the caller's to know.
"""

from __future__ import annotations

import pathlib
import re
import subprocess

_TIMEOUT_S = 20.0
_SECONDS_A_DAY = 24 * 60 * 60
_SHOWN_DIGITS = 12
# Tells a checkout of attnd from any other repository that the program may be run in.
_OWN_FILE = "proto/attnd/v1/attnd.proto"
_CHANGES = ("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs")
_NAME = re.compile(r"[0-9a-f]{40,64}\+?")


def checked(commit: str | None) -> str | None:
    """A commit as it was written, None if it is unknown.

    Raises:
        ValueError: if it is no commit's name.
    """
    if commit is not None and not (isinstance(commit, str) and _NAME.fullmatch(commit)):
        raise ValueError(f"{commit!r} is no commit")
    return commit


def current(folder: pathlib.Path = pathlib.Path()) -> str | None:
    """The commit of the checkout of attnd that the folder lies in; None if it lies in none."""
    if not _git(folder, "ls-tree", "--full-tree", "HEAD", _OWN_FILE):
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    unchanged = _git(folder, *_CHANGES) == ""
    return commit if commit is None or unchanged else f"{commit}+"


def age(commit: str | None, folder: pathlib.Path = pathlib.Path()) -> str:
    """A commit, and in words how far the checkout that the folder lies in has gone on since."""
    if commit is None:
        return "unknown commit"
    name = commit.rstrip("+")
    shown = f"commit {name[:_SHOWN_DIGITS]}"
    if name != commit:
        shown += " with changes that were not committed"
    behind = _git(folder, "rev-list", "--count", f"{name}..HEAD")
    if behind is None:
        return f"{shown}, which is not in this checkout's history: age unknown"
    then, now = (int(_git(folder, "log", "-1", "--format=%ct", of) or 0) for of in (name, "HEAD"))
    days = max(0, now - then) // _SECONDS_A_DAY
    return f"{shown}, {behind} commits and {days} days behind"


def _git(folder: pathlib.Path, *arguments: str) -> str | None:
    """What git says; None where it fails, or there is no git."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
