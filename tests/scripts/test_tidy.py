# SPDX-License-Identifier: Apache-2.0
"""clang-tidy's stage: that each source is checked, alone or with others, and again when what it includes has changed. A
program that writes down what it was to check stands for clang-tidy, but for the last tests, whose faults clang-tidy finds.
"""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
from test_stages import ROOT, run_stages

sys.path.insert(0, str(ROOT / "scripts" / "lib"))

import tidy  # noqa: E402

SOURCES = [str(path.relative_to(ROOT)) for folder in tidy.FOLDERS for path in ROOT.glob(f"{folder}/**/*.cc")]
# Of machines with CUDA or without.
ELSEWHERE = [source for source in SOURCES if source.startswith("gpu/cuda/") or source.endswith("/no_cuda_device.cc")]

# Writes the sources that it was given to $CHECKED; a source that holds BAD fails, and two that hold ONCE fail together.
CLANG_TIDY = r"""#!/bin/bash
if [[ "$1" == --version ]]; then echo "version ${VERSION:-1}"; exit; fi
source="${@: -1}"
sources="${source}"
[[ "${source}" == */group.cc ]] && sources="$(sed 's/#include "\(.*\)"/\1/' "${source}")"
echo "$*" $(basename -a ${sources}) >>"${CHECKED}"
cat ${sources} | grep BAD && exit 1
(($(cat ${sources} | grep -c ONCE) < 2))
"""


class Tree:
    """A project of four sources."""

    def __init__(self, folder: pathlib.Path, cache: pathlib.Path) -> None:
        self.root = folder / "root"
        self._cache = cache
        self._log = folder / "checked"
        self._bin = folder / "bin"
        self.files = {
            ".clang-tidy": "Checks: '*'\n",
            "common/a.h": "int a;\n",
            "common/b.h": '#include "common/a.h"\n',
            "proto/attnd/v1/imported.proto": "",
            "proto/attnd/v1/x.proto": 'import "attnd/v1/imported.proto";\n',
            "common/none.cc": "#include <vector>\n",
            "common/of_a.cc": ' # include "a.h"\n',
            "common/of_b.cc": '#include "common/b.h"\n',
            "server/of_x.cc": '#include "attnd/v1/x.grpc.pb.h"\n',
        }
        self.commands = {name: "clang++ -O1" for name in self.files if name.endswith(".cc")}
        self._bin.mkdir(parents=True)
        (self._bin / "clang-tidy").write_text(CLANG_TIDY)
        (self._bin / "clang-tidy").chmod(0o755)

    def run(self, *arguments: str, version: str = "1") -> tuple[str, set[str], list[str], str]:
        """The counts, the sources that were checked, clang-tidy's arguments, and what was said."""
        for name, text in self.files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        build = self.root / "build"
        build.mkdir(exist_ok=True)
        commands = [{"directory": str(build), "file": f"{self.root}/{name}",
                     "command": f"{command} -I{self.root} -o {name}.o -c {self.root}/{name}"}
                    for name, command in self.commands.items()]
        (build / "compile_commands.json").write_text(json.dumps(commands))
        self._log.write_text("")
        done = subprocess.run(
            [sys.executable, ROOT / "scripts/lib/tidy.py", self.root, build, self._cache, *arguments],
            env={"PATH": f"{self._bin}:/usr/bin:/bin", "CHECKED": str(self._log), "VERSION": version},
            capture_output=True, text=True, timeout=60, check=True)
        calls = self._log.read_text().splitlines()
        checked = {word for call in calls for word in call.split() if word.endswith(".cc") and "/" not in word}
        return done.stdout.strip(), checked, calls, done.stderr


ALL = {"none.cc", "of_a.cc", "of_b.cc", "of_x.cc"}


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path, tmp_path / "cache")


