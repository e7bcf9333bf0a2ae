"""`longtail bench resume`: a run that is killed again and again, against the same run left alone.

Both are started as a user starts them (`longtail train CONFIG run.id=...`, a process of its own). One is killed with
SIGKILL at random moments and started again until it ends. Then every rollout and every weight of the two is compared.

Bit-identity needs what the clock does not decide: the drafter is not trained meanwhile (drafter.training.when: never),
one strategy, and a step's work fits into the servers at once. With `online` the drafter trains; then rollouts differ
between any two runs, and only what is lost is counted.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import torch
from rich.console import Console
from safetensors.torch import load_file

from deploy.provenance import provenance
from services.config.load import dump_config
from services.config.schema import ClusterConfig
from services.core.checkpoints import whole_checkpoints
from services.core.errors import ConfigError, ServiceLostError, WaitTimeoutError
from services.report.history import recorded_step
from services.report.records import read_lines
from services.report.rollouts_file import rollouts_path
from services.weights.checkpoint import STATE_FILE

UNTOLD = ("started_s", "finished_s")  # clock times are no part of a rollout
RUN_TIMEOUT_S = 900.0
LOOK_S = 0.02
STEPS_PER_KILL = 3  # of the run: each kill falls at a random moment of its own part of it
EARLY_KILLS = 0.2  # the share of starts that are killed before they go on
WHOLE, KILLED = "whole", "killed"  # run ids
CONSOLE = Console(stderr=True, markup=False, highlight=False)


def run_bench(config: ClusterConfig, kills: int, seed: int, online: bool) -> dict[str, Any]:
    """`lost`: rollouts that are missing, or there more often than once. `redone_steps`: recorded, and done again, as no
    checkpoint was due after them. `resume_s`: median seconds from starting the process to the run's going on."""
    config = fitted(config, kills, online)
    with tempfile.TemporaryDirectory(prefix="longtail-resume-") as place:
        file, runs = Path(place) / "config.yaml", Path(place) / "runs"
        file.write_text(dump_config(config), encoding="utf-8")
        started = time.monotonic()
        _to_the_end(_start(file, runs, WHOLE), runs)
        whole_s = time.monotonic() - started
        _say(f"uninterrupted: {whole_s:.1f} s for {config.run.steps} steps")
        driver = _Killer(file, runs, config.run.steps, random.Random(seed), whole_s)
        driver.run(kills)
        differing = [] if online else list(_differences(runs, config.run.steps))
        return {
            "kills": kills,
            "bit_identical": None if online else not differing,
            "differing": differing[:5],
            "lost": _lost(runs / KILLED, config),
            "resume_s": round(median(driver.waits), 2),
            "resume_s_all": [round(wait, 2) for wait in driver.waits],
            "redone_steps": driver.redone,
            "killed_after_step": driver.killed_after,
            "whole_s": round(whole_s, 2),
            "steps": config.run.steps,
            "checkpoint_every": config.run.checkpoint_every,
            "checkpoint_bytes": _checkpoint_bytes(runs / WHOLE),
            "drafter_training": config.drafter.training.when,
            "sampling_rounds": _rounds(runs / KILLED),
            "uploaded": config.run.checkpoint_url is not None,
            "mode": config.placement.mode,
            "seed": seed,
            **provenance(),
        }


def fitted(config: ClusterConfig, kills: int, online: bool) -> ClusterConfig:
    """`config` with steps enough to be killed in, and without what the clock decides. Raises ConfigError."""
    tree = config.model_dump()
    tree["drafter"]["training"] |= {"when": "always" if online else "never", "every": 1}
    tree["rollout"]["consolidate"]["enabled"] = False
    steps = max(config.run.steps, STEPS_PER_KILL * (kills + 1))
    tree["run"] |= {"id": None, "compare_prompts": 0, "steps": steps, "checkpoint_every": 2}
    rollouts = config.rollout.prompts_per_step * config.rollout.group_size
    places = config.rollout.num_servers * config.rollout.engine.max_running
    if len(config.speculation.strategies) > 1:
        raise ConfigError("strategies chosen by speed depend on the clock: set speculation.selector.type=fixed")
    if rollouts > places:
        raise ConfigError(
            f"a step's {rollouts} rollouts do not fit into {places} places at once, so the clock decides who generates "
            "what: lower rollout.prompts_per_step or raise rollout.engine.max_running"
        )
    return ClusterConfig.model_validate(tree)


# ---------------------------------------------------------------------------- processes


def _start(file: Path, runs: Path, run_id: str) -> subprocess.Popen[bytes]:
    """What it says on stderr goes to a file: a pipe would stay open in what outlives a killed run for a moment."""
    command = [sys.executable, "-m", "deploy", "train", str(file), f"run.id={run_id}", "--run-dir", str(runs)]
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with _told_file(runs).open("wb") as told:
        return subprocess.Popen(
            [*command, "--quiet"], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL, stderr=told
        )


def _told_file(runs: Path) -> Path:
    return runs.with_name("stderr.txt")


def _told(runs: Path) -> str:
    return " ".join(_told_file(runs).read_text(errors="replace").split())[-400:]


