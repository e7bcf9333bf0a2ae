"""`longtail bench spot`: what drafter training in idle slots uses, costs and brings, over real Ray actors.

Timing: the same rollouts (same prompts and seeds, policy and drafter fixed) with all idle slots training and with none,
in turns, the first pair dropped. `idle_used_share` is trainers' own busy time over the slot seconds in which training
has room (`wanted_slot_s`): all without rollout work (`idle_slot_s`) from the first token until the last trainer has
yielded, but where slots share a machine's cores no more slots at a time than servers leave cores. Waiting between
calls, joining, handing in and merging count as unused. `ratios_without` divides neighbouring phases without training by
each other: their spread is what the machine does by itself. Preemption: from asking a slot to leave until its lease is
free, at the end of rollouts and at random moments in the middle of them. Joules, where GPUs have a counter, of one such
phase by role. Acceptance: runs whose policy moves, then the live, the first and an untrained drafter on the last step's
rollouts, which none was trained on.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import ray
import torch

from actors.clients import RayEnergyClient
from actors.coordinator import ray_services
from deploy.cluster import actors
from deploy.inputs import load_inputs
from deploy.metering import start_energy
from deploy.provenance import provenance
from deploy.session import ray_session
from deploy.wanted_slots import wanted_slot_s
from services.config.schema import ClusterConfig
from services.coordinator.coordinator import Coordinator
from services.coordinator.stats import median_interval, quantile
from services.coordinator.work import make_work, prompts_of_step
from services.core.errors import ConfigError
from services.core.protocols import Blob
from services.core.types import ProgressView, SlotSpan, SlotState, TrainBatch
from services.drafter.state import DrafterState, fresh_state
from services.models.drafter import Drafter
from services.models.files import model_dir, read_config
from services.models.layers import model_spec
from services.models.methods import drafter_method
from services.report.timeline import draw_timeline

DRILLS = 4  # rollout phases with preemptions at random moments
DRILL_PAUSE_S = 0.4
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # two-sided, n - 1 degrees


@dataclass
class _Quiet:
    """A RunObserver that listens to progress and keeps the spans."""

    drill: Any = None
    spans: list[SlotSpan] = field(default_factory=list)

    def __getattr__(self, method: str) -> Any:
        return lambda *args: None

    def span(self, span: SlotSpan) -> None:
        self.spans.append(span)

    def progress(self, view: ProgressView) -> None:
        if self.drill is not None:
            self.drill(view)


@dataclass
class _Phase:
    seconds: float
    idle_s: float
    drafting_s: float
    wanted_s: float
    busy_s: float
    micro_steps: list[float]
    joules: dict[str, float] | None


class _Bench(Coordinator):
    """The coordinator with its verbs taken apart. `ended_s`: when the last phase did."""

    ended_s = 0.0

    def prepare(self) -> None:
        """Weights everywhere, and the hidden states of one step for the trainers."""
        self.publish_policy()
        self.publish_drafter()
        self.load()
        for group in self.generate(1, self.prompts(1)):
            self.score(group)
        self.further()  # one round is enough here
        groups = self.chosen()
        rollouts = tuple(r for g in groups for r in g.rollouts)
        self.train_step(TrainBatch(1, rollouts, self.advantages(groups)))
        self.publish_policy()

    def measure(self, drafters: int) -> _Phase:
        self.load()
        rollout, run = self._config.rollout, self._config.run
        prompts = prompts_of_step(self._inputs.train, 1, rollout.prompts_per_step, run.seed)
        works = make_work(prompts, "spot", rollout.group_size, self._inputs.sampling, run.seed)
        self._drafting.progress = []
        self._timeline.enter(f"{drafters} slots may train")
        self._timeline.open_window()
        begin_s = self._timeline.now()
        self._metering.begin()
        started = self._clock()
        for _ in self._phase.generate(works, drafters):
            pass
        seconds = self._clock() - started
        while self._drafting.slots:  # the last micro-steps belong to the phase; handing in goes beside what follows
            self._calls.turn()
        slots = self._timeline.close_window()
        self.ended_s = self._timeline.now()
        spans = [*self._observer.spans, *self._timeline.open_spans()]
        wanted_s = wanted_slot_s(spans, begin_s, self.ended_s, self._services.cores)
        joules = self._metering.end(self._timeline.open_spans())
        self._drafting.finish()
        self._drafting.prepare()  # not in the next phase, which is measured
        while any(self._calls.outstanding(trainer.name) for trainer in self._trainers.clients):
            self._calls.turn()
        done = self._drafting.progress
        return _Phase(
            seconds, slots.get(SlotState.IDLE, 0.0), slots.get(SlotState.DRAFTING, 0.0), wanted_s,
            sum(p.busy_s for p in done), [p.busy_s / p.micro_steps for p in done], joules,
        )  # fmt: skip

    def close_spans(self) -> None:
        self._timeline.close()

    def preempt_one(self, rng: random.Random) -> None:
        if self._drafting.slots:
            self._drafting.stop([rng.choice(self._drafting.slots)])

    @property
    def preempted_s(self) -> list[float]:
        return self._drafting.preempted_s

    def acceptance(self, untrained: Blob) -> dict[str, float]:
        """Expected acceptance length on the newest hidden states."""
        newest, slot = self._trainers.newest, self._trainers.up[0]
        assert newest is not None and self._drafting.live is not None and self._services.initial_drafter is not None
        states = {"live": self._drafting.live, "frozen": self._services.initial_drafter, "untrained": untrained}
        answer = self._trainers.ask(slot, self._trainers.clients[slot].estimate(states, newest))
        assert answer is not None
        return {e.drafter: e.acceptance_length for e in answer}


def run_bench(config: ClusterConfig, repeats: int, seeds: int, picture: Path | None) -> dict[str, Any]:
    """`picture`: an SVG of the slots' roles in the last pair of phases goes there."""
    if all(s.drafter != "eagle" for s in config.speculation.strategies):
        raise ConfigError("bench spot trains a drafter: choose a strategy with drafter 'eagle'")
    with ray_session(config):
        timing = _timing(config, repeats, picture)
        print(json.dumps(timing), flush=True)
        found = []
        for seed in range(seeds):
            run = config.run.model_copy(update={"seed": seed, "checkpoint_every": 0})  # no run folder to put them into
            found.append(_moved(config.model_copy(update={"run": run})))
            print(json.dumps({"seed": seed, **found[-1]}), flush=True)
    return {
        "bench": "spot", **provenance(), "slots": config.rollout.num_servers, "repeats": repeats,
        "rollouts": config.rollout.prompts_per_step * config.rollout.group_size, **timing,
        "acceptance": _over_seeds(found, config.run.steps) if found else None,
    }  # fmt: skip


