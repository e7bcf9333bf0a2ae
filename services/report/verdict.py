"""What the run showed, in words: plain about what did not pay, like compared with like, the noise named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.report.records import Row, number
from services.report.run_data import RunData
from services.report.svg import fmt, fmt_seconds

Tone = Literal["good", "bad", "flat"]
_SAME_TIME = 0.03  # relative difference of rollout seconds below which we call them equal
_SAME_ACCEPTANCE = 0.02  # tokens per verify step
_FEW_STEPS = 3  # acceptance differs by chance from step to step; fewer allow no verdict


@dataclass(frozen=True)
class Finding:
    """`short` goes into the headline, `text` is the sentence with the numbers."""

    subject: str
    tone: Tone
    short: str
    text: str


def heldout_noise(run: RunData) -> float | None:
    """Two standard errors of the difference between the first and last held-out pass rate, counting prompts."""
    if len(run.evaluations) < 2:
        return None
    variance = 0.0
    for row in (run.evaluations[0], run.evaluations[-1]):
        rate, prompts = number(row, "correct_fraction"), number(row, "num_prompts")
        if rate is None or not prompts or not 0 <= rate <= 1:
            return None
        variance += rate * (1 - rate) / prompts
    return 2 * math.sqrt(variance)


def heldout(run: RunData) -> tuple[float | None, float | None]:
    """Held-out reward (before, after): from the summary, otherwise from the evaluations."""
    before, after = number(run.summary, "heldout_reward_before"), number(run.summary, "heldout_reward_after")
    rows = run.evaluations
    if before is None and rows:
        before = number(rows[0], "reward_mean")
    if after is None and len(rows) > 1:
        after = number(rows[-1], "reward_mean")
    return before, after


def _policy(run: RunData) -> Finding | None:
    before, after = heldout(run)
    if before is None or after is None:
        return None
    change, noise = after - before, heldout_noise(run)
    moved = f"from {fmt(before, 3)} to {fmt(after, 3)}"
    within = f", which is within the noise of this many held-out prompts (\u00b1 {fmt(noise, 3)})" if noise else ""
    if noise is not None and abs(change) <= noise:
        return Finding(
            "policy", "flat", "held-out reward did not change beyond noise", f"Held-out reward went {moved}{within}."
        )
    if change > 0:
        return Finding("policy", "good", "the policy improved", f"Held-out reward rose {moved}.")
    if change < 0:
        return Finding("policy", "bad", "the policy got worse", f"Held-out reward fell {moved}.")
    return Finding("policy", "flat", "held-out reward stayed the same", f"Held-out reward stayed at {fmt(before, 3)}.")


def _speculation(run: RunData) -> Finding | None:
    off, on = number(run.summary, "rollout_seconds_off"), number(run.summary, "rollout_seconds_on")
    if not off or not on:
        return None
    ratio = off / on
    took = f"The same rollouts took {fmt_seconds(off)} without speculation and {fmt_seconds(on)} with it"
    if ratio > 1 + _SAME_TIME:
        return Finding(
            "speculation", "good", f"speculation paid ({fmt(ratio)}\u00d7)", f"{took}: {fmt(ratio)} times as fast."
        )
    if ratio < 1 - _SAME_TIME:
        text = f"{took}: speculation did not pay here, it was {fmt(1 / ratio)} times slower."
        return Finding("speculation", "bad", "speculation did not pay", text)
    return Finding(
        "speculation", "flat", "speculation made no difference in time", f"{took}: no difference worth naming."
    )


def offline_pairs(steps: Sequence[Row]) -> list[tuple[float, float]]:
    """(live, frozen) offline acceptance lengths of the steps that have both."""
    keys = ("acceptance_length_live_offline", "acceptance_length_frozen_offline")
    pairs = [(number(row, keys[0]), number(row, keys[1])) for row in steps]
    return [(live, frozen) for live, frozen in pairs if live is not None and frozen is not None]


def _drafter(run: RunData) -> Finding | None:
    """Live against frozen on the same rollouts, mean of the last three steps that have both."""
    pairs = offline_pairs(run.steps)[-_FEW_STEPS:]
    if pairs:
        live, frozen = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
        where = f"on the last {len(pairs)} steps' rollouts" if len(pairs) > 1 else "on the last rollouts"
    else:
        last = number(run.summary, "acceptance_length_last")
        kept = number(run.summary, "acceptance_length_frozen_last")
        if last is None or kept is None:
            return None
        live, frozen, where = last, kept, "at the end"
    both = (
        f"{where} the trained drafter reached an acceptance length of {fmt(live)}, its frozen first copy {fmt(frozen)}"
    )
    both = both[0].upper() + both[1:]
    if 0 < len(pairs) < _FEW_STEPS:
        return Finding("drafter", "flat", "", f"{both}: too few steps to tell whether training it paid.")
    if live - frozen > _SAME_ACCEPTANCE:
        return Finding("drafter", "good", "training the drafter paid", f"{both}.")
    if frozen - live > _SAME_ACCEPTANCE:
        text = f"{both}: training made the drafter worse."
        return Finding("drafter", "bad", "training the drafter made it worse", text)
    text = f"{both}: training it did not pay, the frozen copy is as good."
    return Finding("drafter", "flat", "training the drafter did not pay", text)


def idle_use(run: RunData) -> tuple[float | None, float | None]:
    """(idle, drafting) slot-seconds, disjoint: time with nothing to generate, unused or used, while others generate
    or beside a policy that trains on GPUs of its own."""
    pairs = [(number(r, "idle_s"), number(r, "drafting_s")) for r in run.steps]
    known = [(idle, drafting) for idle, drafting in pairs if idle is not None and drafting is not None]
    if known:
        return sum(idle for idle, _ in known), sum(drafting for _, drafting in known)
    return number(run.summary, "idle_seconds"), number(run.summary, "drafting_seconds")


def idle_share(run: RunData) -> float | None:
    """Part of the slot time with nothing to generate that went into drafter training, in [0, 1]."""
    idle, drafting = idle_use(run)
    if idle is None or drafting is None or idle + drafting <= 0:
        return None
    return drafting / (idle + drafting)


def _idle(run: RunData) -> Finding | None:
    idle, drafting = idle_use(run)
    share = idle_share(run)
    if share is None or idle is None or drafting is None:
        return None
    text = (
        f"Slots that may train the drafter had nothing to generate for {fmt_seconds(idle + drafting)} in all; "
        f"drafter training used {fmt_seconds(drafting)} of it ({fmt(100 * share, 0)}\u00a0%)."
    )
    return Finding("idle", "flat" if drafting > 0 else "bad", "", text)


def _lossless(run: RunData) -> Finding | None:
    mismatches = number(run.summary, "greedy_mismatches")
    if mismatches is None:
        return None
    if mismatches == 0:
        return Finding("lossless", "good", "", "Greedy output with speculation was identical to plain decoding.")
    text = f"Greedy output differed from plain decoding in {fmt(mismatches, 0)} response(s): it is not lossless here."
    return Finding("lossless", "bad", "speculation changed the output", text)


def _ending(run: RunData) -> Finding | None:
    if run.status == "finished":
        return None
    if run.status == "unfinished":
        text = "The run left no summary: it crashed, was killed, or is still going. Shown is what it had written."
        return Finding("status", "bad", "the run did not finish", text)
    error = run.summary.get("error")
    text = f"The run ended early ({run.status})" + (f": {error}" if error else ".")
    return Finding("status", "bad", f"the run was {run.status}" if run.status == "stopped" else "the run failed", text)


def _losses(run: RunData) -> Finding | None:
    lost = [e for e in run.events if e.kind.endswith("lost")]
    if not lost:
        return None
    back = sum(e.kind.endswith("returned") for e in run.events)
    names = ", ".join(dict.fromkeys(e.subject for e in lost))
    text = f"Lost during the run: {names} ({len(lost)} in all, {back} came back); see the events."
    return Finding("losses", "flat", "", text)


def findings(run: RunData) -> list[Finding]:
    """All that can be said about this run, in reading order."""
    made = (_ending(run), _policy(run), _speculation(run), _drafter(run), _lossless(run), _idle(run), _losses(run))
    return [f for f in made if f is not None]


def headline(found: Sequence[Finding]) -> str:
    """One sentence."""
    short = [f.short for f in found if f.short]
    if not short:
        return "Nothing was measured that allows a verdict."
    joined = short[0] if len(short) == 1 else ", ".join(short[:-1]) + ", and " + short[-1]
    return joined[0].upper() + joined[1:] + "."