@pytest.mark.parametrize("changed, expected", [
    (None, set()),
    ("common/a.h", {"of_a.cc", "of_b.cc"}),
    ("common/b.h", {"of_b.cc"}),
    ("common/none.cc", {"none.cc"}),
    ("proto/attnd/v1/x.proto", {"of_x.cc"}),
    ("proto/attnd/v1/imported.proto", {"of_x.cc"}),
    (".clang-tidy", ALL),
])
def test_a_change_has_those_checked_again_that_include_it(tree, changed, expected):
    assert tree.run()[:2] == ("4 0 0", ALL)
    if changed:
        tree.files[changed] += "// more\n"
    assert tree.run()[:2] == ("4 0 0", expected)


def test_an_include_that_is_new_counts(tree):
    tree.run()
    tree.files["common/a.h"] += '#include "common/new.h"\n'
    tree.files["common/new.h"] = ""
    assert tree.run()[1] == {"of_a.cc", "of_b.cc"}
    tree.files["common/new.h"] = "int b;\n"
    assert tree.run()[1] == {"of_a.cc", "of_b.cc"}


def test_another_command_or_version_has_sources_checked_again(tree):
    tree.run()
    tree.commands["common/of_a.cc"] += " -DX"
    assert tree.run()[1] == {"of_a.cc"}
    assert tree.run(version="2")[1] == ALL


def test_checkouts_share_what_is_known(tmp_path):
    (tmp_path / "one").mkdir()
    assert Tree(tmp_path / "one", tmp_path / "cache").run()[1] == ALL
    assert Tree(tmp_path / "two", tmp_path / "cache").run()[:2] == ("4 0 0", set())


@pytest.mark.parametrize("source", ["common/of_b.cc", "server/of_x.cc"])
def test_one_that_fails_fails_alone_and_every_time(tree, source):
    tree.files[source] += "BAD\n"
    name = pathlib.Path(source).name
    counts, checked, _, said = tree.run()
    assert (counts, checked) == ("3 1 0", ALL)
    assert f"FAILED: clang-tidy {source}\nBAD" in said
    assert tree.run()[:2] == ("3 1 0", {name})


def test_a_header_that_is_bad_fails_all_that_include_it(tree):
    tree.files["common/of_a.cc"] += "BAD\n"
    tree.files["common/of_b.cc"] += "BAD\n"
    assert tree.run()[0] == "2 2 0"


def test_sources_that_cannot_stand_together_pass_apart(tree):
    tree.files["common/of_a.cc"] += "ONCE\n"
    tree.files["common/of_b.cc"] += "ONCE\n"
    counts, checked, _, said = tree.run()
    assert (counts, checked) == ("4 0 0", ALL)
    assert "not together" in said
    assert tree.run()[1] == set()


def groups_of(calls: list[str]) -> list[str]:
    return sorted(call.split(".cc ", 1)[1] for call in calls)


def test_sources_of_other_commands_stand_apart(tree):
    tree.commands["common/of_a.cc"] += " -DX"
    assert groups_of(tree.run()[2]) == ["none.cc of_b.cc of_x.cc", "of_a.cc"]


def test_where_a_thread_library_is_named_makes_no_other_command(tree):
    tree.commands["common/of_a.cc"] += " -pthread -DX"
    tree.commands["common/of_b.cc"] += " -DX -pthread"
    assert groups_of(tree.run()[2]) == ["none.cc of_x.cc", "of_a.cc of_b.cc"]


def test_two_programs_do_not_stand_together(tree):
    tree.files["common/none.cc"] += "int main() {}\n"
    tree.files["common/of_a.cc"] += "int main() {}\n"
    assert groups_of(tree.run()[2]) == ["of_a.cc", "of_b.cc of_x.cc none.cc"]


def test_what_includes_itself_stands_alone(tree):
    tree.files["common/none.cc"] += "#define HWY_TARGET_INCLUDE\n"
    assert groups_of(tree.run()[2]) == ["none.cc", "of_a.cc of_b.cc of_x.cc"]


def test_highways_sources_are_read_once_but_with_full(tree):
    tree.files["common/none.cc"] += "#define HWY_TARGET_INCLUDE\n"
    assert [tidy.ONE_TARGET in call for call in tree.run()[2]].count(True) == 1
    assert not any(tidy.ONE_TARGET in call for call in tree.run("--full")[2])


