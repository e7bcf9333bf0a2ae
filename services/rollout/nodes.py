"""The target's pass over all draft nodes of a round."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from services.models.kv import PackedKV
from services.models.sampling import SamplingTensors, process_logits
from services.rollout.captured import PassGraphs, PassInputs, target_pass
from services.rollout.rows import Rows, tail_mask, tail_table
from services.speculation.drafting import Draft
from services.speculation.tree import TreeShape

# Ragged drafts are packed when that leaves out at least so many nodes: a gather and a scatter in every layer cost about
# as much as a dozen (pocket model, one core: 12 left out lose, 24 to 48 gain 5 %, 96 of 576 3 %, 320 of 576 27 %).
WORTH_PACKING = 32


@lru_cache(maxsize=64)
def shape_tensors(shape: TreeShape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Depth of each node [Q], and the mask table of the target's pass over all nodes."""
    return torch.tensor(shape.depths, device=device), tail_table(torch.tensor(shape.sees, device=device), dtype)


def node_logprobs(rows: Rows, draft: Draft, sampling: SamplingTensors, graphs: PassGraphs | None = None) -> Tensor:
    """Runs the target over each row's last token and its draft nodes; keeps keys, values and hidden states. Returns
    processed log-probabilities float32 [B,Q,V], of probability zero at nodes past a row's length. `sampling`: one entry
    per node, [B*Q]. `graphs`: a pass that one of them holds runs whole, ragged or not."""
    target, nodes, base = rows.target, draft.shape.num_nodes, rows.base()
    depths, table = shape_tensors(draft.shape, target.dtype, base.device)
    last = rows.tokens[rows.row_index(), base[:, None]]
    given = PassInputs(torch.cat([last, draft.tokens], dim=1), base, depths, table)
    context = rows.longest() - 1
    hidden = None if graphs is None else graphs.run(given, context)
    offered = torch.arange(nodes, device=base.device) <= draft.lengths[:, None]
    if hidden is None and offered.numel() - int(offered.sum()) < WORTH_PACKING:
        hidden = target_pass(rows, given, context + nodes)
    if hidden is not None:
        logits = target.logits(hidden).flatten(0, 1)
        return process_logits(logits, sampling).log_softmax(-1).unflatten(0, offered.shape)
    return _packed_logprobs(rows, given, offered, sampling)


def _packed_logprobs(rows: Rows, given: PassInputs, offered: Tensor, sampling: SamplingTensors) -> Tensor:
    """Without the nodes that are not `offered` (bool [B,Q])."""
    target, nodes = rows.target, offered.shape[1]
    mask = tail_mask(given.base, given.table, rows.longest() - 1 + nodes)
    row, node = offered.nonzero(as_tuple=True)
    at, positions = given.base[row] + node, given.base[row] + given.depths[node]
    packed = PackedKV(rows.kv, row, node)
    hidden = target.forward(given.ids[row, node][None], positions[None], packed, at[None], mask)[0]
    rows.hidden[row, at] = hidden
    logits = process_logits(target.logits(hidden), sampling.take(row * nodes + node))
    out = torch.full((*offered.shape, logits.shape[-1]), -torch.inf, dtype=logits.dtype, device=logits.device)
    out[row, node] = logits.log_softmax(-1)
    return out
