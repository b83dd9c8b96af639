#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""image_root_test.py: carries out the Dockerfile without a container engine, and runs what it made.

Each stage becomes a minimal root of clean_root_test.sh, in which the stage's instructions run in order; at the end the
command runs as the image's user, its health check must pass, and SIGTERM must end it with 0. Needs root. It understands
the instructions and forms that this project's Dockerfile uses, and refuses others.
"""

from __future__ import annotations

import fnmatch
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
CLEAN_ROOT = ROOT / "scripts" / "clean_root_test.sh"
BASES = {"debian:12-slim": "bookworm"}


def in_root(folder: pathlib.Path, command: str) -> None:
    subprocess.run([CLEAN_ROOT, "--into", folder, "--no-source", "bash", "-c", command], check=True)


def make_root(suite: str) -> pathlib.Path:
    done = subprocess.run([CLEAN_ROOT, "--suite", suite, "--no-source", "--keep", "true"], check=True, text=True,
                          stdout=subprocess.PIPE)
    return pathlib.Path(re.search(r"^The root is (.+)$", done.stdout, re.MULTILINE).group(1))


def context() -> list[str]:
    """The files that COPY may see: tracked or new, without what .dockerignore names."""
    listing = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                             check=True, stdout=subprocess.PIPE, text=True).stdout
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]

    def visible(path: str) -> bool:
        parts = pathlib.PurePath(path).parts
        prefixes = {"/".join(parts[:i]) for i in range(1, len(parts) + 1)}
        return not any(pattern in prefixes or (pattern.startswith("**/") and
                                               any(fnmatch.fnmatch(part, pattern[3:]) for part in parts))
                       for pattern in ignored)
    return [path for path in listing.split("\0") if path and visible(path) and (ROOT / path).exists()]


def copy(sources_root: pathlib.Path, source: str, target: pathlib.Path, files: list[str] | None) -> None:
    """COPY of one source: a file, a folder's contents, or with `files` what of them lies below the source."""
    if files is not None and (sources_root / source).is_dir():
        for path in files:
            if source == "." or path.startswith(source + "/"):
                place = target / (path if source == "." else path[len(source) + 1:])
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(sources_root / path, place)
        return
    if files is not None and source not in files:
        sys.exit(f"COPY {source}: not in the build context")
    if str(target).endswith("/") or target.is_dir():
        target = target / pathlib.PurePath(source).name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(sources_root / source.lstrip("/"), target)


def main() -> None:
    text = "\n".join(line for line in (ROOT / "Dockerfile").read_text().split("\n") if not line.startswith("#"))
    instructions = [line.strip() for line in re.sub(r"\\\n\s*", " ", text).split("\n") if line.strip()]
    files = context()
    stages: dict[str, pathlib.Path] = {}
    folder, workdir, settings = pathlib.Path(), "/", {}
    try:
        for line in instructions:
            word, rest = line.split(" ", 1)
            print(f"==> {line}", flush=True)
            if word == "FROM":
                base, *name = rest.split(" AS ")
                folder, workdir, settings = make_root(BASES[base]), "/", {}
                stages[name[0] if name else "final"] = folder
            elif word == "WORKDIR":
                workdir = rest
                (folder / workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif word == "COPY":
                *sources, target = rest.split()
                place = folder / (pathlib.PurePath(workdir) / target).as_posix().lstrip("/")
                if target.endswith("/"):
                    place.mkdir(parents=True, exist_ok=True)
                origin = ROOT
                if sources[0].startswith("--from="):
                    origin = stages[sources.pop(0).removeprefix("--from=")]
                for source in sources:
                    copy(origin, source.lstrip("/") if origin != ROOT else source, place, files if origin == ROOT else None)
            elif word == "RUN":
                in_root(folder, f"cd {shlex.quote(workdir)} && exec /bin/sh -c {shlex.quote(rest)}")
            elif word in ("USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD", "HEALTHCHECK"):
                settings[word] = rest
            else:
                sys.exit(f"instruction not understood: {line}")
        command = shlex.join(json.loads(settings["ENTRYPOINT"]) + json.loads(settings["CMD"]))
        health = shlex.join(json.loads(settings["HEALTHCHECK"][settings["HEALTHCHECK"].index("["):]))
        user = settings["USER"]
        print(f"==> as {user}: {command}", flush=True)
        as_user = f"setpriv --reuid {user} --regid {user} --init-groups --no-new-privs"
        in_root(folder, f"""
            (exec {as_user} {command}) & server=$!
            healthy=1
            for attempt in $(seq 50); do
              if {as_user} {health}; then healthy=0; break; fi
              sleep 0.2
            done
            [ "$healthy" -eq 0 ] && echo "health check passed"
            ls -ld /run/attnd /run/attnd/*
            kill -TERM "$server"
            wait "$server"; status=$?
            echo "SIGTERM: exit status $status"
            exit $((healthy + status))""")
        print(f"==> {sum(path.stat().st_size for path in folder.rglob('*') if path.is_file() and not path.is_symlink()) >> 20}"
              " MiB in the final root, the minimal root included")
    finally:
        for stage in stages.values():
            shutil.rmtree(stage, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(__doc__)
    else:
        main()
