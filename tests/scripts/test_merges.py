# SPDX-License-Identifier: Apache-2.0
"""No file holds what Git leaves where a merge was not finished; a planted rest is found."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
MARKERS = rf"^({'<' * 7}|{'>' * 7}) "


def unfinished(folder):
    """file:line of each rest of a merge in the folder's text files."""
    found = subprocess.run(["git", "grep", "-nIE", "--untracked", MARKERS, "--", "."], cwd=folder, text=True,
                           capture_output=True, check=False)
    assert found.returncode in (0, 1), found.stderr
    return [line.split(":", 2)[:2] for line in found.stdout.splitlines()]


def test_no_merge_is_unfinished():
    assert unfinished(ROOT) == []


def test_a_planted_rest_is_found(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "page.md").write_text(f"{'<' * 7} HEAD\none\n{'=' * 7}\ntwo\n{'>' * 7} branch\n")
    (tmp_path / "good.md").write_text(f"Title\n{'=' * 7}\n")
    assert unfinished(tmp_path) == [["page.md", "1"], ["page.md", "5"]]
