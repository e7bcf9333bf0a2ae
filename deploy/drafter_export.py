"""`longtail drafter export` and `import`: a run's drafter as a folder to deploy, a published one as a warm start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from deploy.drafter_costs import costs_of, timed_speedup
from deploy.drafter_eval import BATCHES, TEMPERATURES, Contender, evaluate, mean_context, speed_of
from deploy.drafter_judge import Judge, Requests
from deploy.drafter_run import RunDrafter, read_run_drafter
from deploy.provenance import provenance
from services.config.speculation import eagle_chain
from services.core.errors import DataError
from services.core.types import Prompt
from services.data.source import load_prompts
from services.drafter.card import AcceptanceRow, Measured, SpeedRow, drafter_card
from services.drafter.export import write_export, write_files
from services.drafter.layouts import Layout, Verifier, in_layout
from services.drafter.published import read_published
from services.models.device import pick_dtype
from services.models.eagle3 import pick_aux_layers
from services.models.files import model_dir, read_config
from services.models.grow_files import copy_tokenizer, refuse_occupied
from services.report.records import read_json, write_atomic
from services.speculation.strategy import draft_strategy

CACHE = "drafter_eval.json"  # in the run folder: what was measured, by what it was measured with
LEAST_TIMED = 8  # prompts of a timing


@dataclass(frozen=True)
class Measuring:
    """How much is measured at export; `costs` as in `longtail drafter eval`, None: timed here."""

    prompts: int = 32
    depth: int = 4
    max_tokens: int | None = None  # None: the run's
    costs: str | None = None


@dataclass(frozen=True)
class Destination:
    """`target`: under which name engines find the policy; None: as the run names it. `policy`: a folder for the policy
    itself, beside the drafter."""

    layout: Layout
    folder: Path
    target: str | None = None
    policy: Path | None = None


def export_drafter(
    run: Path,
    to: Destination,
    step: int | None,
    measuring: Measuring | None,
    licence: str | None,
    say: Callable[[str], None],
) -> RunDrafter:
    """Write the drafter, and the policy if asked. Raises ConfigError for a folder that is taken or a run that is none,
    DataError and WeightError for a drafter that is damaged; then nothing is written."""
    for folder in (to.folder, to.policy):
        if folder is not None:
            refuse_occupied(folder)
    found = read_run_drafter(run, step, licence)
    if to.policy is not None and found.policy is None:
        raise DataError(f"{run} kept no checkpoint, so its policy is gone: leave --policy out")
    measured = None
    if measuring is not None and found.policy is not None:
        measured = measure(run, found, measuring, say)
    elif measuring is not None:
        say(f"{run} kept no checkpoint: without the policy that the drafter is for, nothing is measured")
    config = read_config(found.target)
    verifier = Verifier(config, to.target or str(to.policy or found.config.model.path))
    write_export(found.tensors, found.method, to.layout, verifier, found.origin, measured, to.folder)
    if to.policy is not None:
        assert found.policy is not None
        write_policy(found.policy, found.target, pick_dtype(found.config.model.dtype), to.policy)
    return found


def write_policy(policy: Mapping[str, Tensor], source: Path, dtype: Any, folder: Path) -> None:
    """A Hugging Face folder with other weights than `source`, whose tokenizer and config.json it has."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file({name: t.to(dtype).contiguous() for name, t in policy.items()}, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    copy_tokenizer(source, folder)
    write_atomic(folder / "config.json", json.dumps(read_config(source), indent=2) + "\n")


def measure(run: Path, found: RunDrafter, measuring: Measuring, say: Callable[[str], None]) -> Measured:
    """On the run's held-out prompts; what was measured before with the same drafter and settings is told again."""
    key = _key(found, measuring)
    kept = read_json(run / CACHE) or {}
    if key in kept:
        say(f"measured before: {run / CACHE}")
        return _read(kept[key])
    measured = _measure(found, measuring, say)
    write_atomic(run / CACHE, json.dumps({**kept, key: asdict(measured)}, indent=1) + "\n")
    return measured


