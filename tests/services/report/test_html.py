"""The report holds what a person must see, is one well-formed page without outside assets, and survives any run."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from services.config.schema import ClusterConfig
from services.core.types import EvalResult, Group, RunEvent, SlotSpan, StepMetrics
from services.report.run_folder import RunFolder, render_report

VOID = {"meta", "br", "line", "rect", "path", "circle", "input", "hr", "img", "link"}


class Page(HTMLParser):
    """Checks nesting, and collects text, tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).replace("\u00a0", " ").split())

    def ids(self) -> set[str]:
        return {a["id"] or "" for _, a in self.tags if "id" in a}


def page_of(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not re.search(r"(?<![A-Za-z])-?(nan|inf)\b|[MLhv]-?(nan|inf)", text), (
        "a number that is none reached the page"
    )
    for tag, attrs in page.tags:
        assert tag not in {"script", "link", "img", "iframe", "object"}
        assert not set(attrs) & {"src", "href", "srcset", "onload", "onerror", "onclick"}
    assert not re.search(r"url\(|@import", text)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert all(a.get("aria-label") for tag, a in page.tags if tag == "svg")
    return page


def test_report_shows_all_that_a_person_must_see(
    folder: RunFolder, drive: Callable[..., float], summary: dict[str, Any]
) -> None:
    drive(folder, steps=14, slots=3)
    folder.finish({**summary, "rollouts": 896, "groups": 112, "steps": 14})
    page = page_of(folder.path / "report.html")
    assert "://" not in (folder.path / "report.html").read_text()
    for words in (
        "The policy improved, speculation paid (1.39\u00d7), and training the drafter paid.",
        "Held-out reward rose from 0.410 to 0.560",
        "12.4 s \u2192 8.90 s",
        "Greedy mismatches 0",
        "frozen drafter: 2.00 at the end",
        "14 steps, 112 groups, 896 rollouts",
        "the longest tail",
        "seconds since the start",
        "median",
        "p99",
        "of the rollout time passes after 90 % have finished",
        "frozen first drafter, offline",
        "training, mean of 5 steps",
        "idle, summed over slots",
        "eagle_3_1_4",
        "rollout server 1 died (SIGKILL)",
        "reward variance is small (step 3, 9)",
        "Resolved configuration",
    ):
        assert words in page.text, words
    assert {"timeline", "zoom", "acceptance", "reward", "lengths", "phases", "strategies"} <= page.ids()
    details = [t for t, _ in page.tags if t == "details"]
    assert len(details) >= 7, "the numbers behind each chart are there as tables"
    assert ("html", {"lang": "en"}) in page.tags


def test_page_adapts_to_screen_and_colour_scheme(folder: RunFolder) -> None:
    folder.finish({})
    text = (folder.path / "report.html").read_text()
    assert "prefers-color-scheme:dark" in text and "max-width:600px" in text and 'name="viewport"' in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_seconds_on": 15.5}, "speculation did not pay here, it was 1.25 times slower"),
        ({"rollout_seconds_on": 12.3}, "no difference worth naming"),
        ({"greedy_mismatches": 2}, "it is not lossless here"),
        ({"heldout_reward_after": 0.25}, "Held-out reward fell from 0.410 to 0.250"),
        ({"heldout_reward_after": 0.42}, "within the noise"),
        (
            {"status": "failed", "error": "policy is lost: killed"},
            "The run ended early (failed): policy is lost: killed",
        ),
        ({"status": "stopped"}, "The run was stopped"),
    ],
)
def test_what_did_not_pay_is_said(
    folder: RunFolder, drive: Callable[..., float], summary: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    drive(folder, steps=2)
    folder.finish({**summary, **changes})
    assert words in page_of(folder.path / "report.html").text


@pytest.mark.parametrize(
    ("frozen", "words"),
    [
        (2.5, "training it did not pay, the frozen copy is as good"),
        (2.9, "training made the drafter worse"),
        (2.1, "its frozen first copy 2.10."),
    ],
)
def test_live_and_frozen_drafter_are_compared_offline(
    folder: RunFolder, metrics: StepMetrics, frozen: float, words: str
) -> None:
    for step in (1, 2, 3):
        row = replace(metrics, step=step, acceptance_length_live_offline=2.51, acceptance_length_frozen_offline=frozen)
        folder.step(row)
    folder.finish({"acceptance_length_last": 9.0, "acceptance_length_frozen_last": 1.0})
    assert words in page_of(folder.path / "report.html").text


HOSTILE = "</style></svg><script>alert('x')</script><img src=x onerror=\"y\">&amp; \u202e ' \" \x00 \ud800"


def test_two_steps_allow_no_verdict_on_the_drafter(folder: RunFolder, metrics: StepMetrics) -> None:
    for step in (1, 2):
        folder.step(replace(metrics, step=step))
    folder.finish({})
    text = page_of(folder.path / "report.html").text
    assert "too few steps to tell" in text and "training the drafter paid" not in text


def test_hostile_text_stays_text(folder: RunFolder, metrics: StepMetrics, groups: list[Group]) -> None:
    folder.step(replace(metrics, warnings=(HOSTILE,), steps_by_strategy={HOSTILE: 3, "off": 1}))
    folder.span(SlotSpan("slot 0" + HOSTILE, HOSTILE, 0.0, 5.0, HOSTILE))
    folder.span(SlotSpan("slot 0" + HOSTILE, "lost", 5.0, 8.0, HOSTILE))
    folder.event(RunEvent(1.0, HOSTILE, HOSTILE, HOSTILE))
    folder.event(RunEvent(2.0, "slot_lost", HOSTILE, HOSTILE))
    folder.rollouts(1, groups)
    folder.finish({"status": HOSTILE, "error": HOSTILE})
    page = page_of(folder.path / "report.html")
    assert "<script>alert('x')</script>" in page.text
    assert "\u202e" not in (folder.path / "report.html").read_text()


def test_hostile_run_name_and_config(tmp_path: Path) -> None:
    config = ClusterConfig.model_validate({"run": {"name": HOSTILE[:-2], "dir": str(tmp_path)}})
    folder = RunFolder(config)
    folder.finish({})
    assert folder.path.parent == tmp_path
    page_of(folder.path / "report.html")


def test_run_that_never_started(folder: RunFolder) -> None:
    page = page_of(render_report(folder.path))
    assert (
        "The run did not finish" in page.text and "Nothing was recorded." in page.text and "not measured" in page.text
    )


def test_zero_steps_but_finished(folder: RunFolder) -> None:
    folder.evaluation(EvalResult(0, 1.0, 0, 0, 0.0, 0.0))
    folder.finish(dict.fromkeys(("heldout_reward_before", "rollout_seconds_off", "idle_seconds")))
    assert "Nothing was measured that allows a verdict." in page_of(folder.path / "report.html").text


def test_no_drafter_no_evaluation(folder: RunFolder, metrics: StepMetrics) -> None:
    nothing = dict.fromkeys(
        ("acceptance_length", "acceptance_rate", "acceptance_length_live_offline", "acceptance_length_frozen_offline")
    )
    for step in (1, 2):
        folder.step(replace(metrics, step=step, steps_by_strategy={"off": 10}, drafter_loss=None, **nothing))
    folder.finish({})
    page = page_of(folder.path / "report.html")
    assert "no speculation measured" in page.text and "Nothing was recorded." in page.text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e300])
