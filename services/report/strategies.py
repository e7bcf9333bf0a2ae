"""Which strategy ran when and why, in numbers and in sentences: for the report and for `longtail explain`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import groupby

from services.core.spans import StrategySpan, bucket_name, running_bucket
from services.report.records import Row, number
from services.report.svg import fmt
from services.report.trace import natural

STEP = "step "  # how labels of training steps begin; evaluations and the comparison have others
_FEW = 4  # reasons told in a sentence


def spans_of_rows(rows: Sequence[Row]) -> list[StrategySpan]:
    """Lines of strategies.jsonl; one that lacks a field is left out."""
    known = fields(StrategySpan)
    needed = [f.name for f in known if f.default is MISSING]
    whole = (row for row in rows if all(row.get(name) is not None for name in needed))
    return [StrategySpan(**{f.name: row[f.name] for f in known if f.name in row}) for row in whole]


def of_steps(spans: Iterable[StrategySpan]) -> list[StrategySpan]:
    """Those of training steps: nobody forces a strategy there unless a person asks for it."""
    return [s for s in spans if s.label.startswith(STEP)]


@dataclass(frozen=True, slots=True)
class StrategyUse:
    """`share`: of all rounds, in [0, 1]. `acceptance_length`: tokens per verify step, bonus included and what a stop
    cut off excluded. `gain`: predicted seconds of OFF over the seconds taken, where the selector predicts."""

    strategy: str
    rounds: int
    share: float
    acceptance_length: float
    tokens_per_s: float
    gain: float | None


@dataclass(frozen=True, slots=True)
class BucketUse:
    """Rounds with so many running requests, and each strategy's share of them, in [0, 1]."""

    bucket: int
    rounds: int
    share: Mapping[str, float]

    @property
    def name(self) -> str:
        return bucket_name(self.bucket)

    @property
    def top(self) -> str:
        return max(self.share, key=lambda name: self.share[name])


def by_strategy(spans: Sequence[StrategySpan]) -> list[StrategyUse]:
    """The most used one first."""
    rounds, found = sum(s.rounds for s in spans), []
    for name in {s.strategy for s in spans}:
        mine = [s for s in spans if s.strategy == name]
        count, seconds, tokens = sum(s.rounds for s in mine), sum(s.rounds_s for s in mine), sum(s.tokens for s in mine)
        length = tokens / sum(s.verify_steps for s in mine)
        rate = tokens / seconds if seconds else 0.0
        found.append(StrategyUse(name, count, count / rounds, length, rate, gain_of(mine)))
    return sorted(found, key=lambda use: (-use.rounds, use.strategy))


def by_bucket(spans: Sequence[StrategySpan]) -> list[BucketUse]:
    """From many running requests to few, as a rollout phase goes."""
    found: dict[int, dict[str, int]] = {}
    for span in spans:
        of = found.setdefault(running_bucket(span.running_last), {})
        of[span.strategy] = of.get(span.strategy, 0) + span.rounds
    rows = []
    for bucket, counts in sorted(found.items(), reverse=True):
        whole = sum(counts.values())
        rows.append(BucketUse(bucket, whole, {name: count / whole for name, count in sorted(counts.items())}))
    return rows


def bucket_rows(spans: Sequence[StrategySpan], gain_label: str) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a table: shares of the rounds by running requests, and below what each strategy brought."""
    uses, rows = by_strategy(spans), list[list[str]]()
    for row in by_bucket(spans):
        shares = [percent(row.share[u.strategy]) if u.strategy in row.share else "" for u in uses]
        rows.append([row.name, fmt(row.rounds, 0), *shares])
    rows.append(["all", fmt(sum(u.rounds for u in uses), 0), *(percent(u.share) for u in uses)])
    rows.append(["tokens per verify step", "", *(fmt(u.acceptance_length) for u in uses)])
    rows.append([gain_label, "", *(fmt(u.gain) for u in uses)])
    return ["running", "rounds", *(u.strategy for u in uses)], rows


def by_reason(spans: Sequence[StrategySpan]) -> dict[str, float]:
    """Each reason's share of the rounds, the most frequent first."""
    counts: dict[str, int] = {}
    for span in spans:
        counts[span.reason] = counts.get(span.reason, 0) + span.rounds
    whole = sum(counts.values())
    return {name: count / whole for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))}


def gain_of(spans: Iterable[StrategySpan]) -> float | None:
    """Seconds that OFF would have taken for the tokens over those that were taken; None without a prediction."""
    known = [(s.off_s, s.rounds_s) for s in spans if s.off_s is not None]
    taken = sum(seconds for _, seconds in known)
    return sum(off_s for off_s, _ in known) / taken if taken else None


