"""The live page in a real browser during a real run: its figures are the API's, its timeline moves, its buttons work,
nothing complains, and it fits a telephone."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest
import torch

from tests.deploy.browser import Tab, chromium
from tests.deploy.live_run import LiveRun, live_run, wait_for_steps
from tests.deploy.page_process import TOKEN

torch.set_num_threads(1)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TILE = "document.querySelector('#figures [data-key={}] .v')?.textContent"
STATUS = "document.querySelector('#status').textContent"
ANSWER = "document.querySelector('#answer').textContent"
ROLES = "[...document.querySelectorAll('#rows path[data-role]')].map(p => p.dataset.role)"
SLOTS = "new Set([...document.querySelectorAll('#rows path[data-slot]')].map(p => p.dataset.slot)).size"
BARS = "[...document.querySelectorAll('#rows path[data-role]')].map(p => p.getAttribute('d')).join()"
FOCUS = """(e => e.id || e.dataset.seconds || e.dataset.action || e.className || e.tagName)
    (document.activeElement)"""
DRAWN = """document.querySelector('#rows svg').viewBox.baseVal.width === document.querySelector('#rows').clientWidth
    && innerWidth === """
OUTSIDE = """[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .hidden, svg, select'))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
SMALL = """[...document.querySelectorAll('button, select, input')].filter(e => e.offsetParent)
    .filter(e => e.getBoundingClientRect().height < 24).map(e => e.outerHTML)"""
CONTRAST = """(() => {
  const rgb = (c) => c.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v / 255 <= .03928 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4);
  const light = (c) => { const [r, g, b] = rgb(c).map(linear); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if ((rgb(c)[3] ?? 1) > .5) return c; } return getComputedStyle(document.body).backgroundColor; };
  const texts = [...document.querySelectorAll('main *')].filter(e => e.offsetParent && !e.disabled &&
    [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()));
  return texts.map(e => { const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    return [e.outerHTML.slice(0, 60), (a + .05) / (b + .05)]; }).filter(([, ratio]) => ratio < 4.5);
})()"""
WIDTHS = (380, 768, 1240, 1920)


def api(run: LiveRun, path: str) -> Any:
    with urllib.request.urlopen(f"{run.url}/api/v1{path}", timeout=120) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    with live_run(tmp_path_factory.mktemp("live")) as run:
        wait_for_steps(run, 3)
        yield run


@pytest.fixture(scope="module")
def tab(run: LiveRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        tab.size(1280, 900)
        tab.open(run.url)
        tab.until(STATUS, lambda s: s == "running")
        yield tab


@pytest.fixture(autouse=True)
def no_complaints(tab: Tab) -> Iterator[None]:
    yield
    tab.value("1")  # hears what is under way
    heard, tab.errors[:] = list(tab.errors), []
    assert heard == []


def shown(value: float, digits: int) -> str:
    """As JavaScript's toFixed: halves go up."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def test_the_timeline_moves_while_the_run_goes_on(tab: Tab, run: LiveRun) -> None:
    tab.until(SLOTS, lambda n: n >= 3)  # two slots and the policy
    before, step = tab.value(BARS), tab.value(TILE.format("step"))
    tab.until(TILE.format("step"), lambda now: now != step)
    assert tab.value(BARS) != before
    told = api(run, f"/runs/{run.folder.run_id}/spans")
    assert {"policy", "idle"} <= set(tab.value(ROLES)) <= {s["role"] for s in (*told["items"], *told["open"])}
    here = "document.querySelector('.nowline').getAttribute('x1')"
    tab.value("document.querySelector('#windows [data-seconds=\"3600\"]').click()")
    first = float(tab.value(here))
    tab.until(here, lambda x: float(x) > first)  # between two answers as well
    tab.value("document.querySelector('#windows [data-seconds=\"60\"]').click()")


def test_a_paused_run_shows_the_figures_of_the_api(tab: Tab, run: LiveRun) -> None:
    """Paused, so that both sides have the same moment."""
    use_token(tab)
    click(tab, "pause")
    tab.until(STATUS, lambda s: s == "paused", 120)
    assert tab.value(ANSWER) == "The run pauses when the step under way is done."
    told = api(run, f"/runs/{run.folder.run_id}")
    assert told["status"] == "paused" and told["progress"]["control"]["paused"]
    totals, progress = told["totals"], told["progress"]
    last = api(run, f"/runs/{run.folder.run_id}/steps")["items"][-1]
    acceptance = progress["acceptance_length"] or totals["acceptance_length"]
    wanted = {
        "step": f"{progress['step']} of {progress['num_steps']}",
        "acceptance": shown(acceptance, 2),
        "lengths": shown(last["response_len_p50"], 0),
        "reward": shown(totals["reward_mean"], 3),
        "heldout": shown(totals["heldout_reward"], 3),
        "versions": f"{totals['policy_version']} / {totals['drafter_version']}",
    }
    for key, text in wanted.items():
        tab.until(TILE.format(key), lambda shown, text=text: shown == text, 15)
    assert tab.value("document.querySelector('#headline').textContent") == f"Paused after step {told['num_steps_done']}"
    events = tab.value("[...document.querySelectorAll('#events tbody tr')].map(r => r.children[1].textContent)")
    assert events == [e["kind"] for e in api(run, f"/runs/{run.folder.run_id}/events")["items"][::-1][:100]]
    assert events[0] == "paused"
    lengths = api(run, f"/runs/{run.folder.run_id}/lengths")
    caption = "document.querySelector('#lengths-caption').textContent"
    text = tab.until(caption, lambda t: f"Step {lengths['step']}:" in t)
    assert f"{lengths['count']} responses" in text and f"longest {lengths['longest']} tokens" in text
    label = tab.value("document.querySelector('#acceptance svg').getAttribute('aria-label')")
    assert f"to {shown(last['acceptance_length'], 2)}" in label


def test_buttons_control_the_run(tab: Tab, run: LiveRun) -> None:
    use_token(tab)
    name = "eagle_2_1_3"
    assert tab.value("[...document.querySelector('#strategy').options].map(o => o.value)") == ["", name, "off"]
    tab.value("document.querySelector('#strategy').value = 'off'")
    click(tab, "selector")
    tab.until(ANSWER, lambda t: "from the next step on" in t)
    if tab.value(STATUS) == "paused":
        click(tab, "resume")
    tab.until(STATUS, lambda s: s == "running")
    tab.until("document.querySelector('#events').textContent", lambda t: "strategy off on request" in t, 120)
    use_token(tab, "a wrong one")
    click(tab, "pause")
    tab.until("document.querySelector('#answer.bad')?.textContent", lambda t: t == "That is not this server's token.")
    tab.until("1", lambda _: any("401" in e for e in tab.errors))  # the browser reports the refusal itself
    tab.errors[:] = [e for e in tab.errors if "401" not in e]
    use_token(tab)
    click(tab, "stop")
    tab.until("document.querySelector('#sure').open")
    tab.value("document.querySelector('#sure button[value=\"\"]').click()")
    assert run.thread.is_alive() and tab.value(STATUS) == "running"


def test_everything_is_reached_by_keyboard(tab: Tab) -> None:
    tab.value("document.activeElement.blur(), window.scrollTo(0, 0)")
    seen: list[str] = []
    for _ in range(40):
        tab.press("Tab")
        seen.append(tab.value(FOCUS))
        outline = tab.value("getComputedStyle(document.activeElement).outlineStyle")
        if seen[-1] not in ("BODY", "HTML"):
            assert outline != "none", f"{seen[-1]} does not show that it has the focus"
    for wanted in ("skip", "runs", "60", "0", "rows", "token", "SUMMARY"):
        assert wanted in seen, f"{wanted} is not among {seen}"
    tab.value("document.querySelector('#rows').focus()")
    told = "document.querySelector('#told').textContent"
    tab.press("ArrowRight")
    first = tab.until(told, lambda t: t.startswith("slot 0: "))
    tab.press("Home")
    tab.until(told, lambda t: t != first and " 0.00\u2013" in t)
    tab.press("ArrowDown")
    tab.until(told, lambda t: t.startswith("slot 1: "))
    assert tab.value("document.querySelector('#told').getAttribute('aria-live')") == "polite"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_can_be_read(tab: Tab, width: int, scheme: str) -> None:
    tab.size(width, 900)
    tab.colours(scheme)
    tab.until(f"{DRAWN}{width}")
    assert tab.value("document.documentElement.scrollWidth") <= width
    small = tab.value(SMALL)
    assert small == [], "too small to be hit with a finger"
    poor = tab.value(CONTRAST)
    assert poor == [], "text that can hardly be read"
    assert tab.value(OUTSIDE) == []


JUMPS = """window.jumps = []; new PerformanceObserver((list) => { for (const e of list.getEntries()) jumps.push(
    { by: e.value, what: e.sources.map((s) => s.node && (s.node.id || s.node.nodeName)) }); })
    .observe({ type: 'layout-shift' })"""
SETTLED_S = 0.5


def test_nothing_jumps_when_news_arrive(tab: Tab) -> None:
    tab.size(1280, 900)
    tab.until(f"{DRAWN}1280")
    tab.value(JUMPS)
    time.sleep(SETTLED_S)  # what the new width moves is told a frame later
    tab.value("jumps.length = 0")
    step = tab.value(TILE.format("step"))
    tab.until(TILE.format("step"), lambda now: now != step, 120)
    jumps = tab.value("jumps")
    assert sum(jump["by"] for jump in jumps) < 0.05, jumps


def test_a_run_that_is_stopped_ends_on_the_page(tab: Tab, run: LiveRun) -> None:
    use_token(tab)
    click(tab, "stop")
    tab.until("document.querySelector('#sure').open")
    tab.value("document.querySelector('#sure button[value=stop]').click()")
    tab.until(STATUS, lambda s: s == "stopped", 120)
    assert tab.until("document.querySelector('#headline').textContent", lambda t: t.startswith("Stopped after"))
    tab.until("!document.querySelector('#report').hidden")
    assert tab.value("document.querySelector('#control').hidden")


def use_token(tab: Tab, token: str = TOKEN) -> None:
    tab.until("!document.querySelector('#control').hidden")
    tab.value("document.querySelector('#token').focus()")
    tab.type(token)
    tab.press("Enter")
    tab.until("!document.querySelector('#actions').hidden && document.querySelector('#token').value === ''")


def click(tab: Tab, action: str) -> None:
    button = f"document.querySelector('#actions [data-action={action}]')"
    tab.until(f"!{button}.disabled")
    tab.value(f"{button}.click()")