def test_any_number_in_any_field(folder: RunFolder, metrics: StepMetrics, groups: list[Group], value: float) -> None:
    floats = [name for name, kind in StepMetrics.__annotations__.items() if "float" in str(kind)]
    for step in range(1, 4):
        folder.step(replace(metrics, step=step, **dict.fromkeys(floats, value)))
    rollouts = tuple(replace(r, started_s=value, finished_s=value) for r in groups[0].rollouts)
    folder.rollouts(1, [replace(groups[0], rollouts=rollouts)])
    folder.span(SlotSpan("slot 0", "idle", 0.0, value))
    folder.span(SlotSpan("slot 0", "idle", value, 1.0))
    folder.event(RunEvent(value, "odd", "slot 0", "m"))
    folder.evaluation(EvalResult(1, value, 5, 5, value, value))
    folder.finish({"wall_seconds": value, "rollout_seconds_off": value, "rollout_seconds_on": value, "x": value})
    page_of(folder.path / "report.html")


def test_a_lost_slot_and_one_single_step(folder: RunFolder, metrics: StepMetrics, groups: list[Group]) -> None:
    folder.span(SlotSpan("slot 0", "rollout", 0.0, 2.0, "step 1"))
    folder.span(SlotSpan("slot 1", "lost", 1.0, 2.0))
    folder.event(RunEvent(1.0, "slot_lost", "rollout server 1", "killed"))
    folder.rollouts(1, groups)
    folder.step(replace(metrics, at_s=2.0))
    folder.finish({})
    page = page_of(folder.path / "report.html")
    assert "Lost during the run: rollout server 1 (1 in all, 0 came back)" in page.text
    assert any("r-lost" in (a.get("class") or "") for t, a in page.tags if t == "rect")


def test_a_long_run_stays_small_and_quick(folder: RunFolder, metrics: StepMetrics) -> None:
    rng = random.Random(0)
    for i in range(6000):
        folder.span(SlotSpan(f"slot {i % 8}", rng.choice(["rollout", "idle", "drafting"]), i // 8, i // 8 + 1.0))
    for step in range(1, 701):
        folder.step(replace(metrics, step=step, at_s=float(step)))
    folder.finish({})
    page_of(folder.path / "report.html")
    assert (folder.path / "report.html").stat().st_size < 3_000_000


def test_energy_is_shown_when_it_was_measured_and_only_then(folder: RunFolder, metrics: StepMetrics) -> None:
    folder.step(replace(metrics, energy_j={"rollout": 3000.0, "idle": 1000.0, "lost": 0.0}))
    folder.step(replace(metrics, step=2, energy_j=None))
    folder.finish({"energy_method": "power"})
    text = page_of(folder.path / "report.html").text
    assert "rollout 3 000 3 000 75.0 %" in text and "all 4 000 4 000" in text
    assert "1 of 2 steps were measured, by samples of the GPUs' power, integrated." in text


def test_without_energy_there_is_no_section_about_it(folder: RunFolder, metrics: StepMetrics) -> None:
    folder.step(metrics)
    folder.finish({})
    assert "oules" not in page_of(folder.path / "report.html").text


@pytest.mark.parametrize("energy", [{}, {"idle": 0.0}, {"idle": math.nan, "<b>": 5.0}])
def test_odd_energy_keeps_the_page_whole(folder: RunFolder, metrics: StepMetrics, energy: dict[str, float]) -> None:
    folder.step(replace(metrics, energy_j=energy))
    folder.finish({})
    assert "Joules by role" in page_of(folder.path / "report.html").text
