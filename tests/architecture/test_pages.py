"""Links and pictures of README.md and docs/ lead somewhere, also to a heading of a page; and no page is left alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "k8s" / "README.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:services|actors|deploy|docs|tests|k8s)/[\w./-]+\.(?:py|jsonl?|ya?ml|svg|png|md))`")


def prose_of(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_in(page: Path) -> Iterator[str]:
    for link in LINK.findall(prose_of(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        there = page.parent / name if name else page
        if not there.is_file():
            yield f"{link}: there is no {name}"
        elif anchor and anchor not in anchors_of(there):
            yield f"{link}: {name} has no heading #{anchor}"
    for name in FILE.findall(prose_of(page)):
        if not (ROOT / name).is_file():
            yield f"`{name}`: there is no such file"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_what_a_page_points_to_is_there(page: Path) -> None:
    assert not list(broken_in(page))


def test_readme_leads_to_every_page() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall(prose_of(PAGES[0]))}
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `thing`: two\n[a](#a-thing-two) [b](#b) [c](gone.md) `services/gone.py`\n```\n[d](d.md)\n```\n"
    )
    assert [problem.partition(":")[0] for problem in broken_in(page)] == ["#b", "gone.md", "`services/gone.py`"]
