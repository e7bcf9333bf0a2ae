"""The embedded rollout engine: continuous batching over dense rows, one draft strategy per round, lossless.

One round is: admit waiting groups (one prefill per group), choose a strategy, draft, run the target once over all draft
nodes, verify, emit up to the first stop, roll back by length. OFF is a round whose draft is empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.config.graphs import GraphsConfig
from services.core.errors import WeightError
from services.core.protocols import Clock
from services.core.selector import SelectorState
from services.core.types import (
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
from services.models.sampling import SamplingTensors, check_sampling, sampling_tensors, uniforms
from services.models.target import TargetModel, check_names, target_names
from services.rollout.captured import cuda_graphs
from services.rollout.choices import FORCED, ChoiceLog
from services.rollout.eagle import CATCH_UP_CHUNK
from services.rollout.kept import KeptStates
from services.rollout.nodes import node_logprobs
from services.rollout.proposing import Proposer
from services.rollout.request import Request, Withdrawn, check_fits, check_room, continued_seed, note_version, take_out
from services.rollout.rows import Rows
from services.rollout.stops import emit, response_text
from services.rollout.stopwatch import Stopwatch
from services.speculation.drafting import Draft
from services.speculation.gain import Predicts
from services.speculation.round import Choice, RoundOutcome, RoundView
from services.speculation.selector import Selector, restore_selector, selector_state
from services.speculation.strategy import OFF, DraftStrategy
from services.speculation.suffix_index import SuffixIndex
from services.speculation.verify import Verified, count_tries, verify_chain, verify_tree
from services.weights.parts import Incoming


@dataclass(frozen=True)
class EngineOptions:
    """`max_running` rows of `max_len` tokens; `max_nodes` is the largest num_draft_tokens of any strategy. `place`: in
    words, what this engine's seconds depend on: device, number format, model. `capture_bytes`: set aside for hidden
    states; 0: none are kept."""

    max_running: int
    max_len: int
    max_nodes: int
    accept_threshold: float = 1.0
    suffix_index: SuffixIndex | None = None
    server: str = "rollout-0"
    place: str = ""
    capture_bytes: int = 0
    graphs: GraphsConfig | None = None  # CUDA graphs of the target's pass
    graph_nodes: tuple[int, ...] = (1,)  # num_draft_tokens of the strategies that they are for

    @property
    def spare_columns(self) -> int:
        return CATCH_UP_CHUNK + self.max_nodes + 2


class NativeEngine:
    """Token-in/token-out generation. Not thread-safe: one owner calls it."""

    def __init__(
        self,
        target: TargetModel,
        options: EngineOptions,
        selector: Selector,
        decode: Callable[[Sequence[int]], str],
        clock: Clock,
    ) -> None:
        self._target, self._options, self._selector = target, options, selector
        self._decode, self._clock = decode, clock
        self._rows = Rows(target, options.max_running, options.max_len, options.spare_columns)
        self._requests: list[Request] = []  # request of row r
        self._waiting: deque[GroupWork] = deque()
        self._seeds = np.zeros(options.max_running, dtype=np.uint64)
        self._draws = np.zeros(options.max_running, dtype=np.uint64)
        self._sampling: dict[int, SamplingTensors] = {}  # by repeats per row; rebuilt when the rows change
        self._policy_version: int | None = None
        self._drafter_version: int | None = None
        self._forced: DraftStrategy | None = None
        self._watch = Stopwatch(target.device, clock)
        self._choices = ChoiceLog()
        self._proposer = Proposer(self._rows, options.suffix_index, self._watch)
        self._kept = KeptStates(options.capture_bytes)
        wanted, nodes = options.graphs, options.graph_nodes
        self.graphs = None if wanted is None else cuda_graphs(self._rows, wanted, nodes, options.server)
        self.last_strategy = OFF
        self.prefilled = 0, 0.0

    # -- requests

    @property
    def num_running(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        return sum(len(w.indices) for w in self._waiting)

    def running(self) -> tuple[RunningRequest, ...]:
        return tuple(r.running() for r in self._requests)

    @property
    def num_tokens(self) -> int:
        waiting = sum(len(p.response_ids) for w in self._waiting for p in w.partials)
        return sum(len(r.response_ids) for r in self._requests) + waiting

    def submit(self, work: Sequence[GroupWork]) -> None:
        """Queue groups; refuses what cannot be served before anything starts."""
        for item in work:
            self.check(item)
        self._waiting.extend(work)

    def check(self, work: GroupWork) -> None:
        check_sampling(work.sampling)
        self._kept.check(work)
        check_fits(work, self._target.spec.vocab_size, self._options.max_len)
        check_room(work, self._options.max_running, self.released)

    def abort(self) -> tuple[str, ...]:
        """Drop everything waiting and running; returns the dropped rollout ids. Hidden states of responses that ended
        are kept: a server is asked for them in its slot's next epoch."""
        dropped = [r.rollout_id for r in self._requests]
        dropped += [f"{w.group_id}#{i}" for w in self._waiting for i in w.indices]
        self._requests.clear()
        self._waiting.clear()
        self._rows.count = 0
        self._sampling.clear()
        return tuple(dropped)

    def peek(self, rollout_ids: Collection[str]) -> tuple[PartialRollout, ...]:
        return tuple(r.partial() for r in self._requests if r.rollout_id in rollout_ids)

    def withdraw(self, rollout_ids: Collection[str]) -> Withdrawn:
        """Rows are freed from the last to the first, as at the end of a round."""
        partials = []
        for row in range(self.num_running - 1, -1, -1):
            if self._requests[row].rollout_id in rollout_ids:
                partials.append(self._requests[row].partial())
                self._free(row)
        kept: list[GroupWork] = []
        for work in self._waiting:
            left, out = take_out(work, rollout_ids, self._clock())
            partials.extend(out.partials)
            kept += [left] if left is not None else []
        self._waiting = deque(kept)
        return Withdrawn(tuple(partials))

    # -- memory, weights and strategy

    @property
    def released(self) -> bool:
        return self._rows.released

    def switch_memory(self, release: bool) -> int:
        """Of keys and values; the weights stay."""
        if self.graphs is not None:
            self.graphs.forget()
        return self._rows.switch_memory(release)

    @property
    def versions(self) -> ServedVersions:
        return ServedVersions(self._policy_version, self._drafter_version)

    def load_policy(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Adopt a policy version. Running requests continue under it from their next token, on keys and values
        recomputed with the new weights; their rollouts list both versions."""
        self._refuse_backwards("policy", version, self._policy_version)
        self._target.load(tensors)
        self._policy_version = version
        for row, request in enumerate(self._requests):
            self._rows.prefill(row)
            note_version(request.policy_versions, version)

    def receive_policy(self, version: int, incoming: Incoming) -> None:
        """All of it comes before any of it is loaded."""
        self._refuse_backwards("policy", version, self._policy_version)
        check_names(incoming.shapes, target_names(self._target.spec), "policy")
        self.load_policy(version, dict(pair for part in incoming.parts() for pair in part))

    def load_drafter(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._refuse_backwards("drafter", version, self._drafter_version)
        self._proposer.eagle.load(tensors)
        self._drafter_version = version
        for request in self._requests:
            note_version(request.drafter_versions, version)

    @staticmethod
    def _refuse_backwards(what: str, version: int, served: int | None) -> None:
        if served is not None and version < served:
            raise WeightError(f"{what} version {version} is older than the served {served}; nothing was loaded")

    def force_strategy(self, strategy: DraftStrategy | None) -> None:
        """Use one strategy from the next round on; None gives the choice back to the selector."""
        assert strategy is None or strategy.num_draft_tokens <= self._options.max_nodes
        self._forced = strategy

    def use_selector(self, selector: Selector) -> Selector:
        """Let another one choose and be told from the next round on; returns the one before. What that chose is not
        told any more."""
        before, self._selector = self._selector, selector
        self._choices.take()
        return before

    @property
    def models(self) -> Predicts | None:
        return self._selector if isinstance(self._selector, Predicts) else None

    def selector_state(self) -> SelectorState | None:
        return selector_state(self._selector, self._options.place)

    def restore_selector(self, state: SelectorState) -> bool:
        return restore_selector(self._selector, state, self._options.place)

    def take_spans(self) -> tuple[StrategySpan, ...]:
        return self._choices.take()

    def take_states(self, step: int) -> tuple[HiddenStateChunk, list[HiddenStates]]:
        return self._kept.take(step, self._policy_version or 0)

    def feed_at_once(self, whole: bool) -> None:
        """Feed the drafter whole contexts in one round, not in portions: for measurements of what that costs."""
        self._proposer.portions = not whole

    # -- one round

    @torch.no_grad()
    def step(self, wait_s: float = 0.0) -> list[Rollout]:
        """One round over all running requests, however long it takes; returns the rollouts that ended in it."""
        assert self._policy_version is not None, "load a policy version first"
        self._admit()
        if not self._requests:
            return []
        if self.graphs is not None:
            self.graphs.capture_due()
        started_s = self._clock()
        self._watch.start()
        view = self._view()
        choice = Choice(self._forced, FORCED) if self._forced else self._selector.choose(view)
        chosen = choice.strategy
        draft = self._proposer.propose(chosen, self._requests, self._row_sampling(), self._uniforms)
        self._watch.lap("draft")
        self.last_strategy = chosen if draft.shape.num_nodes > 1 else OFF
        verified, logprobs = self._verify(draft)
        self._proposer.learn(self._requests, verified.accepted)
        self._watch.lap("verify")
        emitted, finished = self._commit(draft, verified, logprobs)
        if chosen.searched:
            self._proposer.index(self._requests)
        counts = count_tries(draft, verified, emitted)
        self._selector.record(RoundOutcome(chosen, view, emitted, self._watch.seconds(), *counts))
        self._choices.note(choice, view.running, emitted, started_s, self._clock())
        return finished

    def _view(self) -> RoundView:
        rows, temperatures = self._rows, [r.sampling.temperature for r in self._requests]
        known = rows.lengths[: rows.count]
        behind = (known - 1 - rows.drafted[: rows.count]).clip(min=0)
        temperature = sum(temperatures) / len(temperatures)
        drafter = -1 if self._drafter_version is None else self._drafter_version
        return RoundView(rows.count, int(known.sum()), int(behind.sum()), temperature, drafter)

    def _admit(self) -> None:
        if not self._waiting:
            return
        started, tokens = self._clock(), 0
        while self._waiting and len(self._waiting[0].indices) <= self._options.max_running - self.num_running:
            work = self._waiting.popleft()
            first = self.num_running
            self._rows.add_group(list(work.prompt.token_ids), len(work.indices))
            tokens += len(work.prompt.token_ids)
            self._note(work.prompt.id, work.prompt.token_ids, 0)
            for row, (index, seed) in enumerate(zip(work.indices, work.seeds, strict=True), start=first):
                tokens += self._begin(row, Request.begin(work, index, seed, self._clock()))
            self._sampling.clear()
        if tokens:
            known, seconds = self.prefilled
            self.prefilled = known + tokens, seconds + self._clock() - started

    def _begin(self, row: int, request: Request) -> int:
        """Open the request on a row that holds its prompt. Returns how many tokens of its response are there."""
        known = request.response_ids
        request.serve(self.versions)
        self._requests.append(request)
        self._seeds[row], self._draws[row] = continued_seed(request.seed, len(known)) % 2**64, 0
        if known:
            self._rows.extend(row, known)
            prompt = request.work.prompt
            self._note(prompt.id, [*prompt.token_ids, *known], len(prompt.token_ids))
            request.indexed = len(known)
        return len(known)

    def _note(self, key: str, tokens: Sequence[int], start: int) -> None:
        """Let the suffix index know of tokens[start:]."""
        if self._options.suffix_index is not None:
            self._options.suffix_index.note(key, tokens, start)

    def _uniforms(self, count: int) -> Tensor:
        """Fresh random numbers [rows, count], each rollout's own stream."""
        n = self.num_running
        numbers = uniforms(self._seeds[:n], self._draws[:n], count)
        self._draws[:n] += np.uint64(count)
        return torch.from_numpy(numbers).to(self._target.device)

    def _row_sampling(self, times: int = 1) -> SamplingTensors:
        """Sampling parameters of the rows, each `times` times."""
        if not self._sampling:
            self._sampling[1] = sampling_tensors([r.sampling for r in self._requests], self._target.device)
        if times not in self._sampling:
            self._sampling[times] = self._sampling[1].repeat(times)
        return self._sampling[times]

    def _verify(self, draft: Draft) -> tuple[Verified, Tensor]:
        """Target over all nodes, then verification. Also returns log-probabilities [B,Q,V], processed."""
        nodes = draft.shape.num_nodes
        logprobs = node_logprobs(self._rows, draft, self._row_sampling(nodes), self.graphs)
        numbers, threshold = self._uniforms(nodes), self._options.accept_threshold
        if draft.shape.is_chain:
            probs = logprobs.exp()
            return verify_chain(probs, draft.tokens, draft.probs, draft.lengths, numbers, threshold), logprobs
        verified = verify_tree(
            logprobs.exp(), draft.tokens, draft.probs, draft.lengths, draft.shape, numbers, threshold
        )
        self._rows.compact(verified.path)
        return verified, logprobs

    def _commit(self, draft: Draft, verified: Verified, logprobs: Tensor) -> tuple[int, list[Rollout]]:
        """Append what was verified to each row, up to its first stop; close rows that ended."""
        root = torch.zeros_like(verified.next_token)[:, None]
        node_ids = torch.cat([root, draft.tokens], dim=1)
        path = verified.path
        new = torch.cat([node_ids.gather(1, path), verified.next_token[:, None]], dim=1)
        new.scatter_(1, verified.num_accepted_tokens[:, None], verified.next_token[:, None])
        parents = torch.cat([root, path], dim=1)  # the node whose distribution token j came from
        scores = logprobs[self._rows.row_index(), parents].gather(-1, new[..., None])[..., 0]
        self._rows.write(new)
        ids, values, accepted, offered = new.tolist(), scores.tolist(), verified.accepted, draft.offered
        ended: list[tuple[int, FinishReason]] = []
        total = 0
        for row, request in enumerate(self._requests):
            tokens = ids[row][: accepted[row] + 1]
            emission = emit(request.response_ids, tokens, request.sampling, self._decode)
            total += emission.count
            self._append(row, request, tokens[: emission.count], values[row][: emission.count], offered[row])
            if emission.finish_reason is not None:
                ended.append((row, emission.finish_reason))
        return total, [self._close(row, reason) for row, reason in reversed(ended)]

    def _append(self, row: int, request: Request, tokens: list[int], values: list[float], offered: int) -> None:
        if offered:
            request.acceptance.verify(self.last_strategy.name, offered, len(tokens))
        else:
            request.acceptance.plain(OFF.name)
        request.response_ids.extend(tokens)
        request.logprobs.extend(values)
        self._rows.advance(row, len(tokens))

    def _close(self, row: int, reason: FinishReason) -> Rollout:
        """Free the row; rows are closed from the last to the first, so that moves do not disturb pending ones."""
        self._keep_states(row)
        request = self._free(row)
        self._proposer.ended(len(request.response_ids))
        text = response_text(request.response_ids, request.sampling, self._decode)
        return request.finish(reason, text, self._clock(), self._options.server)

    def _keep_states(self, row: int) -> None:
        """All of one version: a load in the middle of a response computes its beginning anew."""
        work, request = self._requests[row].work, self._requests[row]
        if work.keep_states:
            ids = [*work.prompt.token_ids, *request.response_ids]
            hidden = self._rows.hidden[row, : len(ids) - 1]
            self._kept.keep(ids, hidden, len(work.prompt.token_ids), request.policy_versions[-1])

    def _free(self, row: int) -> Request:
        request = self._requests[row]
        self._proposer.note(request)
        moved = self._rows.close(row)
        if moved is not None:
            self._requests[row] = self._requests[moved]
            self._seeds[row], self._draws[row] = self._seeds[moved], self._draws[moved]
        self._requests.pop()
        self._sampling.clear()
        return request