@contextmanager
def _bench(config: ClusterConfig, observer: _Quiet) -> Iterator[_Bench]:
    inputs = load_inputs(config)
    with actors(config, inputs) as handles:
        bench = _Bench(config, inputs, ray_services(config, handles), observer, time.monotonic)
        meters = start_energy(handles, config.coordinator.start_timeout_s)
        bench.measure_energy([RayEnergyClient(name, handle) for name, handle in meters.handles.items()], meters.users)
        yield bench


def _timing(config: ClusterConfig, repeats: int, picture: Path | None) -> dict[str, Any]:
    observer, slots = _Quiet(), config.rollout.num_servers
    with _bench(config, observer) as bench:
        bench.prepare()
        phases: dict[int, list[_Phase]] = {0: [], slots: []}
        for repeat in range(repeats + 1):
            bench.close_spans()
            observer.spans.clear()
            for drafters in (0, slots) if repeat % 2 else (slots, 0):
                phase = bench.measure(drafters)
                if repeat:  # the first pair warms up
                    phases[drafters].append(phase)
        if picture is not None:
            bench.close_spans()
            shown = [replace(s, end_s=min(s.end_s, bench.ended_s)) for s in observer.spans if s.label]
            picture.write_text(draw_timeline([s for s in shown if s.start_s < s.end_s]), encoding="utf-8")
        _drill(bench, observer, config)
        preempted = [1000 * s for s in bench.preempted_s]
    off, on = phases[0], phases[slots]
    ratios = [a.seconds / b.seconds for a, b in zip(on, off, strict=True)]
    unused, wanted = sum(p.idle_s + p.drafting_s for p in on), sum(p.wanted_s for p in on)
    micro_steps = [1000 * s for p in on for s in p.micro_steps]
    return {
        "idle_used_share": round(sum(p.busy_s for p in on) / wanted, 4),
        "leased_share": round(sum(p.drafting_s for p in on) / wanted, 4),
        "wanted_slot_s": round(wanted / len(on), 2),
        "idle_slot_s": round(unused / len(on), 2),
        "rollout_s_without": round(median(p.seconds for p in off), 3),
        "rollout_s_with": round(median(p.seconds for p in on), 3),
        "rollout_time_ratio": round(median(ratios), 4),
        "rollout_time_ratio_95": [round(bound, 3) for bound in median_interval(ratios, random.Random(0))],
        "ratios": [round(r, 3) for r in ratios],
        "ratios_without": [round(b.seconds / a.seconds, 3) for a, b in itertools.pairwise(off)],
        "joules_without": _joules(off),
        "joules_with": _joules(on),
        "micro_step_ms": round(median(micro_steps), 1),
        "micro_step_p99_ms": round(quantile(micro_steps, 0.99), 1),
        "preemptions": len(preempted),
        "preempt_p50_ms": round(quantile(preempted, 0.5), 1),
        "preempt_p99_ms": round(quantile(preempted, 0.99), 1),
    }


