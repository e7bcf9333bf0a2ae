"""From captured states to what the drafter learns from: one `HiddenStates` per finished rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.core.errors import BatchError
from services.core.types import HiddenStateChunk, Rollout
from services.models.finite import all_finite
from services.models.hidden import HiddenStates, chunk_of
from services.rollout.sglang.captured import CapturedStates, Ints

SHOWN = 4  # tokens on either side of a mismatch


@dataclass(frozen=True)
class _Sequence:
    """`rows` of the captured states are those of ids[start : start + len(rows)], all under one policy version."""

    rid: str
    ids: Ints
    num_prompt: int
    version: int
    start: int
    rows: Ints

    @property
    def complete(self) -> bool:
        """The last token was never fed to the target: its state is nobody's."""
        return self.start == 0 and len(self.rows) >= len(self.ids) - 1


def assemble(
    captured: CapturedStates, finished: Mapping[str, Rollout], step: int, served: int
) -> tuple[HiddenStateChunk, list[HiddenStates]]:
    """States of the `finished` rollouts (by request id) as far as they were kept from position 0 on under one policy
    version, the newest that any of them ended with (`served` when none was kept): a chunk is for one version.

    Ids are cut to the states. The beginning of a sequence that came from the prefix cache is filled in from the one
    that computed it. Raises BatchError when the captured tokens are not the rollouts': a drafter trained on shifted
    states would learn nothing, in silence.
    """
    if finished and not captured.rids and not captured.lost_bytes:
        raise BatchError(
            f"{captured.engine} generated {len(finished)} rollouts and none of their hidden states were kept: it does "
            "not call the methods that this version of Longtail hooks: set drafter.states: policy"
        )
    found = _sequences(captured, finished)
    version = max((s.version for s in found), default=served)
    kept, num_complete = [], 0
    for sequence in _filled([s for s in found if s.version == version]):
        states = _hidden_states(captured, sequence)
        if not all_finite(states.hidden):
            continue
        num_complete += sequence.complete
        if bool(states.loss_mask.any()):
            kept.append(states)
    return chunk_of(kept, version, step, len(finished) - num_complete, captured.lost_bytes), kept


def _sequences(captured: CapturedStates, finished: Mapping[str, Rollout]) -> list[_Sequence]:
    """What each finished rollout has of its own, checked against its ids."""
    order = np.argsort(captured.request, kind="stable")
    bounds = np.searchsorted(captured.request[order], np.arange(len(captured.rids) + 1))
    found = []
    for i, rid in enumerate(captured.rids):
        rollout = finished.get(rid)
        if rollout is None or rid in captured.void:
            continue
        version, start, rows = _own_rows(captured, order[bounds[i] : bounds[i + 1]])
        ids = np.array((*rollout.prompt_ids, *rollout.response_ids), dtype=np.int64)
        rows = rows[: max(0, len(ids) - start)]  # a last round may have gone beyond the stop
        sequence = _Sequence(rid, ids, len(rollout.prompt_ids), version, start, rows)
        _check_ids(captured, sequence, rollout.rollout_id)
        found.append(sequence)
    return found


def _own_rows(captured: CapturedStates, runs: Ints) -> tuple[int, int, Ints]:
    """(version, first position, rows) of one request, from its runs in the order of computing.

    Only the last version's count. A run that begins at a position takes the place of everything from there on: a
    retracted request is computed anew, and what a discarded round had computed beyond that was never emitted.
    """
    runs = runs[captured.version[runs] == captured.version[runs[-1]]]
    start = captured.start[runs]
    later = np.minimum.accumulate(start[::-1])[::-1]
    end = np.minimum(start + captured.count[runs], np.append(later[1:], np.iinfo(np.int64).max))
    valid = end > start
    runs, start, count = runs[valid], start[valid], (end - start)[valid]
    gaps = np.flatnonzero(start[1:] != (start + count)[:-1])
    if len(gaps):  # SGLang leaves none: what is behind one cannot be placed
        runs, start, count = (a[: gaps[0] + 1] for a in (runs, start, count))
    ends = np.cumsum(count)
    rows = np.arange(ends[-1]) + np.repeat(captured.first_row[runs] - (ends - count), count)
    return int(captured.version[runs[0]]), int(start[0]), rows


def _check_ids(captured: CapturedStates, s: _Sequence, rollout_id: str) -> None:
    emitted = s.ids[s.start + 1 : s.start + 1 + len(s.rows)]
    told = captured.behind[s.rows[: len(emitted)]]
    wrong = np.flatnonzero((told != emitted) & (told >= 0))
    if len(wrong):
        at = slice(max(0, wrong[0] - SHOWN), wrong[0] + SHOWN)
        raise BatchError(
            f"{rollout_id}: hidden states of {captured.engine} belong to other tokens than were emitted: around "
            f"position {s.start + 1 + wrong[0]} it had {told[at].tolist()}, the sequence has {emitted[at].tolist()}: "
            "its tensors are not laid out as this version of Longtail knows them: set drafter.states: policy"
        )


def _filled(sequences: Sequence[_Sequence]) -> list[_Sequence]:
    """Those that reach back to position 0, with what another one computed of their beginning; in the order given."""
    whole = {s.rid: s for s in sequences if s.start == 0}
    begun: dict[bytes, Ints] = {}
    open_ = [s for s in sequences if s.start > 0]
    while open_:
        left = []
        for s in open_:
            prefix = s.ids[: s.start]
            rows = begun.get(prefix.tobytes())
            if rows is None:
                rows = next((w.rows[: s.start] for w in whole.values() if _begins_with(w, prefix)), None)
            if rows is None:
                left.append(s)
                continue
            begun[prefix.tobytes()] = rows
            whole[s.rid] = replace(s, start=0, rows=np.concatenate([rows, s.rows]))
        if len(left) == len(open_):
            break
        open_ = left
    return [whole[s.rid] for s in sequences if s.rid in whole]


def _begins_with(whole: _Sequence, prefix: Ints) -> bool:
    n = len(prefix)
    return len(whole.rows) >= n and bool(np.array_equal(whole.ids[:n], prefix))


def _hidden_states(captured: CapturedStates, s: _Sequence) -> HiddenStates:
    """A copy: the captured states' memory can go."""
    hidden = captured.states.index_select(0, torch.from_numpy(s.rows))
    ids = torch.from_numpy(s.ids[: len(s.rows)])
    return HiddenStates(ids, hidden, torch.arange(len(s.rows)) >= s.num_prompt, s.version)