def test_the_analyzer_runs_with_full_alone(tree):
    calls = tree.run()[2]
    assert all("--checks=-clang-analyzer-*" in call for call in calls)
    counts, checked, calls, _ = tree.run("--full")
    assert (counts, checked, len(calls)) == ("4 0 0", ALL, 4)
    assert not any("--checks" in call for call in calls)
    assert tree.run("--full")[1] == set()
    tree.files["common/none.cc"] += "// more\n"
    assert tree.run("--full")[1] == {"none.cc"}
    assert tree.run()[1] == set()


def test_what_is_known_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(tidy, "KEPT", 3)
    checker = tidy.Checker(tmp_path, tmp_path, tmp_path / "cache", full=False)
    sources = [tidy.Source(str(i), "", f"key{i}", False, False) for i in range(5)]
    for i, source in enumerate(sources):
        path = tmp_path / "cache" / source.key
        path.touch()
        tidy.os.utime(path, (i, i))
    assert checker.is_clean(sources[0])  # used now
    checker.prune()
    assert [checker.is_clean(source) for source in sources] == [True, False, False, True, True]


@pytest.mark.parametrize("sources, failed", [
    (SOURCES, 0),
    ([source for source in SOURCES if source not in ELSEWHERE], 0),
    ([source for source in SOURCES if source != "server/server.cc"], 1),
    ([], len(SOURCES) - len(ELSEWHERE)),
], ids=["all", "without CUDA's", "one left out", "none"])
def test_the_stage(tmp_path, sources, failed):
    commands = [{"file": f"{ROOT}/{source}"} for source in sources]
    (tmp_path / "compile_commands.json").write_text(json.dumps(commands))
    (tmp_path / "clang-tidy").write_text("#!/bin/sh\necho version 1\n")
    (tmp_path / "clang-tidy").chmod(0o755)
    done = run_stages(tmp_path, {"tidy": f"tidy_all {tmp_path} {tmp_path}/cache"},
                      f"source scripts/lib/tidy.sh; PATH={tmp_path}:$PATH")
    assert done.stdout.splitlines()[-1] == f"{len(sources)} passed, {failed} failed", done.stdout + done.stderr


# What each of the stage's tools finds: clang's thread-safety analysis, clang's warnings, and the checks of .clang-tidy.
FAULTS = {
    "thread-safety": """
        struct __attribute__((capability("mutex"))) Mutex {};
        struct S { Mutex mutex; int guarded __attribute__((guarded_by(mutex))) = 0; };
        int Read(S& s) { return s.guarded; }""",
    "reserved-identifier": "int __reserved = 0;",
    "bugprone": "int Same(bool b) { if (b) { return 1; } else { return 1; } }",
    "NullDereference": "int Null(int* p) { if (p == nullptr) { return *p; } return 0; }",
}


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("fault", FAULTS)
def test_clang_tidy_finds(tmp_path, fault, together):
    """With flags of the preset clang's build, and in a group as well as alone."""
    assert shutil.which("clang-tidy"), "test.sh installs clang-tidy"
    (tmp_path / "common").mkdir()
    shutil.copy(ROOT / ".clang-tidy", tmp_path)
    texts = {"bad": FAULTS[fault], "fine": "int Fine() { return 1; }"}
    flags = "clang++ -std=c++20 -Wall -Werror -Wthread-safety -Wreserved-identifier"
    commands = []
    for name, text in texts.items():
        if name == "bad" or together:
            path = tmp_path / "common" / f"{name}.cc"
            path.write_text(text + "\n")
            commands.append({"directory": str(tmp_path), "file": str(path), "command": f"{flags} -c {path}"})
    (tmp_path / "compile_commands.json").write_text(json.dumps(commands))
    full = ["--full"] if fault == "NullDereference" else []
    done = subprocess.run([sys.executable, ROOT / "scripts/lib/tidy.py", tmp_path, tmp_path, tmp_path / "cache", *full],
                          capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [str(len(commands) - 1), "1", "0"], done.stderr
    assert fault in done.stderr
