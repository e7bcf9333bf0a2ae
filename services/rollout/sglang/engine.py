"""The SGLang engine behind the rollout protocol: requests, acceptance, versions and stops in the project's terms.

SGLang generates by itself, also between calls; `step` collects what it has to tell. Everything here is plain Python
over an `EngineHandle`, so all of it runs on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.core.errors import ConfigError, RequestError, TransferError, WeightError
from services.core.protocols import Clock
from services.core.selector import SelectorState
from services.core.types import (
    AcceptanceStats,
    FinishReason,
    GroupWork,
    HiddenStateChunk,
    PartialRollout,
    Rollout,
    RunningRequest,
    ServedVersions,
    StrategySpan,
)
from services.models.hidden import HiddenStates
from services.models.sampling import check_sampling
from services.models.target import check_names, check_shapes
from services.rollout.request import KEEPS_NONE, Withdrawn, check_fits, check_keeps, check_memory, continued_seed
from services.rollout.sglang.acceptance import acceptance_stats
from services.rollout.sglang.handle import Asked, EngineHandle, Kind, Update
from services.rollout.sglang.learned import learned_models
from services.rollout.sglang.requests import Prefill, Request
from services.rollout.sglang.rounds import newest_depth
from services.rollout.sglang.states import assemble
from services.rollout.stops import Emission, emit, response_text
from services.speculation.gain import Predicts
from services.speculation.strategy import DraftStrategy
from services.weights.parts import Incoming

Decode = Callable[[Sequence[int]], str]
Shapes = Mapping[str, tuple[int, ...]]
SPANS_EVERY_S = 1.0  # asking costs SGLang's scheduler about a millisecond, between two rounds


@dataclass(frozen=True)
class SGLangLimits:
    """What the engine was started with. `shapes[kind]`: names and shapes that make up a version; `drafter_zeros`: what
    SGLang's drafter class has besides, zero in ours."""

    max_len: int
    vocab_size: int
    shapes: Mapping[Kind, Shapes]
    drafter_zeros: Shapes
    server: str = "rollout-0"
    capture_bytes: int = 0  # set aside for hidden states; 0: none are kept


