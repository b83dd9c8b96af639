# SPDX-License-Identifier: Apache-2.0
"""Includes stay within the layers that scripts/lib/layers.txt lists, and the picture in docs/DESIGN.md shows these layers.

Each check is also run over a small tree with a planted violation, which it must find.
"""

import functools
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYERS = ROOT / "scripts/lib/layers.txt"
SOURCE = (".h", ".cc", ".cuh", ".cu")
INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', re.MULTILINE)


class Layers:
    """What layers.txt says. A room is a set of files; the longest path that a file begins with decides its room."""

    def __init__(self, text):
        self.may = {}  # room -> rooms that it may include
        self.paths = {}  # path -> room
        self.libraries = {}  # prefix of an include -> rooms that may have it
        for line in re.sub(r"\n +", " ", text).splitlines():
            line = line.split("#")[0].strip()
            if line.startswith("library "):
                prefix, rooms = line.removeprefix("library ").split(":")
                self.libraries[prefix.strip()] = rooms.split()
            elif line:
                self._add_room(line)
        for prefix, rooms in self.libraries.items():
            unknown = [room for room in rooms if room not in self.may]
            assert not unknown, f"library {prefix}: no such rooms: {unknown}"

    def _add_room(self, line):
        names, may = line.split("->") if "->" in line else (line, "")
        room, _, paths = (part.strip() for part in names.partition("="))
        assert room not in self.may, f"{room} is listed twice"
        for below in may.split():
            assert below in self.may, f"{room} may include only rooms listed above it, not {below}"
        self.may[room] = set(may.split())
        for path in paths.split() or [room + "/"]:
            self.paths[path] = room

    def room_of(self, path):
        fits = [known for known in self.paths if path.startswith(known)]
        return self.paths[max(fits, key=len)] if fits else None

    def faults_of(self, path, text):
        room = self.room_of(path)
        if room is None:
            return [f"{path}: in no room of {LAYERS.name}"]
        faults = []
        for include in INCLUDE.findall(text):
            below = self.room_of(include)
            if below is not None and below != room and below not in self.may[room]:
                faults.append(f"{path}: {room} may not include {below} ({include})")
            for prefix, rooms in self.libraries.items():
                if include.startswith(prefix) and room not in rooms:
                    faults.append(f"{path}: {room} may not use the library of {include}")
        return faults


@functools.cache
def layers():
    return Layers(LAYERS.read_text())


@functools.cache
def product_files():
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    return [path for path in listed
            if path.endswith(SOURCE) and not path.startswith(("tests/", "cmake/", "client/python/")) and (ROOT / path).exists()]


def test_includes_stay_within_the_layers():
    assert len(product_files()) > 200
    faults = [fault for path in product_files() for fault in layers().faults_of(path, (ROOT / path).read_text())]
    assert not faults, "\n".join(faults)


def test_every_path_of_the_list_exists():
    for path in layers().paths:
        assert list(ROOT.glob(f"{path}*")) or list(ROOT.glob(f"proto/{path}*")), path


def test_every_arrow_of_the_list_is_used():
    used = set()
    for path in product_files():
        for include in INCLUDE.findall((ROOT / path).read_text()):
            used.add((layers().room_of(path), layers().room_of(include)))
    allowed = {(room, below) for room, rooms in layers().may.items() for below in rooms}
    assert not allowed - used, f"no file needs these: {sorted(allowed - used)}"


def test_no_product_file_includes_tests_or_benchmarks():
    for path in product_files():
        includes = INCLUDE.findall((ROOT / path).read_text())
        assert not any(include.startswith("tests/") for include in includes), path
        assert path.startswith("bench/") or not any(include.startswith("bench/") for include in includes), path


def test_oracles_share_no_code_with_what_they_check():
    for path in sorted((ROOT / "tests/oracle").glob("*")):
        if path.suffix in SOURCE:
            for include in INCLUDE.findall(path.read_text()):
                own = include.startswith(("tests/oracle/", "tests/test_seed.h", "gtest/", "gmock/"))
                assert own or "/" not in include, f"{path.name}: {include}"


