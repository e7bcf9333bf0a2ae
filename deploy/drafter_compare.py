"""What `longtail drafter eval` asks, and how it tells the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.cli_shared import PRESETS_DIR, config_of
from deploy.drafter_costs import costs_of
from deploy.drafter_eval import Contender, Evaluation, evaluate, mean_context, speeds_of
from deploy.drafter_judge import Judge, Requests
from deploy.drafter_plot import draw
from deploy.provenance import provenance
from services.config.load import preset_names
from services.core.errors import ConfigError
from services.core.types import Prompt
from services.data.files import read_file
from services.data.prompts import TokenLimit
from services.data.source import load_prompts
from services.drafter.published import read_published
from services.models.files import model_dir, read_grown
from services.report.records import write_atomic

LONGEST_PROMPT = 4096  # tokens, of a prompt file


@dataclass(frozen=True)
class Question:
    """As asked on the command line."""

    folders: tuple[Path, ...]
    target: str
    data: str
    prompts: int
    siblings: int
    max_tokens: int
    running: int
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    depth: int
    costs: str | None
    offline: bool
    suffix: bool


def compare(question: Question, say: Callable[[str], None]) -> Evaluation:
    """Raises ConfigError and DataError for what cannot be compared, before anything is generated."""
    contenders = contenders_of(question)
    judge = Judge(question.target)
    prompts = prompts_of(question, judge)[: question.prompts]
    requests = Requests(prompts, question.siblings, question.max_tokens, question.running)
    reached, plain = evaluate(judge, contenders, requests, question.temperatures, question.depth, question.offline, say)
    say("costs of rounds")
    costs = costs_of(question.costs, judge, question.depth, question.batches, mean_context(plain))
    speeds = speeds_of(reached, question.batches, costs)
    return Evaluation(len(prompts), len(plain), tuple(reached), tuple(speeds), costs.source)


def contenders_of(question: Question) -> list[Contender]:
    names = [folder.resolve().name for folder in question.folders]
    found = [Contender("suffix index")] if question.suffix else []
    for folder, name in zip(question.folders, names, strict=True):
        drafter = read_published(folder, model_dir(question.target))
        shown = str(folder) if names.count(name) > 1 else name
        found.append(Contender(shown, drafter.method, drafter.tensors))
    return found


def prompts_of(question: Question, judge: Judge) -> tuple[Prompt, ...]:
    """The held-out prompts of a configuration, or all of a JSONL or Parquet file."""
    name = question.data
    if name in preset_names(PRESETS_DIR) or Path(name).suffix in (".yaml", ".yml"):
        return load_prompts(config_of(name, []), judge.tokenizer).heldout
    if not Path(name).is_file():
        known = ", ".join(preset_names(PRESETS_DIR))
        raise ConfigError(f"--data {name}: neither a prompt file nor a configuration; presets are {known}")
    limit = TokenLimit(judge.tokenizer, LONGEST_PROMPT, False)
    return read_file(Path(name), limit, "strict").prompts


def as_json(question: Question, found: Evaluation) -> str:
    asked = {k: v for k, v in asdict(question).items() if k not in ("folders", "offline", "suffix", "costs")}
    grown = read_grown(model_dir(question.target))
    told = {**asked, **asdict(found), "acceptance_lengths": _lengths(found)}
    return json.dumps({"eval": "drafter", **provenance(), "grown": grown, **told})


def _lengths(found: Evaluation) -> dict[str, dict[str, float]]:
    """By drafter and temperature."""
    told: dict[str, dict[str, float]] = {}
    for one in found.reached:
        told.setdefault(one.drafter, {})[f"{one.temperature:g}"] = round(one.acceptance_length, 4)
    return told


def write_plot(found: Evaluation, file: Path) -> None:
    write_atomic(file, draw(found))


def lines(found: Evaluation) -> Iterator[str]:
    """A table per temperature: acceptance by position, then the expected speed-up by batch size (and best depth)."""
    batches = sorted({s.running for s in found.speeds})
    depth = max((len(r.rates) for r in found.reached), default=0)
    for temperature in sorted({r.temperature for r in found.reached}):
        yield ""
        head = "".join(f"{f'pos {k + 1}':>8}" for k in range(depth))
        speed = "".join(f"{f'x at {b}':>14}" for b in batches)
        yield f"{f'temperature {temperature:g}':<26}{'length':>8}{head}{speed}  how"
        yield f"{'no drafts':<26}{1:>8.2f}{'':{8 * depth}}{''.join(f'{1:>9.2f}     ' for _ in batches)}"
        for one in (r for r in found.reached if r.temperature == temperature):
            rates = "".join(f"{rate:>8.3f}" for rate in one.rates) + " " * 8 * (depth - len(one.rates))
            speeds = _speeds(found, one.drafter, temperature)
            yield f"{one.drafter[:25]:<26}{one.acceptance_length:>8.2f}{rates}{speeds}  {one.how}"
    yield ""
    yield f"{found.prompts} held-out prompts, {found.responses} responses; costs: {found.costs}"


def _speeds(found: Evaluation, name: str, temperature: float) -> str:
    own = [s for s in found.speeds if s.drafter == name and s.temperature == temperature]
    return "".join(f"{s.speedup:>9.2f} ({s.depth})".ljust(14) for s in sorted(own, key=lambda s: s.running))