def _key(found: RunDrafter, measuring: Measuring) -> str:
    digest = hashlib.sha256(json.dumps([asdict(measuring), found.step, asdict(found.origin)]).encode())
    for name in sorted(found.tensors):
        digest.update(name.encode() + found.tensors[name].float().numpy().tobytes())
    return digest.hexdigest()[:24]


def _read(row: Mapping[str, Any]) -> Measured:
    acceptance = tuple(AcceptanceRow(**{**r, "rates": tuple(r["rates"])}) for r in row["acceptance"])
    return Measured(**{**row, "acceptance": acceptance, "speed": tuple(SpeedRow(**r) for r in row["speed"])})


def _measure(found: RunDrafter, measuring: Measuring, say: Callable[[str], None]) -> Measured:
    config = found.config
    judge = Judge(config.model.path, found.policy)
    heldout = load_prompts(config, judge.tokenizer).heldout
    limit = measuring.max_tokens or config.rollout.sampling.max_tokens
    prompts = heldout[: measuring.prompts]
    requests = Requests(prompts, 1, limit, min(16, len(prompts)))
    one = Contender(found.method.title, found.method, found.tensors)
    temperature = config.rollout.sampling.temperature
    temperatures = tuple(sorted({*TEMPERATURES, temperature}))
    reached, plain = evaluate(judge, [one], requests, temperatures, measuring.depth, offline=False, say=say)
    costs = costs_of(measuring.costs, judge, measuring.depth, BATCHES, mean_context(plain))
    at_run = next(r for r in reached if r.temperature == temperature)
    speed = []
    for running in BATCHES:
        expected = speed_of(at_run, running, costs)
        row = SpeedRow(running, expected.depth, expected.speedup)
        if found.method.name == "eagle":  # which is what the native engine drafts with
            say(f"timing {running} requests")
            depth = max(1, expected.depth)
            asked, chain = _full(heldout, running, limit), draft_strategy(eagle_chain(depth))
            timed = timed_speedup(judge, found.tensors, chain, asked, temperature)
            row = replace(row, timed_depth=depth, timed=timed)
        speed.append(row)
    rows = tuple(AcceptanceRow(r.temperature, r.rates, r.acceptance_length, r.how) for r in reached)
    return Measured(len(prompts), rows, tuple(speed), _machine(), f"{costs.source}; at temperature {temperature:g}")


def _full(heldout: tuple[Prompt, ...], running: int, limit: int) -> Requests:
    """Enough for the batch to be full for a while."""
    wanted = max(LEAST_TIMED, 2 * running)
    prompts = tuple(heldout[i % len(heldout)] for i in range(wanted))
    return Requests(prompts, 1, limit, running)


def _machine() -> str:
    where = provenance()
    if where["card"] == "none":
        return f"one thread of {where['processor']}"
    return f"{where['card']}, driver {where['driver']}"


def import_drafter(folder: Path, target: str, out: Path) -> list[str]:
    """Bring a published drafter into the layout that runs begin with; returns the settings that name it. Raises
    DataError and WeightError naming what does not fit; then nothing is written."""
    refuse_occupied(out)
    found = read_published(folder, model_dir(target))
    method = found.method
    files = in_layout("sglang", found.tensors, method, Verifier(read_config(model_dir(target)), target))
    card = drafter_card(method, found.num_parameters, 0, method.architecture)
    write_files(files, f"{card}- brought in from {folder.resolve().name}, layout {found.layout}\n", out)
    settings = [f"drafter.path={out.resolve()}", f"drafter.method={method.name}"]
    layers = method.aux_layers
    if layers and layers != pick_aux_layers((), method.target.num_layers):
        settings.append(f"drafter.aux_layers=[{','.join(map(str, layers))}]")
    return settings
