"""`longtail bench serve`: a served model that learns from what it serves against the same that does not.

Both begin with the same drafter (by default one that never learned anything) and get the same requests at the same
moments, each in a process of its own, `longtail serve --in-process`, in turns; who begins changes. Latencies are the
client's; tokens, drafts and versions are what /metrics tells. Greedy answers are compared with those of a server that
never drafts.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from deploy.provenance import provenance
from deploy.steady_load import Answered, arrivals, ask, load, quantile, scrape, sum_prompt
from services.core.errors import ServiceLostError, WaitTimeoutError
from services.drafter.export import write_drafter_folder
from services.models.drafter import Drafter
from services.models.eagle import Eagle
from services.models.files import model_dir, read_config
from services.models.layers import model_spec

ROOT = Path(__file__).resolve().parents[1]
START_S, END_S = 300.0, 60.0
WINDOWS = 6
GREEDY = 12  # prompts
FIXED = 'speculation.selector={"type": "fixed", "strategy": {"drafter": "eagle", "depth": 4, "num_draft_tokens": 5}}'
OFF = 'speculation.selector={"type": "fixed"}'
MODEL = "bench"


@dataclass(frozen=True)
class LoadPlan:
    """`rate` of requests a second for `seconds`; answers of at most `max_tokens`."""

    rate: float
    seconds: float
    max_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True)
class Side:
    """One server's time: what clients saw, and what it told every sixth of the time."""

    answers: tuple[Answered, ...]
    told: tuple[dict[str, float], ...]
    greedy: tuple[str, ...]


def run_bench(
    model: str,
    drafter: Path | None,
    plan: LoadPlan,
    settings: Sequence[str],
    repeats: int,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="longtail-serve-") as place:
        start = drafter or _untrained(model, Path(place) / "untrained")
        with _server([model, *_set(*settings, OFF)]) as url:
            wanted = _greedy(url, plan)
        sides: dict[str, list[Side]] = {"off": [], "learning": []}
        for repeat in range(repeats):
            for name in ("off", "learning") if repeat % 2 == 0 else ("learning", "off"):
                learn = ["--learn", "--out", f"{place}/learned-{repeat}"] if name == "learning" else []
                with _server([model, "--drafter", str(start), *learn, *_set(*settings, FIXED)]) as url:
                    sides[name].append(_side(url, plan, repeat))
                say(json.dumps({"repeat": repeat, "side": name, **_figures([sides[name][-1]], wanted)}))
    return {
        "bench": "serve",
        **provenance(),
        "model": model,
        "begins_with": "an untrained drafter" if drafter is None else str(drafter),
        "requests_per_s": plan.rate,
        "seconds": plan.seconds,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "settings": list(settings),
        "repeats": repeats,
        **{name: _figures(found, wanted) for name, found in sides.items()},
    }


def _untrained(model: str, folder: Path) -> Path:
    config = read_config(model_dir(model))
    method = Eagle(model_spec(config))
    drafter = Drafter(method)
    drafter.reset(torch.Generator().manual_seed(1))
    write_drafter_folder(drafter.tensors(), method, config, folder)
    return folder


def _set(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


@contextmanager
def _server(arguments: Sequence[str]) -> Iterator[str]:
    """Its URL. Raises ServiceLostError when it ends by itself, WaitTimeoutError when it does not begin."""
    command = [sys.executable, "-m", "deploy", "serve", *arguments, "--name", MODEL, "--in-process", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    told, ready = list[str](), threading.Event()

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            told.append(line)
            if "is served: " in line:
                ready.set()
        ready.set()

    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    try:
        if not ready.wait(START_S):
            raise WaitTimeoutError(f"longtail serve was not ready within {START_S:g} s: {''.join(told[-5:])}")
        served = [line for line in told if "is served: " in line]
        if not served:
            raise ServiceLostError("longtail serve", f"it ended: {''.join(told[-5:])}")
        yield served[0].split("is served: ")[1].strip()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)
        listening.join(END_S)


def _greedy(url: str, plan: LoadPlan) -> tuple[str, ...]:
    rng = random.Random("greedy")
    prompts = [sum_prompt(rng) for _ in range(GREEDY)]
    return tuple(ask(url, MODEL, p, 0.0, temperature=0, max_tokens=plan.max_tokens).text for p in prompts)


def _side(url: str, plan: LoadPlan, seed: int) -> Side:
    _greedy(url, plan)  # warms up
    told = [scrape(url)]
    options = {"temperature": plan.temperature, "max_tokens": plan.max_tokens}
    asked = list(arrivals(plan.rate, plan.seconds, seed))
    answers = load(url, MODEL, asked, plan.seconds / WINDOWS, lambda _: told.append(scrape(url)), **options)
    return Side(tuple(answers), tuple(told), _greedy(url, plan))


def _figures(sides: Sequence[Side], wanted: tuple[str, ...]) -> dict[str, Any]:
    """Latencies of all repeats together, and of the first and the last third of the time; acceptance and the rest by
    repeat."""
    answers = [a for side in sides for a in side.answers]
    good = [a for a in answers if a.code == 200]
    span = max(a.at_s for a in answers)
    thirds = [[a.seconds for a in good if lo <= a.at_s / span <= hi] for lo, hi in ((0, 1 / 3), (2 / 3, 1))]
    ends = [side.told[-1] for side in sides]
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "greedy_differ": sum(a != b for side in sides for a, b in zip(side.greedy, wanted, strict=True)),
        "latency_s": _latency([a.seconds for a in good]),
        "latency_first_third_s": _latency(thirds[0]),
        "latency_last_third_s": _latency(thirds[1]),
        "tokens": sum(a.tokens for a in good),
        "versions": [len({a.made_by for a in side.answers if a.code == 200}) for side in sides],
        "acceptance_length": [[_acceptance(a, b) for a, b in _windows(side.told)] for side in sides],
        "micro_steps": [int(end.get("learn_micro_steps_total", 0)) for end in ends],
        "exams": [int(end.get("learn_exams_total", 0)) for end in ends],
        "published": [int(end.get("learn_published_total", 0)) for end in ends],
    }


def _latency(seconds: Sequence[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: round(quantile(seconds, share), 4) for name, share in shares.items()}


def _windows(told: Sequence[dict[str, float]]) -> list[tuple[dict[str, float], dict[str, float]]]:
    """WINDOWS parts of the time; looks that came late fall together with the next."""
    picks = [round(i * (len(told) - 1) / WINDOWS) for i in range(WINDOWS + 1)]
    return [(told[a], told[b]) for a, b in pairwise(picks) if a != b]


def _acceptance(before: dict[str, float], after: dict[str, float]) -> float | None:
    steps, accepted = (after[n] - before[n] for n in ("verify_steps_total", "accepted_tokens_total"))
    return round(1 + accepted / steps, 3) if steps else None


def table(result: dict[str, Any]) -> str:
    """For a person."""
    sides = [result[name] for name in ("off", "learning")]
    rows = [
        ("", "off", "learning"),
        *((name, *(str(s[name]) for s in sides)) for name in ("requests", "failed", "greedy_differ")),
        *(
            (f"{name} {share}", *(f"{s[name][share]:.3f}" for s in sides))
            for name in ("latency_s", "latency_first_third_s", "latency_last_third_s")
            for share in ("p50", "p99")
        ),
        *(
            (f"acceptance length, {name} part", *(f"{_middle(s['acceptance_length'], pick):.2f}" for s in sides))
            for name, pick in (("first", 0), ("last", -1))
        ),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def _middle(windows: Sequence[Sequence[float | None]], pick: int) -> float:
    return median(w[pick] or 0.0 for w in windows)
