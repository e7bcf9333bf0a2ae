"""What a chart is to the page: a drawing with its words, its legend, and the numbers behind it as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.report.svg import esc

HALF = 566  # drawing width of a chart that shares its row


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def html(self, caption: str) -> str:
        head = "".join(f'<th scope="col">{esc(h)}</th>' for h in self.head)
        body = "".join("<tr>" + "".join(f"<td>{esc(c)}</td>" for c in row) + "</tr>" for row in self.rows)
        return (
            f'<div class="scroll" tabindex="0"><table><caption>{esc(caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )


@dataclass(frozen=True)
class Figure:
    """`svg` is drawn by us; all other fields are plain text. `legend` pairs a swatch class with its label."""

    key: str
    title: str
    caption: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()
    table: Table | None = None
    full_width: bool = False

    def html(self) -> str:
        legend = "".join(f'<li><i class="sw {c}"></i>{esc(label)}</li>' for c, label in self.legend)
        table = ""
        if self.table and self.table.rows:
            table = f"<details><summary>Numbers</summary>{self.table.html(self.title)}</details>"
        return (
            f'<figure id="{self.key}" class="card{" full" if self.full_width else ""}" aria-labelledby="{self.key}-t">'
            f'<h3 id="{self.key}-t">{esc(self.title)}</h3>'
            + (f'<ul class="legend">{legend}</ul>' if legend else "")
            + (self.svg or '<p class="none">Nothing was recorded.</p>')
            + (f"<figcaption>{esc(self.caption)}</figcaption>" if self.caption else "")
            + f"{table}</figure>"
        )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(tuple(head), tuple(tuple(row) for row in rows))
