"""The runs of `longtail bench e2e`: each in turn, its steps told and kept as they come, one that fails beside the rest.

A step's metrics go to `steps.jsonl` at once, and each run has a run folder of its own in `runs/<mode>-<seed>`: whatever
ends the bench, what was measured until then is there.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from deploy.cli_shared import interrupt_on_sigterm
from deploy.inputs import load_inputs
from deploy.local import build_services
from deploy.processes import descendants, end_processes
from deploy.resuming import Start
from deploy.side_by_side import SideBySideHost, single_threaded
from services.config.schema import ClusterConfig
from services.coordinator.coordinator import Coordinator
from services.coordinator.observer import Fanout
from services.core.errors import LongtailError, StopRequested
from services.core.protocols import Clock
from services.core.types import RunEvent, StepMetrics
from services.report.run_folder import RunFolder
from services.report.run_lock import RunLock
from services.simulator.world import Notes

Say = Callable[[str], None]
STEPS_FILE = "steps.jsonl"
RUNS = "runs"  # the folder of the run folders
PHASES = ("rollout_s", "reward_s", "policy_s", "publish_s")
# What takes time inside of the phases, as metrics name it.
PARTS = ("longtail_memory_switch_seconds_total", "longtail_publish_seconds", "longtail_load_seconds")


@dataclass(frozen=True)
class Run:
    """`error`: why it ended before its last step; empty: it did not. `stopped`: because a person wanted it."""

    mode: str
    seed: int
    steps: tuple[StepMetrics, ...]
    servers: int
    error: str = ""
    stopped: bool = False

    @property
    def counted(self) -> tuple[StepMetrics, ...]:
        """Without the first: nobody knows anything there yet, neither selector nor drafter trainer."""
        return self.steps[1:] or self.steps

    @property
    def counts(self) -> bool:
        """Whether it has figures: a run that failed in its second step has none."""
        return len(self.steps) > (1 if self.error else 0)


@dataclass
class StepNotes(Notes):
    """Tells each step, and writes it to `file` (none: nowhere) as one line of JSON, with what PARTS have come to since
    the run began, to a second or so."""

    mode: str = ""
    seed: int = 0
    say: Say = print
    file: Path | None = None
    parts: dict[str, float] = field(default_factory=dict)

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        self.say(step_line(self.mode, self.seed, metrics))
        self._keep({"step": asdict(metrics), "seconds": self.parts})

    def values(self, state: Mapping[str, Sequence[float]]) -> None:
        self.parts = {name: round(value[0], 3) for name, value in state.items() if name.startswith(PARTS) and value[0]}

    def event(self, event: RunEvent) -> None:
        super().event(event)
        self.say(f"seed {self.seed} {self.mode:<7} {event.kind}: {event.message}")
        self._keep({"event": asdict(event)})

    def failed(self, error: str) -> None:
        self.say(f"seed {self.seed} {self.mode:<7} failed after {len(self.steps)} steps: {error}")
        self._keep({"error": error})

    def _keep(self, what: Mapping[str, Any]) -> None:
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"mode": self.mode, "seed": self.seed, **what}) + "\n")


def step_s(m: StepMetrics) -> float:
    return float(sum(getattr(m, phase) for phase in PHASES))


def step_line(mode: str, seed: int, m: StepMetrics) -> str:
    parts = ", ".join(f"{phase.removesuffix('_s')} {getattr(m, phase):.2f}" for phase in PHASES)
    accepted = "-" if m.acceptance_length is None else f"{m.acceptance_length:.2f}"
    return (
        f"seed {seed} {mode:<7} step {m.step}: {step_s(m):.2f} s ({parts}), {m.response_tokens} tokens, longest "
        f"{m.response_len_max}, acceptance length {accepted}, reward {m.reward_mean:.3f}"
    )


def measured(config: ClusterConfig, mode: str, on_ray: bool, say: Say, out: Path | None, keep: bool = True) -> Run:
    """One run. What fails in it is told and kept in the result, because other runs may well succeed. `keep`: in a run
    folder, where there is an `out`."""
    notes = StepNotes(mode=mode, seed=config.run.seed, say=say, file=None if out is None else out / STEPS_FILE)
    error, stopped = "", False
    try:
        placed = _placed(config, mode, out) if keep and out is not None else config
        (_on_ray if on_ray else _side_by_side)(placed, notes)
    except (StopRequested, KeyboardInterrupt) as stop:
        error, stopped = str(stop) or "stopped", True
    except LongtailError as problem:
        error = str(problem) or type(problem).__name__
    if error:
        notes.failed(error)
    return Run(mode, config.run.seed, tuple(notes.steps), config.rollout.num_servers, error, stopped)


def _placed(config: ClusterConfig, mode: str, out: Path) -> ClusterConfig:
    """With a run folder in `out`, empty: an earlier bench's run makes way, as its steps do. Raises ConfigError while
    somebody still drives that."""
    run = config.run.model_copy(update={"dir": out / RUNS, "id": f"{mode}-{config.run.seed}"})
    folder = run.dir / str(run.id)
    if (folder / "config.yaml").is_file():
        RunLock(folder).release()
        shutil.rmtree(folder)
    return config.model_copy(update={"run": run})


@contextmanager
def _folder(config: ClusterConfig, clock: Clock = time.monotonic) -> Iterator[RunFolder | None]:
    """Of a run that was `_placed`; None of another one."""
    if config.run.id is None:
        yield None
        return
    folder = RunFolder(config, clock=clock)
    try:
        yield folder
    finally:
        folder.close()


def _side_by_side(config: ClusterConfig, notes: Notes) -> None:
    """On time lines of the services' own, in processor time."""
    config, host = single_threaded(config), SideBySideHost()
    with ExitStack() as closing:
        folder = closing.enter_context(_folder(config, host.clock))
        observer: Any = notes if folder is None else Fanout(notes, folder)
        services = build_services(config, host, closing, host.service_clock)
        Coordinator(config, load_inputs(config), services, observer, host.clock).run()


def _on_ray(config: ClusterConfig, notes: Notes) -> None:
    """By the clock. Returns when all processes of the run have ended, an engine's own among them: until then they have
    memory of the GPU that the next run counts on."""
    from deploy.cluster import run_on_ray
    from deploy.session import ray_about

    before, own = descendants(), list[psutil.Process]()
    with _folder(config) as folder:

        def started(_handles: Mapping[str, Any]) -> None:
            interrupt_on_sigterm()
            own.extend(p for p in descendants() if p not in before)
            if folder is not None:
                folder.reachable_at(ray_about())

        observer: Any = notes if folder is None else Fanout(notes, folder)
        start = None if folder is None else Start(folder.run_id)
        try:
            run_on_ray(config, observer, on_start=started, start=start)
        finally:
            end_processes(own)
