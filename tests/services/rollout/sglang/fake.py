"""An SGLang engine to test against: the calls of `EngineHandle` over the native engine on a tiny model.

Rounds advance when it is polled. Like SGLang it emits a token with every prefill, tells several tokens at once, the
newest news of a request only, counts whole verify steps in the histogram, knows no stop strings, and takes note of an
abort a round later. Weights go through the loader into fused modules; the engine computes with what is found there.
Hidden states go through the real capture: those of transformers' own model under the weights served at the moment,
prefixes found in a cache left out, rejected nodes filled with nonsense.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.core.errors import ConfigError, ServiceLostError, WaitTimeoutError, WeightError
from services.core.selector import SelectorState
from services.core.types import FinishReason, GroupWork, Prompt, SamplingParams, ServedVersions, StrategySpan
from services.models.drafter import DrafterMethod
from services.models.eagle import Eagle
from services.models.target import TargetModel, target_names
from services.rollout.native import EngineOptions, NativeEngine
from services.rollout.sglang.capture import StateCapture
from services.rollout.sglang.captured import CapturedStates, capture_file, read_capture
from services.rollout.sglang.engine import SGLangLimits
from services.rollout.sglang.handle import Asked, Kind, Update
from services.rollout.sglang.loader import PART_BYTES, LoadOrder, load_part, serve_parts, served_version
from services.rollout.sglang.rounds import note_round
from services.speculation.selector import Fixed
from services.speculation.strategy import OFF, DraftStrategy
from services.speculation.suffix_index import SuffixIndex
from services.weights.parts import Incoming, NamedTensors
from tests.services.models.tiny import CPU, spec_of
from tests.services.rollout.engines import Switching, letters, ticking
from tests.services.rollout.sglang.fused import FusedModel

MAX_LEN = 120


@dataclass
class Faults:
    """What goes wrong from now on."""

    refuse: str = ""  # every load is refused with this
    lose_tensors: bool = False  # a load arrives without its tensors
    spoil_part: int | None = None  # this part of a version carries a name that the model does not have
    tell_version: int | None = None  # told instead of both versions
    short_logprobs: int = 0
    abort_message: str = ""  # every request is given up with this
    dead: bool = False
    stuck: bool = False  # abort_all does not come to an end
    shift_states: bool = False  # hidden states lie one token further than they should


@dataclass
class _Life:
    """One request in the engine. `prefill`: its next token belongs to no verify step."""

    sampling: SamplingParams
    window: int | None
    histogram: list[int] = field(default_factory=list)
    known: int = 0
    prefill: bool = True
    aborted: bool = False


class FakeHandle:
    """`behind_stop`: tokens behind a stop are told, and the length hides the stop, as SGLang once did; otherwise they
    are cut, as 0.5.17 does. `model_eos`: ids that end a response although the run does not name them. `budget`: SGLang
    quietly shortens longer ones. `switching`: what it draws from at random every round, in place of `strategy`."""

    def __init__(
        self,
        model: PreTrainedModel,
        strategy: DraftStrategy = OFF,
        rows: int = 16,
        behind_stop: bool = False,
        model_eos: tuple[int, ...] = (),
        budget: int = 10_000,
        rounds: int = 1,
        part_bytes: int = PART_BYTES,
        method: DrafterMethod | None = None,
        switching: Sequence[DraftStrategy] = (),
    ) -> None:
        self.faults = Faults()
        if switching:
            strategy = max(switching, key=lambda s: s.depth)
        self._switching, self._forced = {s.depth: s for s in switching}, None
        spec = spec_of(model)
        method = method or Eagle(spec)
        self.target = FusedModel(target_names(spec))
        self.draft = FusedModel(method.names() | method.engine_zeros(), "model.")
        self._behind_stop, self._model_eos, self._budget = behind_stop, model_eos, budget
        self._rounds, self._part_bytes = rounds, part_bytes
        self._strategy, self._zeros = strategy, method.engine_zeros()
        longest, nodes = MAX_LEN + strategy.num_draft_tokens, strategy.num_draft_tokens + 1
        options = EngineOptions(rows, longest, nodes, suffix_index=SuffixIndex(100_000))
        self.native = NativeEngine(
            TargetModel(spec, options.max_len + options.spare_columns, CPU, torch.float32),
            options, Switching(switching) if switching else Fixed(_runnable(strategy)), letters, ticking(),
        )  # fmt: skip
        self._model = copy.deepcopy(model)
        self._capture: StateCapture | None = None
        self._cached: list[tuple[int, list[int]]] = []  # window and ids of what was computed under this policy
        self.takes = 0
        self._lives: dict[str, _Life] = {}
        self._news: dict[str, Update] = {}
        self.loads: list[tuple[str, int]] = []
        self.submissions: list[tuple[Asked, ...]] = []
        self.aborts: list[str] = []
        self._free = 1_000_000
        self.closed = False

    # -- requests

    @property
    def seen_seeds(self) -> list[int]:
        return [one.seed for asked in self.submissions for one in asked]

    def submit(self, asked: Sequence[Asked]) -> None:
        self._alive()
        self.submissions.append(tuple(asked))
        self.native.submit([self._begin(one) for one in asked])

    def _begin(self, asked: Asked) -> GroupWork:
        rid, sampling = asked.rid, asked.sampling
        assert rid not in self._lives, "one id, one request"
        self._lives[rid] = _Life(replace(sampling, max_tokens=min(sampling.max_tokens, self._budget)), asked.window)
        # The native engine must not stop by itself: what SGLang does at a stop is this class's business.
        room = replace(
            sampling,
            max_tokens=sampling.max_tokens + self._strategy.num_draft_tokens,
            stop_token_ids=(),
            stop_strings=(),
        )
        return GroupWork(rid, Prompt(rid, "", asked.prompt_ids, "", "test"), (0,), (asked.seed,), room)

    def poll(self, wait_s: float) -> list[Update]:
        self._alive()
        for _ in range(self._rounds):
            self._round()
        news, self._news = list(self._news.values()), {}
        return news

    def abort(self, rid: str) -> None:
        self._alive()
        self.aborts.append(rid)
        for known, life in self._lives.items():
            life.aborted |= known.startswith(rid)  # as SGLang's scheduler does

    def abort_all(self) -> None:
        self._alive()
        if self.faults.stuck:
            raise WaitTimeoutError("rollout-3: SGLang did not finish dropping all requests within 1 s: see its log")
        self.native.abort()
        self._lives.clear()
        self._news.clear()

    def _alive(self) -> None:
        if self.faults.dead:
            raise ServiceLostError("rollout-3", "its process ended")

    def _round(self) -> None:
        if not self._lives:
            return
        if self.faults.abort_message:
            for rid in list(self._lives):
                self._end(rid, FinishReason.ABORT, self.faults.abort_message)
            return
        dropped = {rid for rid, life in self._lives.items() if life.aborted}
        prefills = any(life.prefill for life in self._lives.values())
        self.native.force_strategy(OFF if prefills else self._forced)
        ended = self.native.step()
        assert not ended, "the room behind the budget was too small"
        if self._capture is not None:
            self._keep(self._capture)
        for request in list(self.native._requests):
            self._note(request.work.group_id, len(request.response_ids))
        for rid in self._lives.keys() & dropped:
            self._end(rid, FinishReason.ABORT, "aborted")

    def _note(self, rid: str, count: int) -> None:
        """Count the verify step, and tell what is known of the request, or that it ended."""
        life = self._lives[rid]
        step = count - life.known
        if not life.prefill and self._switching:
            note_round(life.histogram, self.native.last_strategy.depth, step - 1)
        elif not life.prefill and not self._strategy.is_off:
            life.histogram += [0] * (step - len(life.histogram))
            life.histogram[step - 1] += 1
        first, life.known, life.prefill = life.known, count, False
        ids = self._request(rid).response_ids
        stops = {*life.sampling.stop_token_ids, *self._model_eos}
        stop = next((n + 1 for n in range(first, min(count, life.sampling.max_tokens)) if ids[n] in stops), None)
        if stop is None and count < life.sampling.max_tokens:
            self._tell(rid, count)
            return
        end = min(count, life.sampling.max_tokens) if stop is None else stop
        hidden = self._behind_stop and count >= life.sampling.max_tokens
        reason = FinishReason.LENGTH if stop is None or hidden else FinishReason.STOP
        self._end(rid, reason, told=count if self._behind_stop else end)

    def _request(self, rid: str):
        return next(r for r in self.native._requests if r.work.group_id == rid)

    def _tell(self, rid: str, count: int, finish: str | None = None) -> None:
        request, life = self._request(rid), self._lives[rid]
        logprobs = request.logprobs[: max(0, count - self.faults.short_logprobs)]
        self._news[rid] = Update(
            rid, tuple(request.response_ids[:count]), tuple(logprobs), tuple(life.histogram), finish
        )

    def _end(self, rid: str, reason: FinishReason, message: str = "", told: int = 0) -> None:
        if reason is FinishReason.ABORT:
            rows = [r for r in self.native._requests if r.work.group_id == rid]
            last, logprobs = (rows[0].response_ids[-1:], rows[0].logprobs) if rows else ([], [])
            self._news[rid] = Update(rid, tuple(last), tuple(logprobs), (), reason.value, message)
        else:
            self._tell(rid, told, reason.value)
        del self._lives[rid]
        row = next((n for n, r in enumerate(self.native._requests) if r.work.group_id == rid), None)
        if row is not None:
            self.native._close(row, reason)
        waiting = [work for work in self.native._waiting if work.group_id != rid]
        self.native._waiting.clear()
        self.native._waiting.extend(waiting)

    # -- strategies

    def force_depth(self, depth: int | None) -> None:
        self._alive()
        self._forced = None if depth is None else self._switching[depth]

    def selector_state(self) -> SelectorState | None:
        self._alive()
        return self.native.selector_state()

    def restore_selector(self, state: SelectorState) -> bool:
        self._alive()
        return self.native.restore_selector(state)

    def take_spans(self) -> tuple[StrategySpan, ...]:
        self._alive()
        return self.native.take_spans()

    # -- weights

    def load(self, kind: Kind, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._alive()
        self.loads.append((kind, version))
        if self.faults.refuse:
            raise WeightError(self.faults.refuse)
        parts = serve_parts({} if self.faults.lose_tensors else tensors, self._part_bytes)
        self._load(kind, version, iter(parts), len(parts))

    def receive(self, version: int, incoming: Incoming) -> None:
        self._alive()
        self.loads.append(("policy", version))
        self._load("policy", version, incoming.parts(), incoming.num_parts)

    def _load(self, kind: Kind, version: int, parts: Iterator[NamedTensors], count: int) -> None:
        model = self.target if kind == "policy" else self.draft
        for n, part in enumerate(parts):
            sent = [(f"other.{name}", t) for name, t in part] if n == self.faults.spoil_part else part
            load_part(model, LoadOrder(kind, version, n, count), sent)
        found = {name: t for name, t in model.tensors().items() if kind == "policy" or name not in self._zeros}
        if kind == "policy":
            self.native.load_policy(version, found)
            self._model.load_state_dict(found, strict=False)
            self._cached.clear()
            for life in self._lives.values():  # retracted: a prefill comes first
                life.prefill = True
        else:
            self.native.load_drafter(version, found)

    # -- hidden states

    def capture_states(self, limit_bytes: int) -> None:
        self._alive()
        if self._strategy.drafter != "eagle":
            raise ConfigError("only an engine with an EAGLE drafter has the states to keep")
        self._capture = StateCapture(limit_bytes, torch.device("cpu")) if limit_bytes else None

    def take_states(self) -> CapturedStates:
        self._alive()
        assert self._capture is not None
        self.takes += 1
        with capture_file() as (path, descriptor):
            self._capture.take(path, "SGLang of the tests")
            return read_capture(descriptor)

    def _keep(self, capture: StateCapture) -> None:
        """The round that was just computed: its prefills, with what the cache did not have, and its verification."""
        version = served_version(self.target)
        assert version is not None
        prefills, nodes = [], []
        for request in self.native._requests:
            rid = request.work.group_id
            life = self._lives[rid]
            ids = [*request.work.prompt.token_ids, *request.response_ids]
            known = len(ids) - len(request.response_ids) + life.known
            name = None if life.window is None else rid
            states = self._states(ids[:-1])
            if life.prefill:
                start = self._hit(life.window, ids[:known])
                prefills.append((name, start, states[start:known], ids[start:known], ids[known]))
                self._cached.append((life.window, ids[:known]))
            else:
                nodes.append((name, known - 1, states[known - 1 :], ids[known:]))
        if prefills:
            rids, starts, parts, fed, behind = zip(*prefills, strict=True)
            flat = torch.tensor([i for part in fed for i in part])
            counts = [len(part) for part in parts]
            capture.prefill(rids, starts, counts, version, torch.cat(parts), flat, torch.tensor(behind))
        if nodes:
            self._keep_nodes(capture, version, nodes)

    def _keep_nodes(self, capture: StateCapture, version: int, nodes: list[tuple[str | None, int, Tensor, list[int]]]):
        rids, starts, parts, behind = zip(*nodes, strict=True)
        strategy = self.native.last_strategy if self._switching else self._strategy
        width = max(strategy.num_draft_tokens, *map(len, parts))
        states = torch.full((len(nodes), width, parts[0].shape[1]), 777.0)
        predicted = torch.full((len(nodes), width), 7, dtype=torch.int32)
        for row, (part, ids) in enumerate(zip(parts, behind, strict=True)):
            states[row, : len(part)] = part
            predicted[row, : len(ids)] = torch.tensor(ids)
        if self.faults.shift_states:
            states, predicted = states.roll(1, 1), predicted.roll(1, 1)
        lengths, roots = torch.tensor([len(p) for p in parts], dtype=torch.int32), torch.tensor(starts)
        capture.decode(rids, version, states.flatten(0, 1), predicted.flatten(), lengths, roots)

    def _hit(self, window: int | None, ids: list[int]) -> int:
        """At least one token is always computed."""
        best = 0
        for other, cached in self._cached:
            same = next((n for n, (a, b) in enumerate(zip(ids, cached, strict=False)) if a != b), len(cached))
            best = max(best, min(same, len(ids) - 1)) if other == window else best
        return best

    @torch.no_grad()
    def _states(self, ids: list[int]) -> Tensor:
        return self._model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    def served(self) -> ServedVersions:
        self._alive()
        if self.faults.tell_version is not None:
            return ServedVersions(self.faults.tell_version, self.faults.tell_version)
        return ServedVersions(served_version(self.target), served_version(self.draft))

    # -- memory and life

    def switch_memory(self, release: bool) -> None:
        self._alive()
        assert not self._lives, "nothing may run"
        self._free += 600_000 if release else -590_000

    def free_bytes(self) -> int:
        return self._free

    def close(self) -> None:
        self.closed = True


def _runnable(strategy: DraftStrategy) -> DraftStrategy:
    """SGLang's n-gram drafts are the native engine's suffix drafts here."""
    return replace(strategy, drafter="suffix") if strategy.drafter == "ngram" else strategy


def limits_of(
    model: PreTrainedModel, strategy: DraftStrategy, method: DrafterMethod | None = None, capture_bytes: int = 0
) -> SGLangLimits:
    spec = spec_of(model)
    method = method or Eagle(spec)
    shapes: dict[Kind, Mapping[str, tuple[int, ...]]] = {"policy": target_names(spec)}
    if strategy.drafter == "eagle":
        shapes["drafter"] = method.names()
    return SGLangLimits(MAX_LEN, spec.vocab_size, shapes, method.engine_zeros(), "rollout-3", capture_bytes)