class SGLangEngine:
    """One rollout server's engine. `strategies`, by depth: what SGLang was started with. A single one holds for every
    round; between several SGLang switches by itself (see `switching`)."""

    def __init__(
        self,
        handle: EngineHandle,
        limits: SGLangLimits,
        strategies: Mapping[int, DraftStrategy],
        decode: Decode,
        clock: Clock,
    ) -> None:
        self._handle, self._limits, self._strategies = handle, limits, strategies
        self._decode, self._clock = decode, clock
        self._last = next(iter(strategies.values()))
        self._spans_s = -SPANS_EVERY_S
        self._requests: dict[str, Request] = {}
        self._versions = handle.served()
        self._submitted = 0
        self._prefill = Prefill()
        self.released = False
        self._window = 0  # counts the calls of take_states and abort
        self._finished: dict[str, Rollout] = {}  # since the last take_states, with their states
        if limits.capture_bytes:
            handle.capture_states(limits.capture_bytes)

    # -- requests

    @property
    def num_running(self) -> int:
        return len(self._requests) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Requests without a first token yet."""
        return sum(not r.news.response_ids for r in self._requests.values())

    @property
    def num_tokens(self) -> int:
        return sum(len(r.response_ids) for r in self._requests.values())

    @property
    def prefilled(self) -> tuple[int, float]:
        return self._prefill.tokens, self._prefill.seconds

    @property
    def last_strategy(self) -> DraftStrategy:
        """Of the newest round that SGLang has told of."""
        return self._last

    @property
    def models(self) -> Predicts | None:
        return learned_models(self.selector_state())

    def selector_state(self) -> SelectorState | None:
        return self._handle.selector_state() if len(self._strategies) > 1 else None

    def restore_selector(self, state: SelectorState) -> bool:
        return len(self._strategies) > 1 and self._handle.restore_selector(state)

    def take_spans(self) -> tuple[StrategySpan, ...]:
        """What SGLang chose; asked for now and then while it runs, and when it has come to rest."""
        now_s = self._clock()
        if len(self._strategies) == 1 or (self._requests and now_s - self._spans_s < SPANS_EVERY_S):
            return ()
        self._spans_s = now_s
        return self._handle.take_spans()

    def running(self) -> tuple[RunningRequest, ...]:
        return tuple(
            RunningRequest(r.rollout_id, len(r.response_ids), self._acceptance(r))
            for r in self._requests.values()
            if r.news.response_ids
        )

    def check(self, work: GroupWork) -> None:
        check_memory(work, self.released)
        check_sampling(work.sampling)
        check_fits(work, self._limits.vocab_size, self._limits.max_len)
        check_keeps(work, self._limits.capture_bytes)
        sampling = work.sampling
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
            raise RequestError(
                f"{work.group_id}: SGLang reports logprobs without top-k, top-p and min-p, and its verification "
                "ignores min-p: leave them off, or use the native engine"
            )

    def submit(self, work: Sequence[GroupWork]) -> None:
        """Hand the first rollouts of all groups to SGLang at once: with one after the other, its scheduler would
        compute the first one's prompt alone while the others wait. Their siblings follow, and find the prompt in its
        prefix cache: of what comes together it computes every prompt whole, however alike they are."""
        for item in work:
            self.check(item)
        groups = [self._begin_group(item) for item in work]
        firsts, siblings = [g[0] for g in groups], [asked for g in groups for asked in g[1:]]
        for together in filter(None, (firsts, siblings)):
            self._handle.submit(together)

    def _begin_group(self, work: GroupWork) -> list[Asked]:
        known_tokens = sum(len(p.response_ids) for p in work.partials)
        self._prefill.begin(len(work.prompt.token_ids) + known_tokens, self._clock())
        return [self._begin(work, index, seed) for index, seed in zip(work.indices, work.seeds, strict=True)]

    def _begin(self, work: GroupWork, index: int, seed: int) -> Asked:
        """For SGLang, what there is already of a response is prompt."""
        self._submitted += 1
        # The number keeps a request that is submitted again after an abort apart from its first life; it comes
        # first, since SGLang aborts every request whose id begins with the one it is told.
        rid = f"{self._submitted}/{work.group_id}#{index}"
        self._requests[rid] = request = self._request(work, index, seed, rid)
        known = request.earlier_ids
        rest = replace(work.sampling, max_tokens=work.sampling.max_tokens - len(known))
        window = self._window if work.keep_states else None
        return Asked(rid, (*work.prompt.token_ids, *known), rest, continued_seed(seed, len(known)), window)

    def _request(self, work: GroupWork, index: int, seed: int, rid: str) -> Request:
        known = work.partial(index)
        started_s = known.started_s if known else self._clock()
        versions = (list(known.policy_versions), list(known.drafter_versions)) if known else ([], [])
        request = Request(work, index, seed, started_s, *versions, Update(rid, (), ()), known)
        request.serve(self._versions)
        return request

    def peek(self, rollout_ids: Collection[str]) -> tuple[PartialRollout, ...]:
        """Of the newest news that `step` has looked at."""
        return tuple(self._partial(r) for r in self._requests.values() if r.rollout_id in rollout_ids)

    def _partial(self, request: Request) -> PartialRollout:
        return request.partial_of((request.response_ids, request.logprobs), self._part_acceptance(request))

    def withdraw(self, rollout_ids: Collection[str]) -> Withdrawn:
        """Cut the responses where SGLang's news of them end now. What it generates until it hears of that is dropped
        unseen, so that the cut does not depend on it."""
        finished = tuple(self.step(0.0))
        out = [rid for rid, r in self._requests.items() if r.rollout_id in rollout_ids]
        requests = [self._requests.pop(rid) for rid in out]
        for rid in out:
            self._handle.abort(rid)
        if out:
            self._window += 1  # the states of a prefix that one of them computed belong to no rollout of this server
        if out and not self._requests:
            self._handle.abort_all()  # returns when nothing is left: the slot may get another holder
        return Withdrawn(tuple(self._partial(r) for r in requests), finished)

    def abort(self) -> tuple[str, ...]:
        dropped = tuple(r.rollout_id for r in self._requests.values())
        if dropped:
            self._handle.abort_all()
            self._window += 1  # the states of a prefix that a dropped request computed belong to no rollout
        self._requests.clear()
        self._prefill.forget()
        return dropped

    def step(self, wait_s: float) -> list[Rollout]:
        finished = []
        for update in self._handle.poll(wait_s):
            request = self._requests.get(update.rid)
            if request is None:
                continue  # cut at a stop string; SGLang told more before it heard of that
            self._check_news(request, update)
            request.news = update
            self._note_strategy(update)
            reason = self._reason(request)
            if reason is not None:
                del self._requests[update.rid]
                finished.append(self._finish(request, reason))
                if request.work.keep_states:
                    self._finished[update.rid] = finished[-1]
        if not self.num_waiting:
            self._prefill.end(self._clock())
        return finished

    def _note_strategy(self, update: Update) -> None:
        depth = newest_depth(update.histogram) if len(self._strategies) > 1 else None
        if depth is not None:
            self._last = self._strategies[depth]

    @staticmethod
    def _check_news(request: Request, update: Update) -> None:
        if update.finish == FinishReason.ABORT:  # first: SGLang tells the last id alone then
            raise RequestError(
                f"{request.rollout_id}: SGLang gave the request up: {update.message or 'no reason told'}"
            )
        if len(update.logprobs) != len(update.response_ids):
            raise RequestError(
                f"{request.rollout_id}: SGLang sent {len(update.logprobs)} logprobs for {len(update.response_ids)} "
                "tokens; rollouts without one logprob per token cannot be trained on: check the SGLang version"
            )

    def _reason(self, request: Request) -> FinishReason | None:
        """Where the response ends by our own rule, applied to all its ids: SGLang sees no stop strings, and its
        versions differ in what they leave behind a stop inside an accepted run (rows 1 and 4)."""
        news, sampling = request.news, request.work.sampling
        if news.finish is None and not (sampling.stop_strings and news.response_ids):
            return None
        earlier = request.earlier_ids
        emission = emit(earlier, news.response_ids, sampling, self._decode) if news.response_ids else Emission(0, None)
        if emission.finish_reason is None:
            return self._reason_told(request)
        if news.finish is None:
            self._handle.abort(news.rid)
        n = emission.count
        request.news = replace(news, response_ids=news.response_ids[:n], logprobs=news.logprobs[:n])
        return emission.finish_reason

    @staticmethod
    def _reason_told(request: Request) -> FinishReason | None:
        """SGLang's own reason where the run's rule has none: a model's end-of-sequence id may be no stop id of the
        run. It shortens the budget of a request that its KV cache cannot hold, and tells nobody."""
        news, budget = request.news, request.work.sampling.max_tokens
        if news.finish is None:
            return None
        if news.finish != FinishReason.STOP or not news.response_ids:
            raise RequestError(
                f"{request.rollout_id}: SGLang ended the response after {len(request.response_ids)} of {budget} tokens "
                f"({news.finish}): its KV cache is too small for rollout.engine.max_len: raise kv_tokens or "
                "mem_fraction, or lower max_len"
            )
        return FinishReason.STOP

    def _acceptance(self, request: Request) -> AcceptanceStats:
        if request.earlier is not None:
            return self._part_acceptance(request)
        return acceptance_stats(request.news.histogram, len(request.news.response_ids), self._strategies)

    def _part_acceptance(self, request: Request) -> AcceptanceStats:
        """Where another part follows or went before, a prefill's token alone is no decode step."""
        here = acceptance_stats(request.news.histogram, len(request.news.response_ids), self._strategies)
        if not any(request.news.histogram) and any(self._strategies):
            here = AcceptanceStats()
        return AcceptanceStats.merged([request.earlier.acceptance, here]) if request.earlier else here

    def _finish(self, request: Request, reason: FinishReason) -> Rollout:
        text = response_text(request.response_ids, request.sampling, self._decode)
        tokens, now_s = (request.response_ids, request.logprobs), self._clock()
        return request.rollout(tokens, text, reason, self._acceptance(request), now_s, self._limits.server)

    # -- weights and strategy

    @property
    def versions(self) -> ServedVersions:
        return self._versions

    def load_policy(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Running requests go on under the new version, on keys and values computed anew; the prefix cache is empty
        afterwards, so nothing of the old version is ever reused."""
        self._load("policy", version, tensors, self._versions.policy)

    def load_drafter(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        if "drafter" not in self._limits.shapes:
            raise WeightError(f"strategy {self._last.name} runs without a drafter: nothing to load")
        self._load("drafter", version, tensors, self._versions.drafter)

    def _load(self, kind: Kind, version: int, tensors: Mapping[str, Tensor], served: int | None) -> None:
        """All or nothing. The zeros go along with every drafter: left out, SGLang's random start values would stay."""
        self._check_order(kind, version, served)
        check_shapes(tensors, self._limits.shapes[kind], kind)
        if kind == "drafter":
            tensors = {**tensors, **{n: torch.zeros(shape) for n, shape in self._limits.drafter_zeros.items()}}
        self._hand_over(kind, version, lambda: self._handle.load(kind, version, tensors))

    def receive_policy(self, version: int, incoming: Incoming) -> None:
        """Part by part, so that no more than one lies beside the model: what fails behind the first leaves a torn
        version, which the engine tells and only a further load mends."""
        self._check_order("policy", version, self._versions.policy)
        check_names(incoming.shapes, self._limits.shapes["policy"], "policy")
        self._hand_over("policy", version, lambda: self._handle.receive(version, incoming))

    def _check_order(self, kind: Kind, version: int, served: int | None) -> None:
        if self.released:
            raise WeightError(f"{kind} version {version} cannot be loaded: the memory is released, resume it first")
        if served is not None and version < served:
            raise WeightError(f"{kind} version {version} is older than the served {served}; nothing was loaded")

    def _hand_over(self, kind: Kind, version: int, load: Callable[[], None]) -> None:
        try:
            load()
        except (WeightError, TransferError):
            self._adopt(self._handle.served())  # of a version in several parts, some may be in place
            raise
        self._adopt(self._handle.served())
        told = getattr(self._versions, kind)
        if told != version:
            raise WeightError(f"{kind} version {version} was loaded, but SGLang reports {told}: restart this server")

    def _adopt(self, versions: ServedVersions) -> None:
        self._versions = versions
        for request in self._requests.values():
            request.serve(versions)

    def force_strategy(self, strategy: DraftStrategy | None) -> None:
        if strategy is not None and strategy not in self._strategies.values():
            names = ", ".join(s.name for s in self._strategies.values())
            raise ConfigError(
                f"this SGLang engine was started with {names} and cannot change to {strategy.name}: name it in "
                "speculation.selector, or use the native engine"
            )
        if len(self._strategies) > 1:
            self._handle.force_depth(None if strategy is None else strategy.depth)

    # -- hidden states

    def take_states(self, step: int) -> tuple[HiddenStateChunk, list[HiddenStates]]:
        """Hidden states of the rollouts that ended since the last call, of work that asked for them."""
        if not self._limits.capture_bytes:
            raise ConfigError(KEEPS_NONE)
        finished, self._finished = self._finished, {}
        self._window += 1
        return assemble(self._handle.take_states(), finished, step, self._versions.policy or 0)

    # -- memory

    def switch_memory(self, release: bool) -> int:
        """Weights of policy and drafter survive (row 24)."""
        assert release != self.released and not self._requests
        free = self._handle.free_bytes()
        self._handle.switch_memory(release)
        self.released = release
        return abs(self._handle.free_bytes() - free)

    def close(self) -> None:
        self._handle.close()