SMALL = """
low
seam = high/seam.h -> low
high -> low seam
library lib/ : low
"""


def test_violations_are_found():
    small = Layers(SMALL)
    good = [("low/a.h", '#include <lib/b.h>\n#include <vector>\n#include "low/c.h"'),
            ("high/seam.h", '#include "low/a.h"'), ("high/d.cc", '#include "high/seam.h"')]
    for path, text in good:
        assert not small.faults_of(path, text)
    bad = [("low/a.h", '#include "high/seam.h"'), ("high/seam.h", '  # include "high/d.h"'),
           ("high/d.cc", "#include <lib/b.h>"), ("other/e.h", "")]
    for path, text in bad:
        assert len(small.faults_of(path, text)) == 1, path


def test_a_list_with_a_cycle_is_refused():
    for text in ["a -> b\nb -> a", "a -> a", "a\na", "library lib/ : nobody"]:
        try:
            Layers(text)
        except AssertionError:
            continue
        raise RuntimeError(f"accepted: {text}")


# The picture: nodes are rooms, subgraphs are folders, arrows are the list's without those that follow from others.


def picture_arrows(text):
    """(from, to) of the Mermaid picture whose first line says that it is checked."""
    block = re.search(r"```mermaid\n(%% Checked by tests/scripts/test_layers.py\n.*?)```", text, re.DOTALL).group(1)
    names, arrows = {}, set()
    for line in block.splitlines():
        if found := re.match(r'\s*(?:subgraph\s+)?(\w+)\["([\w/]+)', line):
            names[found.group(1)] = found.group(2)
    for line in block.splitlines():
        if "-->" in line:
            ends = [[names[name.strip()] for name in end.split("&")] for end in line.split("-->")]
            for above, below in zip(ends, ends[1:]):
                arrows |= {(a, b) for a in above for b in below}
    return set(names.values()), arrows


def closure(arrows):
    reach = set(arrows)
    while more := {(a, d) for a, b in reach for c, d in reach if b == c} - reach:
        reach |= more
    return reach


# Benchmarks would add an arrow to nearly every room.
NOT_DRAWN = {"bench"}


def list_arrows(nodes):
    """The list's arrows as a picture with these nodes draws them: between rooms of a folder, and between folders.

    Rooms of single files (those with a path of their own) may be left out of the picture, folders may not.
    """
    arrows = set()
    for room, rooms in layers().may.items():
        folder = room.split("/")[0]
        if folder in NOT_DRAWN:
            continue
        assert folder in nodes and (room in nodes or f"{room}/" not in layers().paths), f"the picture lacks {room}"
        for below in rooms:
            if below.split("/")[0] != folder:
                arrows.add((folder, below.split("/")[0]))
            elif {room, below} <= nodes:
                arrows.add((room, below))
    return arrows


def faults_of_picture(text):
    nodes, drawn = picture_arrows(text)
    listed = list_arrows(nodes)
    return (sorted(drawn - closure(listed)), sorted(listed - closure(drawn)))


def test_the_picture_shows_the_layers():
    wrong, missing = faults_of_picture((ROOT / "docs/DESIGN.md").read_text())
    assert not wrong, f"docs/DESIGN.md draws arrows that the list does not allow: {wrong}"
    assert not missing, f"docs/DESIGN.md does not draw: {missing}"


def test_wrong_pictures_are_found():
    text = (ROOT / "docs/DESIGN.md").read_text()
    block = re.search(r"%% Checked by tests/scripts/test_layers.py\n.*?```", text, re.DOTALL).group(0)
    arrows = [line for line in block.splitlines() if "-->" in line]
    for arrow in arrows:
        above, below = arrow.split("-->")[:2]
        assert faults_of_picture(text.replace(arrow, ""))[1], f"taking away is not noticed: {arrow}"
        assert faults_of_picture(text.replace(arrow, f"{arrow}\n{below.strip()} --> {above.strip()}"))[0], arrow
