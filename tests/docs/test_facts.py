"""What the pages say of the code, compared with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import field_classes

from remote_rl import errors, losses
from remote_rl.losses.aggregation import COUNTED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_page_of_fields_is_what_the_metadata_say() -> None:
    assert read("docs/field-classes.md") == field_classes.page(), (
        "run python tests/docs/field_classes.py"
    )


def test_every_dependency_has_its_row_and_no_other_has() -> None:
    page = read("docs/dependencies.md")
    wanted = {re.match(r"[A-Za-z0-9_-]+", each).group() for each in PROJECT["dependencies"]}  # type: ignore[union-attr]
    required, _, extras = page.partition("## Extras")
    assert set(re.findall(r"^\| `([a-z-]+)` \|", required, re.MULTILINE)) == wanted
    named = set(re.findall(r"^\| `([a-z-]+)` \|", extras, re.MULTILINE))
    assert named == set(PROJECT["optional-dependencies"])


def test_the_page_of_concepts_has_every_error_and_aggregation() -> None:
    page = read("docs/concepts.md")
    for name in errors.__all__:
        assert f"`{name}`" in page or name == "RemoteRLError", name
    for kind in COUNTED:
        assert f"`{kind}" in page, kind
    for loss in losses.LOSSES.values():
        assert loss.__name__ in page, loss.__name__


def test_the_readme_links_to_every_page_and_example() -> None:
    readme = read("README.md")
    for path in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{path.name})" in readme, path.name
    for path in (ROOT / "examples").glob("*.py"):
        if path.stem not in ("reporting", "make_arithmetic", "golden_curves"):
            assert f"(examples/{path.name})" in readme, path.name
    for path in (ROOT / "examples" / "verl").glob("*.sh"):
        assert f"(examples/verl/{path.name})" in readme, path.name


def test_the_changelog_begins_with_this_version() -> None:
    version = read("remote_rl/__about__.py").split('"')[-2]
    first = re.search(r"^## \[([^\]]+)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert first is not None
    assert first.group(1) == version


def test_examples_stay_short() -> None:
    for path in [*(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.sh")]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        # the golden run also evaluates, and takes its model and task from the command line
        limit = 170 if path.stem == "golden_arithmetic" else 80
        assert lines < limit, f"{path.name} has {lines} lines"
