"""Device state of the running requests: one dense row each, with tokens, keys/values and target hidden states.

Columns are token positions. For a row of `lengths[r]` known tokens, keys/values and hidden states are valid in columns
0..lengths[r]-2: the last token has not been through the target yet. Drafter keys/values are valid below
`drafted[r]` (entry t joins token t+1 and hidden state t). Rejected drafts leave rubbish past those marks, which masks
hide and later writes cover: roll-back is ragged and free.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.models.kv import KVStore
from services.models.target import TargetModel

PREFILL_CHUNK = 512


class Rows:
    """Rows 0..count-1 are in use. `spare` columns past max_len take draft nodes and padding of ragged writes."""

    def __init__(self, target: TargetModel, rows: int, max_len: int, spare: int) -> None:
        spec, device, dtype = target.spec, target.device, target.dtype
        columns = max_len + spare
        self.target = target
        self.kv = KVStore(spec, spec.num_layers, rows, columns, device, dtype)
        self.draft_kv = KVStore(spec, 1, rows, columns, device, dtype)
        self.hidden = torch.zeros(rows, columns, spec.hidden_size, device=device, dtype=dtype)
        self.tokens = torch.zeros(rows, columns, dtype=torch.long, device=device)
        self.lengths = np.zeros(rows, dtype=np.int64)
        self.drafted = np.zeros(rows, dtype=np.int64)
        self.count = 0
        self.released = False
        self._index = torch.arange(rows, device=device)[:, None]

    def switch_memory(self, release: bool) -> int:
        """Release the keys and values of all rows, none of which may be in use, or take their memory again. Returns
        bytes."""
        assert not self.count, f"{self.count} rows are in use"
        for store in (self.kv, self.draft_kv):
            if release:
                store.release()
            else:
                store.resume()
        self.released = release
        return self.kv.num_bytes + self.draft_kv.num_bytes

    def row_index(self) -> Tensor:
        """[count,1], for gathers along columns."""
        return self.index_of(self.count)

    def index_of(self, count: int) -> Tensor:
        """[count,1] of the first rows, in use or not."""
        return self._index[:count]

    def longest(self) -> int:
        """Known tokens of the longest row."""
        return int(self.lengths[: self.count].max())

    def base(self) -> Tensor:
        """[count] column of the last known token: where the next target step begins."""
        return torch.from_numpy(self.lengths[: self.count] - 1).to(self.target.device)

    def add_group(self, prompt_ids: list[int], count: int) -> None:
        """Open `count` rows on one prompt with a single prefill."""
        first = self.count
        self.count += count
        self._open(first, prompt_ids)
        for row in range(first + 1, first + count):
            self._copy(first, row)

    def _open(self, row: int, ids: list[int]) -> None:
        self.tokens[row, : len(ids)] = torch.tensor(ids, device=self.target.device)
        self.lengths[row], self.drafted[row] = len(ids), 0
        self.prefill(row)

    def extend(self, row: int, ids: Sequence[int]) -> None:
        """Put tokens that are known already behind those of a row, which keeps what it has computed."""
        known = int(self.lengths[row])
        self.tokens[row, known : known + len(ids)] = torch.tensor(ids, device=self.target.device)
        self.lengths[row] = known + len(ids)
        self._compute(row, known - 1)

    def prefill(self, row: int) -> None:
        """Run all known tokens but the last through the target; forgets the row's drafter state."""
        self.drafted[row] = 0
        self._compute(row, 0)

    def _compute(self, row: int, first: int) -> None:
        end = int(self.lengths[row]) - 1
        for start in range(first, end, PREFILL_CHUNK):
            at = torch.arange(start, min(end, start + PREFILL_CHUNK), device=self.target.device)[None]
            base = torch.tensor([start], device=self.target.device)
            mask = causal_tail(base, at.shape[1], start + at.shape[1], self.target.dtype)
            ids = self.tokens[row : row + 1, at[0]]
            self.hidden[row, at[0]] = self.target.forward(ids, at, self.kv, at, mask, first_row=row)[0]

    def _copy(self, source: int, row: int) -> None:
        length = int(self.lengths[source])
        self.kv.copy_row(source, row, length)
        self.draft_kv.copy_row(source, row, length)
        self.hidden[row, :length] = self.hidden[source, :length]
        self.tokens[row, :length] = self.tokens[source, :length]
        self.lengths[row], self.drafted[row] = length, self.drafted[source]

    def close(self, row: int) -> int | None:
        """Free `row`; the last row moves into the gap. Returns the row that moved, if any."""
        last = self.count - 1
        if row != last:
            self._copy(last, row)
        self.count = last
        return last if row != last else None

    def write(self, new: Tensor) -> None:
        """Put new [count,k] behind the last known token of each row; `advance` then says how many of them count."""
        at = self.base()[:, None] + 1 + torch.arange(new.shape[1], device=new.device)
        self.tokens[self.row_index(), at] = new

    def compact(self, path: Tensor) -> None:
        """Move an accepted tree `path` [count,depth] of node numbers to the columns right behind the root. Columns past
        the accepted tokens receive copies of the last accepted node: rubbish behind the row's length, covered by the
        next write."""
        base, index = self.base()[:, None], self.row_index()
        source, target = base + path, base + 1 + torch.arange(path.shape[1], device=path.device)
        self.kv.gather(index, source, target)
        self.hidden[index, target] = self.hidden[index, source]

    def advance(self, row: int, count: int) -> None:
        self.lengths[row] += count


def tail_table(tail: Tensor, dtype: torch.dtype) -> Tensor:
    """tail bool [Q,E] -> additive [Q,E+2]: column 0 for everything before the tail (seen), the last for everything
    behind it (not seen)."""
    seen = F.pad(F.pad(tail, (1, 0), value=True), (0, 1), value=False)
    return torch.zeros(seen.shape, dtype=dtype, device=tail.device).masked_fill_(~seen, -torch.inf)


def tail_mask(base: Tensor, table: Tensor, columns: int) -> Tensor:
    """Additive mask [B,1,Q,columns]: query q of row b sees columns below base[b], and column base[b] + e where the
    tail behind `table` [Q,E+2] says so."""
    relative = torch.arange(columns, device=table.device)[None] - base[:, None]
    return table[:, relative.clamp_(-1, table.shape[1] - 2) + 1].transpose(0, 1)[:, None]


@lru_cache(maxsize=512)
def causal_table(queries: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tail of `queries` tokens in a row."""
    return tail_table(torch.ones(queries, queries, dtype=torch.bool, device=device).tril(), dtype)


def causal_tail(base: Tensor, queries: int, columns: int, dtype: torch.dtype) -> Tensor:
    """`tail_mask` for `queries` tokens in a row."""
    return tail_mask(base, causal_table(queries, dtype, base.device), columns)