def lost_share(spans: Iterable[StrategySpan]) -> float | None:
    """Part of the predicted rounds' time in stretches that were slower than OFF is expected to be; OFF's own rounds
    count as not lost."""
    known = [s for s in spans if s.off_s is not None]
    taken = sum(s.rounds_s for s in known)
    lost = sum(s.rounds_s for s in known if s.strategy != "off" and s.rounds_s > (s.off_s or 0.0))
    return lost / taken if taken else None


def stretches(spans: Sequence[StrategySpan]) -> list[StrategySpan]:
    """Of one slot: neighbours with one strategy for one reason as one, whatever number of requests ran."""
    out: list[StrategySpan] = []
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        last = out[-1] if out else None
        if last and last.key[:-1] == span.key[:-1]:
            out[-1] = replace(last, running_last=span.running_last).joined(span)  # of one kind but for the bucket
        else:
            out.append(span)
    return out


def mean_gain(steps: Sequence[Row], key: str) -> float | None:
    """Of `predicted_gain` or `achieved_gain` over the steps that have both, weighted by their rollout seconds."""
    both = [r for r in steps if number(r, "predicted_gain") and number(r, "achieved_gain")]
    weights = [number(r, "rollout_s") or 0.0 for r in both]
    if not sum(weights):
        return None
    return sum(w * (number(r, key) or 0.0) for w, r in zip(weights, both, strict=True)) / sum(weights)


def sentences(spans: Sequence[StrategySpan], steps: Sequence[Row]) -> list[str]:
    """What a person wants to know first."""
    if not spans:
        return []
    told = [_who_ran_when(by_bucket(spans)), _why(by_reason(spans)), *_gain(spans, steps)]
    return [text for text in told if text]


def percent(share: float) -> str:
    """ "97 %", and "<1 %" for what is not nothing."""
    return "<1\u00a0%" if 0 < share < 0.005 else f"{fmt(100 * share, 0)}\u00a0%"


def _range(rows: Sequence[BucketUse]) -> str:
    """ "5-32" of neighbouring buckets, the largest first."""
    low, high = rows[-1].name.split("-")[0], rows[0].name.split("-")[-1]
    return low if low == high else f"{low}\u2013{high}"


def _who_ran_when(rows: Sequence[BucketUse]) -> str:
    parts = []
    for name, group in groupby(rows, key=lambda row: row.top):
        same = list(group)
        share = sum(r.rounds * r.share[name] for r in same) / sum(r.rounds for r in same)
        who = " requests running at a server" if not parts else ""
        parts.append(f"with {_range(same)}{who}, {name} ran ({percent(share)} of the rounds)")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _why(reasons: Mapping[str, float]) -> str:
    told = [f"{reason} ({percent(share)})" for reason, share in list(reasons.items())[:_FEW]]
    more = len(reasons) - len(told)
    return f"Why: {', '.join(told)}{f' and {more} more' if more > 0 else ''}."


def _gain(spans: Sequence[StrategySpan], steps: Sequence[Row]) -> list[str]:
    gain, lost = gain_of(spans), lost_share(spans)
    if gain is None:
        return [
            "What that gained is unknown: this selector predicts no times, for OFF neither. longtail bench rollout "
            "measures it."
        ]
    told = [
        f"By the selector's figures for OFF, plain decoding would have taken {fmt(gain)} times as long for the same "
        "tokens."
    ]
    told.append(_trust(spans))
    predicted, achieved = mean_gain(steps, "predicted_gain"), mean_gain(steps, "achieved_gain")
    if predicted is not None and achieved is not None:
        told.append(
            f"Before the steps it predicted {fmt(predicted)} times, in the same steps it came to {fmt(achieved)}."
        )
    if lost is not None and lost >= 0.005:
        told.append(f"{percent(lost)} of the time went into stretches that were slower than OFF is expected to be.")
    return told


def _trust(spans: Sequence[StrategySpan]) -> str:
    """How far the figures for OFF hold, by the rounds in which OFF itself ran."""
    known = [s for s in spans if s.predicted]
    checked = [s for s in known if s.strategy == "off"]
    gain = gain_of(checked)
    if gain is None:
        return "OFF itself never ran, so these figures are the selector's guess."
    text = f"Where OFF itself ran it took {fmt(1 / gain)} times the seconds that the selector expected of it"
    guessed = sorted({s.slot for s in known} - {s.slot for s in checked}, key=natural)
    if not guessed:
        return f"{text}."
    return f"{text}; on {', '.join(guessed)} it never ran, and its figures there are a guess."
