# SPDX-License-Identifier: Apache-2.0
"""Every Markdown file: width, relative links, and the files that it names.

Each check is also run over a small text with a planted fault, which it must find.
"""

import functools
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
COLUMNS = 120
# A row of a table cannot be broken. Beyond this a cell holds prose, which belongs beside the table.
TABLE_COLUMNS = 200
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^()\s]+)\)|!\[[^\]]*\]\(([^()\s]+)\)")
# Folders whose names, at the start of a path, mean this repository's.
FOLDERS = ("attention", "bench", "client", "cmake", "common", "ctl", "deploy", "docs", "engine", "examples", "gpu",
           "models", "plane", "proto", "scripts", "server", "storage", "tests")
NAMED = re.compile(rf"(?<![\w./~-])((?:{'|'.join(FOLDERS)})/[\w./-]*[\w/])(?!\*)")


@functools.cache
def documents():
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, text=True)
    return [path for path in listed.splitlines() if (ROOT / path).exists()]


def wide_lines(text):
    """(number, columns) of lines that are too wide."""
    return [(number, len(line)) for number, line in enumerate(text.splitlines(), 1)
            if len(line) > (TABLE_COLUMNS if line.startswith("|") else COLUMNS)]


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(text):
    """What Git hosts make of headings: lower case, no punctuation, hyphens for spaces."""
    titles = re.findall(r"^#+ +(.+?)\s*$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-") for title in titles}


def broken_links(path, text):
    broken = []
    for match in LINK.finditer(without_code(text)):
        link = match.group(1) or match.group(2)
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / path).parent / file if file else ROOT / path
        if not target.exists() or not target.resolve().is_relative_to(ROOT):
            broken.append(link)
        elif anchor and anchor not in anchors(text if not file else target.read_text()):
            broken.append(link)
    return broken


def missing_files(text):
    """Paths of this repository that a text names and that are not there; a name may lack its ending."""
    # Rooms of single files have names of their own.
    rooms = re.findall(r"^[\w/]+", (ROOT / "scripts/lib/layers.txt").read_text(), re.MULTILINE)
    missing = set()
    for name in NAMED.findall(text):
        name = name.rstrip("/.")
        if name not in rooms and not (ROOT / name).exists() and not list(ROOT.glob(f"{name}.*")) and not list(ROOT.glob(f"proto/{name}*")):
            missing.add(name)
    return sorted(missing)


# docs/FILE.md, "A title" (and further titles), in a comment that may go over lines.
SECTION = re.compile(r'docs/([\w/]+\.md)\)?, ((?:"[^"]+"(?:, |,? and )?)+)')


def titles(text):
    """Headings, and the bold words that begin a paragraph or an item."""
    return re.findall(r"^#+ +(.+?)\s*$|^(?:[-*] )?\*\*(.+?)[.:]?\*\*", text, re.MULTILINE)


def missing_sections(text):
    """Sections of documents that a source file names and that are not there; a name may be a title's beginning."""
    if "docs/" not in text:
        return []
    text = re.sub(r"[ \t]*\n[ \t]*(?://|#|\*)? *", " ", text)
    missing = []
    for document, quoted in SECTION.findall(text):
        known = [(heading or bold).replace("`", "") for heading, bold in titles((ROOT / "docs" / document).read_text())]
        missing += [f"{document}, {title}" for title in re.findall(r'"([^"]+)"', quoted)
                    if not any(name.startswith(title) for name in known)]
    return missing


def test_sections_that_sources_name_exist():
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    sources = [path for path in listed if (ROOT / path).suffix in
               (".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".proto", ".txt", ".cmake", ".yml") and (ROOT / path).exists()]
    assert len(sources) > 400
    missing = [f"{path}: {section}" for path in sources if path != "tests/scripts/test_markdown.py"
               for section in missing_sections((ROOT / path).read_text())]
    assert not missing, "\n".join(missing)


def test_there_are_documents():
    assert len(documents()) > 15


def test_lines_are_narrow():
    wide = [f"{path}:{number}: {columns} columns" for path in documents()
            for number, columns in wide_lines((ROOT / path).read_text())]
    assert not wide, "\n".join(wide)


def test_relative_links_lead_somewhere():
    broken = [f"{path}: {link}" for path in documents() for link in broken_links(path, (ROOT / path).read_text())]
    assert not broken, "\n".join(broken)


def test_files_that_are_named_exist():
    # Research pages tell of programs that are gone; they name the commit that has them.
    missing = [f"{path}: {name}" for path in documents() if not path.startswith("docs/research/")
               for name in missing_files((ROOT / path).read_text())]
    assert not missing, "\n".join(missing)


def test_every_document_is_in_a_list():
    said = (ROOT / "docs/README.md").read_text()
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = str(path.relative_to(ROOT / "docs"))
        assert name == "README.md" or f"]({name})" in said, f"docs/README.md does not list {name}"


def test_every_benchmark_is_in_its_list():
    said = (ROOT / "bench/README.md").read_text()
    programs = set(re.findall(r"add_executable\((\w+)", (ROOT / "bench/CMakeLists.txt").read_text()))
    assert len(programs) > 8
    missing = [program for program in programs if f"`{program}`" not in said]
    assert not missing, missing


def test_readme_is_one_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


def test_faults_are_found():
    assert wide_lines("a" * 121) and wide_lines("|" + "a" * 200) and not wide_lines("a" * 120 + "\n|" + "a" * 199)
    text = "# The house\n[a](README.md) [b](README.md#start-it) ![c](nowhere.svg) [d](#the-house) [e](#a-shed) [f](../x.md)\n"
    assert broken_links("README.md", text) == ["nowhere.svg", "#a-shed", "../x.md"]
    assert broken_links("docs/DESIGN.md", "[a](QUALITY.md) [b](README.txt) [c](https://example.org/none)") == ["README.txt"]
    assert not broken_links("README.md", "`[a](nowhere)`\n```\n[b](nowhere)\n```\n")
    assert missing_sections('// as docs/DESIGN.md, "The\n// shed", has it') == ["DESIGN.md, The shed"]
    assert not missing_sections('// (docs/DESIGN.md, "The\n// house")')
    named = "engine/engine.h engine/engine gpu/ (attention/none.h) tests/nothing /etc/engine/none build/bin/engine"
    assert missing_files(named) == ["attention/none.h", "tests/nothing"]
