#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tidy.py ROOT BUILD CACHE [--full]: clang-tidy over the project's C++ sources. Prints `PASSED FAILED SKIPPED`, in sources.

ROOT is the project's folder and BUILD a build folder of clang's with compile_commands.json. A source that BUILD does not
compile has failed, unless it is one of machines with CUDA or one of machines without.

Two thirds of the time goes into the headers of libraries, which every check visits. Sources that are compiled by equal
commands are therefore checked together, as one generated source that includes them. The sources of a group that passes
have passed. A group that fails is checked by halves, and a source has failed if it fails by itself.

--full checks each source by itself and with clang's static analyzer, which looks at nothing that is included.

CACHE remembers what was clean: an empty file for each source, named by a hash of all that the outcome depends on: the
source, the project's headers that it includes (through others, too; the .proto file for a generated header), the compile
command, .clang-tidy, and the versions of clang-tidy and of the distribution's packages, which stand for all other headers.
So a header that changed has those sources checked again that include it. Names hold no path of ROOT: a folder that
checkouts share serves all of them. The files that were used last are kept, a few megabytes of directory at most.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

FOLDERS = ("common", "plane", "attention", "storage", "engine", "gpu", "server", "client/cpp", "ctl")
ELSEWHERE = re.compile(r"gpu/(.*/)?(cuda/.*|no_cuda_device\.cc)")
INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]+["<]([^">]+)[">]', re.MULTILINE)
IMPORT = re.compile(rb'^[ \t]*import[ \t]+(?:public[ \t]+)?"([^"]+)"', re.MULTILINE)
GENERATED = re.compile(r"(\.grpc)?\.pb\.h$")
# Highway's sources, which include themselves, cannot stand beside others in one source, nor two programs.
ALONE = re.compile(rb"HWY_TARGET_INCLUDE")
PROGRAM = re.compile(rb"^int main\(", re.MULTILINE)
# What Highway compiles for each kind of processor is one text: without --full it is read once.
ONE_TARGET = "--extra-arg=-DHWY_COMPILE_ONLY_STATIC"
# Without the analyzer, and without the check that has something against a group's includes.
SHORT_CHECKS = "--checks=-clang-analyzer-*,-bugprone-suspicious-include"
TOGETHER = 16  # sources in a group; of more, too many have names of their own in common
KEPT = 20_000  # files in CACHE


@dataclasses.dataclass
class Source:
    name: str  # as of ROOT
    command: str  # of the compiler, with neither the source nor its object
    key: str
    alone: bool  # not to be checked in a group
    program: bool


class Includes:
    """What sources include of the project's files."""

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root
        self._direct: dict[str, list[str]] = {}
        self._hashes: dict[str, str] = {}

    def digest(self, source: str) -> str:
        """Of the contents of the source and of all files that it includes, by their names."""
        seen = {source}
        waiting = [source]
        while waiting:
            for name in self._includes(waiting.pop()):
                if name not in seen:
                    seen.add(name)
                    waiting.append(name)
        return digest(*(f"{name} {self._hashes[name]}" for name in sorted(seen)))

    def _includes(self, name: str) -> list[str]:
        if name not in self._direct:
            text = (self._root / name).read_bytes()
            self._hashes[name] = hashlib.sha256(text).hexdigest()
            pattern = IMPORT if name.endswith(".proto") else INCLUDE
            said = [include.decode(errors="replace") for include in pattern.findall(text)]
            self._direct[name] = [found for include in said if (found := self._find(include, name))]
        return self._direct[name]

    def _find(self, include: str, includer: str) -> str | None:
        """The project's file of that name, if there is one."""
        include = GENERATED.sub(".proto", include)
        for folder in ("", os.path.dirname(includer), "proto"):
            name = os.path.normpath(os.path.join(folder, include))
            if not name.startswith("..") and (self._root / name).is_file():
                return name
        return None


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def read_commands(root: pathlib.Path, build: pathlib.Path) -> dict[str, str]:
    """The compile command of each source that BUILD compiles."""
    commands = {}
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        name = os.path.relpath(entry["file"], root)
        words = entry.get("command", "").split()
        kept = [word for before, word in zip([""] + words, words)
                if before != "-o" and word not in ("-o", "-c", "-pthread", entry["file"])]
        # Last: CMake puts it where the library stands that brings it.
        commands[name] = " ".join(kept + ["-pthread"] * ("-pthread" in words))
    return commands


def find_sources(root: pathlib.Path, build: pathlib.Path) -> tuple[list[Source], list[str], int]:
    """The sources to check, those that BUILD lacks, and how many are for other machines."""
    commands = read_commands(root, build)
    version = [line for line in output("clang-tidy", "--version").splitlines() if "version" in line]
    packages = output("dpkg-query", "-W", "-f", "${Package} ${Version}\n", "*-dev")
    rules = root / ".clang-tidy"
    salt = digest(*version, packages, rules.read_text(encoding="utf-8") if rules.exists() else "",
                  pathlib.Path(__file__).read_text(encoding="utf-8"))
    includes = Includes(root)
    sources, missing, elsewhere = [], [], 0
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.cc")):
        name = str(path.relative_to(root))
        if name in commands:
            command = commands[name].replace(str(build), "BUILD").replace(str(root), "ROOT")
            key = digest(salt, name, command, includes.digest(name))
            text = path.read_bytes()
            alone, program = (kind.search(text) is not None for kind in (ALONE, PROGRAM))
            sources.append(Source(name, commands[name], key, alone, program))
        elif ELSEWHERE.fullmatch(name):
            elsewhere += 1
        else:
            missing.append(name)
    return sources, missing, elsewhere


class Checker:
    """Runs clang-tidy and remembers what is clean. Its calls may run at once, for different sources."""

    def __init__(self, root: pathlib.Path, build: pathlib.Path, cache: pathlib.Path, full: bool) -> None:
        self._root = root
        self._build = build
        self._cache = cache
        self._full = full
        cache.mkdir(parents=True, exist_ok=True)

    def is_clean(self, source: Source) -> bool:
        name = self._cache / (f"{source.key}.full" if self._full else source.key)
        try:
            os.utime(name)
        except FileNotFoundError:
            return False
        return True

    def check_all(self, sources: list[Source]) -> dict[str, str]:
        """What is to be said of the sources that failed."""
        failed: dict[str, str] = {}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for found in pool.map(self._check_group, self._make_groups(sources)):
                failed |= found
        return failed

    def prune(self) -> None:
        used = [(entry.stat().st_mtime, entry.path) for entry in os.scandir(self._cache)]
        for _, path in sorted(used, reverse=True)[KEPT:]:
            os.unlink(path)

    def _make_groups(self, sources: list[Source]) -> list[list[Source]]:
        if self._full:
            return [[source] for source in sources]
        groups = [[source] for source in sources if source.alone]
        by_command: dict[str, list[Source]] = {}
        for source in sources:
            if not source.alone:
                by_command.setdefault(source.command, []).append(source)
        for equal in by_command.values():
            count = -(-len(equal) // TOGETHER)
            programs = [source for source in equal if source.program]
            others = [source for source in equal if not source.program]
            for i in range(max(count, len(programs))):
                part = others[len(others) * i // count:len(others) * (i + 1) // count]
                groups.append(part + programs[i:i + 1])
        return sorted(groups, key=len, reverse=True)

    def _check_group(self, group: list[Source]) -> dict[str, str]:
        """What is to be said of the sources of the group that failed: a group that fails is checked by halves."""
        place = (self._build, self._root / group[0].name) if len(group) == 1 else self._put_together(group)
        said = self._tidy(*place, group[0].alone)
        if said is None:
            self._remember(group)
            return {}
        if len(group) == 1:
            return {group[0].name: said}
        half = len(group) // 2
        failed = self._check_group(group[:half]) | self._check_group(group[half:])
        if not failed:
            names = " ".join(source.name for source in group)
            print(f"clang-tidy: clean apart, but not together, which takes longer: {names}\n{said[:1000]}", file=sys.stderr)
        return failed

    def _put_together(self, group: list[Source]) -> tuple[pathlib.Path, pathlib.Path]:
        """A source that includes those of the group, and the folder that says how it is compiled."""
        folder = self._build / "tidy" / digest(*(source.name for source in group))[:16]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "group.cc"
        path.write_text("".join(f'#include "{self._root}/{source.name}"\n' for source in group), encoding="utf-8")
        command = {"directory": str(self._build), "file": str(path), "command": f"{group[0].command} -c {path}"}
        (folder / "compile_commands.json").write_text(json.dumps([command]), encoding="utf-8")
        return folder, path

    def _tidy(self, commands: pathlib.Path, source: pathlib.Path, highways: bool) -> str | None:
        """None, or what clang-tidy has against the source."""
        arguments = [] if self._full else [SHORT_CHECKS] + [ONE_TARGET] * highways
        done = subprocess.run(["clang-tidy", "-p", str(commands), "--quiet", *arguments, str(source)],
                              cwd=self._root, capture_output=True, text=True, check=False)
        return None if done.returncode == 0 else done.stdout or done.stderr

    def _remember(self, group: list[Source]) -> None:
        for source in group:
            for suffix in ("", ".full") if self._full else ("",):
                (self._cache / f"{source.key}{suffix}").touch()


def main(arguments: list[str]) -> int:
    full = arguments[3:] == ["--full"]
    if len(arguments) != (4 if full else 3):
        sys.exit("usage: tidy.py ROOT BUILD CACHE [--full]")
    root, build, cache = (pathlib.Path(argument).resolve() for argument in arguments[:3])
    sources, missing, elsewhere = find_sources(root, build)
    for name in missing:
        print(f"FAILED: clang-tidy {name}: {build} does not compile it", file=sys.stderr)
    checker = Checker(root, build, cache, full)
    unknown = [source for source in sources if not checker.is_clean(source)]
    failed = checker.check_all(unknown)
    for name, said in failed.items():
        print(f"FAILED: clang-tidy {name}\n{said}", file=sys.stderr)
    print(f"clang-tidy: {len(sources)} sources, {len(sources) - len(unknown)} of them known to be clean", file=sys.stderr)
    checker.prune()
    print(len(sources) - len(failed), len(failed) + len(missing), elsewhere)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