def _joules(phases: Sequence[_Phase]) -> dict[str, float] | None:
    """Means by role; None where nothing counts them."""
    known = [p.joules for p in phases if p.joules is not None]
    roles = sorted({role for joules in known for role in joules})
    return {role: round(mean(j.get(role, 0.0) for j in known), 1) for role in roles} if known else None


def _drill(bench: _Bench, observer: _Quiet, config: ClusterConfig) -> None:
    """Ask slots to leave in the middle of rollouts; the scheduler lets them join again."""
    rng, last = random.Random(config.run.seed), [time.monotonic()]

    def drill(_: ProgressView) -> None:
        if time.monotonic() - last[0] > DRILL_PAUSE_S:
            last[0] = time.monotonic()
            bench.preempt_one(rng)

    observer.drill = drill
    for _ in range(DRILLS):
        bench.measure(config.rollout.num_servers)
    observer.drill = None


def _moved(config: ClusterConfig) -> dict[str, float]:
    """Acceptance after a run of `run.steps` steps."""
    with _bench(config, _Quiet()) as bench:
        bench.run()
        untrained: DrafterState = _untrained(config)
        return {k: round(v, 4) for k, v in bench.acceptance(Blob(ray.put(untrained))).items()}


def _untrained(config: ClusterConfig) -> DrafterState:
    torch.manual_seed(config.run.seed)
    method = drafter_method(config.drafter, model_spec(read_config(model_dir(config.model.path))))
    return fresh_state(Drafter(method).tensors(), method)


def _over_seeds(found: list[dict[str, float]], steps: int) -> dict[str, Any]:
    """Means, and live minus frozen with its 95 % interval over seeds (Student's t)."""
    ahead = [f["live"] - f["frozen"] for f in found]
    half = T_95[len(ahead)] * stdev(ahead) / len(ahead) ** 0.5 if len(ahead) in T_95 else None
    middle = mean(ahead)
    interval = None if half is None else [round(middle - half, 4), round(middle + half, 4)]
    means = {name: round(mean(f[name] for f in found), 4) for name in found[0]}
    return {"steps": steps, "seeds": len(found), **means, "live_ahead": round(middle, 4), "interval_95": interval}
