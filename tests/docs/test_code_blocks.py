"""Every code block of README, CONTRIBUTING and docs runs, or says why it doesn't."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import Page, blocks_of, commands_of, holds_in_order

ROOT = Path(__file__).parents[2]
#: pages none of whose blocks run here
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("pages.py")), str(page)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    left_out = sum(bool(block.reason) for block in blocks)
    last = result.stdout.strip().splitlines()[-1]
    ran = len(blocks) - left_out
    assert last == f"{ran} blocks ran, {left_out} not run for a stated reason"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_a_block_that_nobody_runs_is_an_error() -> None:
    with pytest.raises(ValueError, match="isn't run"):
        blocks_of("text\n```\nls\n```\n")
    with pytest.raises(ValueError, match="without a reason"):
        blocks_of("<!-- not run: -->\n```sh\nls\n```\n")
    with pytest.raises(ValueError, match="never ends"):
        blocks_of("```python\nx = 1\n")


def test_a_reason_belongs_to_the_next_block_only() -> None:
    page = "<!-- not run: slow -->\n```console\n$ a\n```\ntext\n```python\nx = 1\n```\n"
    first, second = blocks_of(page)
    assert (first.reason, second.reason) == ("slow", "")
    assert (second.language, second.code, second.line) == ("python", "x = 1\n", 7)
    with pytest.raises(ValueError, match="isn't run"):
        blocks_of("<!-- not run: slow -->\nsome text between\n```sh\nls\n```\n")


def test_a_block_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: a.py -->\n```python\nx = 1 / 0\n```\n```console\n$ cat a.py\nx = 1\n```\n"
    )
    monkeypatch.chdir(tmp_path)
    assert Page(page).run() == (2, 0)
    assert (tmp_path / "a.py").read_text() == "x = 1 / 0\n"
    with pytest.raises(ValueError, match="without a reason"):
        blocks_of("<!-- file: ../a.py -->\n```python\nx = 1\n```\n")


def test_console_blocks() -> None:
    assert commands_of("$ a \\\n  b\nout\n$ c\n") == [("a \\\n  b", ["out"]), ("c", [])]
    assert holds_in_order("x\na b c\ny\nd\n", ["a ... c", "d"])
    assert not holds_in_order("d\na\n", ["a", "d"])
    assert not holds_in_order("a b" * 100_000, ["...a...", "...", "b...a", "...", "c..."])
