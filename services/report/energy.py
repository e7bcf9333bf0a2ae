"""The energy of the run's GPUs by role, when it was measured."""

from __future__ import annotations

from services.report.figure import table
from services.report.records import number
from services.report.run_data import RunData
from services.report.svg import esc, fmt

_METHODS = {
    "counter": "the GPUs' own energy counters",
    "power": "samples of the GPUs' power, integrated",
    "counter and power": "energy counters where a GPU has one, elsewhere integrated samples of its power",
}


def energy_section(run: RunData) -> str:
    """The section of the page, from the steps; empty when no step was measured."""
    measured = [row["energy_j"] for row in run.steps if isinstance(row.get("energy_j"), dict)]
    if not measured:
        return ""
    roles = dict.fromkeys(role for energy in measured for role in energy)
    joules = {role: sum(number(energy, role) or 0.0 for energy in measured) for role in roles}
    whole = sum(joules.values())
    share = {role: f"{fmt(100 * spent / whole, 1)}\u00a0%" if whole else "\u2013" for role, spent in joules.items()}
    rows = [
        [role, fmt(spent, 0), fmt(spent / len(measured), 0), share[role]]
        for role, spent in sorted(joules.items(), key=lambda item: -item[1])
    ]
    rows.append(["all", fmt(whole, 0), fmt(whole / len(measured), 0), ""])
    method = _METHODS.get(str(run.summary.get("energy_method")))
    note = (
        f"{len(measured)} of {len(run.steps)} steps were measured" + (f", by {method}" if method else "") + ". "
        "GPUs only: processors, memory, fans and power supplies are not in it, nor are evaluations."
    )
    numbers = table(("role", "joules", "joules per step", "share"), rows).html("Joules by role")
    body = f'<div class="card">{numbers}<p class="none">{esc(note)}</p></div>'
    return f'<section aria-label="Energy"><h2>Energy</h2>{body}</section>'