def _to_the_end(process: subprocess.Popen[bytes], runs: Path) -> None:
    try:
        code = process.wait(RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise WaitTimeoutError(f"the run did not end within {RUN_TIMEOUT_S:.0f} s: {_told(runs)}") from None
    if code:
        raise ServiceLostError("the run", f"exit code {code}: {_told(runs)}")


class _Killer:
    """Starts the run and kills it, until it was killed often enough; then lets it end."""

    def __init__(self, file: Path, runs: Path, steps: int, rng: random.Random, whole_s: float) -> None:
        self._file, self._runs, self._rng = file, runs, rng
        self._folder = runs / KILLED
        events = read_lines(runs / WHOLE / "metrics.jsonl")[0]
        run_s = max(row["at_s"] for row in events)
        self._steps, self._start_s, self._step_s = steps, whole_s - run_s, run_s / steps
        self.waits: list[float] = []
        self.redone = self._reached = 0
        self.killed_after: list[int] = []

    def run(self, kills: int) -> None:
        for kill in range(kills):
            parts = kills + 1  # the last one is left to end
            self._kill(kill, range(self._steps * kill // parts, self._steps * (kill + 1) // parts))
        process, started = _start(self._file, self._runs, KILLED), time.monotonic()
        self._until_under_way(process, started, RUN_TIMEOUT_S)
        _to_the_end(process, self._runs)

    def _kill(self, kill: int, part: range) -> None:
        """Mostly at work, at a random moment behind one of the steps `part`; some are killed before they work."""
        early = self._rng.random() < EARLY_KILLS
        process, started = _start(self._file, self._runs, KILLED), time.monotonic()
        patience_s = self._rng.uniform(0.0, self._start_s) if early else RUN_TIMEOUT_S
        at_work = self._until_under_way(process, started, patience_s)
        if at_work and process.poll() is None:
            self._until_recorded(process, self._rng.choice(part))
            time.sleep(self._rng.uniform(0.0, self._step_s))
        if process.poll() is not None:
            raise ServiceLostError("the killed run", f"it ended before kill {kill + 1}: {_told(self._runs)}")
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        self._reached = max(self._reached, self._recorded())
        self.killed_after.append(self._recorded())
        when = f"{time.monotonic() - started:.1f} s after its start"
        _say(f"kill {kill + 1}, {when}, after step {self.killed_after[-1]}{'' if at_work else ', before it went on'}")

    def _until_under_way(self, process: subprocess.Popen[bytes], started: float, timeout_s: float) -> bool:
        """Wait until the run goes on, or the time is over. What it goes on from says how many steps are done again."""
        before = self._goes_on()
        while time.monotonic() - started < timeout_s and process.poll() is None:
            if self._goes_on() > before:
                if before:
                    self.waits.append(time.monotonic() - started)
                about = json.loads((self._folder / "run.json").read_text(encoding="utf-8"))
                after_step = about["starts"][-1]["after_step"]
                self.redone, self._reached = self.redone + self._reached - after_step, after_step
                return True
            time.sleep(LOOK_S)
        return False

    def _until_recorded(self, process: subprocess.Popen[bytes], step: int) -> None:
        give_up_s = time.monotonic() + RUN_TIMEOUT_S
        while self._recorded() < step and process.poll() is None:
            if time.monotonic() > give_up_s:
                raise WaitTimeoutError(f"step {step} of the killed run was not done within {RUN_TIMEOUT_S:.0f} s")
            time.sleep(LOOK_S)

    def _recorded(self) -> int:
        return recorded_step(self._folder) if self._folder.is_dir() else 0

    def _goes_on(self) -> int:
        """Grows when a start has come so far that it works: 1 with the first evaluation, then with every resumption."""
        told = read_lines(self._folder / "events.jsonl")[0]
        resumed = sum(row.get("kind") == "run_resumed" for row in told)
        return resumed + bool(read_lines(self._folder / "metrics.jsonl")[0])


# ---------------------------------------------------------------------------- comparing


def _differences(runs: Path, steps: int) -> Iterator[str]:
    """Whatever is not the same in both runs."""
    for step in range(1, steps + 1):
        mine, other = (_rollouts(runs / run, step) for run in (KILLED, WHOLE))
        if mine != other:
            yield f"rollouts of step {step}"
    mine_at, other_at = (whole_checkpoints(runs / run / "checkpoints")[-1] for run in (KILLED, WHOLE))
    mine_state, other_state = load_file(mine_at / STATE_FILE), load_file(other_at / STATE_FILE)
    if mine_at.name != other_at.name or mine_state.keys() != other_state.keys():
        yield "the last checkpoint"
        return
    yield from (name for name, tensor in mine_state.items() if not torch.equal(tensor, other_state[name]))


def _rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    rows = pq.read_table(rollouts_path(folder / "rollouts", step)).to_pylist()
    return [{key: value for key, value in row.items() if key not in UNTOLD} for row in rows]


def _lost(folder: Path, config: ClusterConfig) -> int:
    """Rollouts that are missing, and such as are there twice."""
    lost, least = 0, config.rollout.prompts_per_step * config.rollout.group_size
    told = {r["step"]: r["num_rollouts"] for r in read_lines(folder / "metrics.jsonl")[0] if r["kind"] == "step"}
    for step in range(1, config.run.steps + 1):
        file = rollouts_path(folder / "rollouts", step)
        ids = [(r["group_id"], r["index"]) for r in _rollouts(folder, step)] if file.is_file() else []
        wanted = max(least, told.get(step, 0))  # more with dynamic sampling
        lost += wanted - len(set(ids)) + len(ids) - len(set(ids))
    return lost


def _rounds(folder: Path) -> list[int]:
    """Of each step; above 1 with dynamic sampling."""
    rows = read_lines(folder / "metrics.jsonl")[0]
    return [row["sampling_rounds"] for row in rows if row["kind"] == "step"]


def _checkpoint_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in whole_checkpoints(folder / "checkpoints")[-1].iterdir())


def _say(line: str) -> None:
    CONSOLE.print(line, soft_wrap=True)
