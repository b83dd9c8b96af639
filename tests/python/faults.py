# SPDX-License-Identifier: Apache-2.0
"""Faults for whole servers: rules for build/bin/attnd_faults.so (tests/faults/preload.cc says what
they mean), named failpoints made of them, and a filter that refuses io_uring."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import random
import socket
import struct
import subprocess
import time
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = ROOT / os.environ.get("ATTND_FAULTS_LIBRARY", "build/bin/attnd_faults.so")


def environment(*rules: str, log: pathlib.Path | None = None) -> dict[str, str]:
    """The environment of a program that lives under these rules."""
    assert LIBRARY.exists(), f"{LIBRARY} does not exist: build it, or set ATTND_FAULTS_LIBRARY"
    variables = {"LD_PRELOAD": str(LIBRARY), "ATTND_FAULTS": ";".join(rules)}
    if log is not None:
        variables["ATTND_FAULTS_LOG"] = str(log)
    return {**os.environ, **variables}


def wait_for_socket(target: str, process: subprocess.Popen, most_s: float = 30.0) -> None:
    """Returns when somebody listens there, or the process has ended. gRPC would find out a second
    later: that is how long it waits after a first refusal, also for channels made meanwhile."""
    due = time.monotonic() + most_s
    while process.poll() is None and time.monotonic() < due:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(target.removeprefix("unix:"))
            return
        time.sleep(0.01)


@dataclass(frozen=True)
class Failpoint:
    """A place where a server is killed: the call, and before or after it."""

    name: str
    call: str
    path: str
    side: str
    most: int = 1  # it is killed at the n-th such call, n drawn from 1 to this
    when: str = "serving"  # or "starting": only then calls count
    io: str = ""  # the server's --io, where it matters

    def rule(self, started: str, serving: str, dice: random.Random) -> str:
        """Two files: there once the server has answered, and once its clients are at work."""
        words = [f"id={self.name}", f"call={self.call}", f"path={self.path}", f"side={self.side}"]
        words += [f"nth={dice.randint(1, self.most)}", "do=kill"]
        words.append(f"if={serving}" if self.when == "serving" else f"unless={started}")
        return " ".join(words)

    @property
    def damages(self) -> bool:
        """Whether it needs a damaged file."""
        return self.name.startswith("quarantine")

    @property
    def needs_orphan(self) -> bool:
        """Whether it needs a file that a crash left behind."""
        return "orphan" in self.name


_TEMPORARY = "*/segments/*.seg.tmp"
_FILE = "*/segments/*.seg"
_SHARD = "*/segments/??"
_CATALOGUE = "*/catalogue/*"
_LOG = "*/catalogue/*.log"
_MARK = "*/catalogue/LAST_COMMIT"
_QUARANTINE = "*/segments/*.seg>*/quarantine/*"

# In the order in which a seal, a drop, a quarantine and a start come by.
FAILPOINTS = (
    Failpoint("seal-before-create", "open", _TEMPORARY, "before", most=3),
    Failpoint("seal-after-create", "open", _TEMPORARY, "after", most=3),
    Failpoint("seal-after-room", "fallocate", _TEMPORARY, "after", most=3),
    Failpoint("seal-amid-data", "write", _TEMPORARY, "before", most=6, io="threads"),
    Failpoint("seal-before-data-sync", "fdatasync", _TEMPORARY, "before", most=3),
    Failpoint("seal-after-data-sync", "fdatasync", _TEMPORARY, "after", most=3),
    Failpoint("seal-before-rename", "rename", _TEMPORARY + ">*", "before", most=3),
    Failpoint("seal-after-rename", "rename", _TEMPORARY + ">*", "after", most=3),
    Failpoint("seal-before-folder-sync", "fsync", _SHARD, "before", most=3),
    Failpoint("seal-after-folder-sync", "fsync", _SHARD, "after", most=3),
    Failpoint("catalogue-before-commit-write", "write", _LOG, "before", most=6),
    Failpoint("catalogue-after-commit-write", "write", _LOG, "after", most=6),
    Failpoint("catalogue-before-commit-sync", "fdatasync", _LOG, "before", most=6),
    Failpoint("catalogue-after-commit-sync", "fdatasync", _LOG, "after", most=6),
    Failpoint("catalogue-before-mark-write", "write", _MARK, "before", most=6),
    Failpoint("catalogue-before-mark-sync", "fsync", _MARK, "before", most=6),
    Failpoint("catalogue-after-mark-sync", "fsync", _MARK, "after", most=6),
    Failpoint("drop-before-unlink", "unlink", _FILE, "before"),
    Failpoint("drop-between-unlinks", "unlink", _FILE, "before", most=3),
    Failpoint("drop-after-unlink", "unlink", _FILE, "after"),
    Failpoint("quarantine-before-rename", "rename", _QUARANTINE, "before"),
    Failpoint("quarantine-after-rename", "rename", _QUARANTINE, "after"),
    Failpoint("quarantine-after-folder-sync", "fsync", "*/quarantine", "after"),
    Failpoint("start-before-orphan-unlink", "unlink", _FILE + "*", "before", when="starting"),
    Failpoint("start-after-orphan-unlink", "unlink", _FILE + "*", "after", when="starting"),
    Failpoint("start-catalogue-write", "write", _CATALOGUE, "before", most=4, when="starting"),
    Failpoint("start-catalogue-sync", "fdatasync", _CATALOGUE, "after", most=2, when="starting"),
    Failpoint("start-catalogue-rename", "rename", _CATALOGUE, "after", when="starting"),
    Failpoint("start-catalogue-unlink", "unlink", _CATALOGUE, "before", when="starting"),
)


# ---- io_uring refused, as container runtimes do it ----

_SYS_IO_URING_SETUP = 425
_AUDIT_ARCH_X86_64 = 0xC000003E
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD | W | ABS, BPF_JMP | JEQ | K, BPF_RET | K


def refuse_io_uring(error: int) -> None:
    """For a process that is about to become another program: io_uring_setup gives it `error`."""
    program = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_IF_EQUAL, 0, 3, _AUDIT_ARCH_X86_64),
        (_LOAD, 0, 0, 0),  # the call's number
        (_IF_EQUAL, 0, 1, _SYS_IO_URING_SETUP),
        (_RETURN, 0, 0, _ERRNO | error),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    filter_ = ctypes.create_string_buffer(head, len(head))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, pointer in (
        (_PR_SET_NO_NEW_PRIVS, 1, None),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_)),
    ):
        if libc.prctl(option, ctypes.c_ulong(value), pointer, None, None) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
