"""Key/value store of the engine: one row per running request, ragged lengths, free roll-back.

Rolling back rejected draft tokens costs nothing: a row's length is data of the engine, columns past it are masked and
overwritten later. Rows stay dense (the engine moves the last row into a gap), so a decode step reads views, no copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.models.layers import Attend, ModelSpec, masked_attention


class KVStore:
    """Per layer a tensor [rows, columns, 2, M, D]: keys at index 0, values at 1."""

    def __init__(
        self, spec: ModelSpec, num_layers: int, rows: int, columns: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (rows, columns, 2, spec.num_kv_heads, spec.head_dim)
        self.layers = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(num_layers)]
        self._row_index = torch.arange(rows, device=device)[:, None]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.layers)

    def release(self) -> None:
        """Give the memory back; nothing may be read or written until `resume`."""
        for store in self.layers:
            store.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Take it again, empty: columns that nobody wrote are masked, and a mask hides zeros but no NaN."""
        for store in self.layers:
            store.untyped_storage().resize_(store.numel() * store.element_size())
            store.zero_()

    def attend(self, layer: int, write_at: Tensor, mask: Tensor, first_row: int = 0) -> Attend:
        """Attention over B rows from `first_row`: write the new columns, then read columns 0..L-1 under `mask`
        [B,1,Q,L]."""
        store = self.layers[layer]
        rows = slice(first_row, first_row + mask.shape[0])

        def run(q: Tensor, kv: Tensor) -> Tensor:
            store[self._row_index[rows], write_at] = kv
            view = store[rows, : mask.shape[-1]]
            return masked_attention(q, view[:, :, 0], view[:, :, 1], mask)

        return run

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Columns 0..length-1 of `source` to `target`: sharing a prefill, or closing a gap."""
        for store in self.layers:
            store[target, :length] = store[source, :length]

    def gather(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Move columns within rows: rows [n,1], source and target [n,k]; compacts an accepted tree path."""
        for store in self.layers:
            store[rows, target] = store[rows, source]


class PackedKV:
    """`store` for N queries out of a ragged block of B rows by Q: what is not asked costs no linear layer.

    `row`, `slot` [N] say where in the block each query stands; attention alone runs over the whole block.
    """

    def __init__(self, store: KVStore, row: Tensor, slot: Tensor) -> None:
        self._store, self._row, self._slot = store, row, slot

    def attend(self, layer: int, write_at: Tensor, mask: Tensor, first_row: int = 0) -> Attend:
        """As KVStore's, for q [1,N,...] and `write_at` [1,N]; mask [B,1,Q,L]."""
        store, rows, queries = self._store.layers[layer], mask.shape[0], mask.shape[2]

        def run(q: Tensor, kv: Tensor) -> Tensor:
            store[first_row + self._row, write_at[0]] = kv[0]
            block = q.new_zeros(rows, queries, *q.shape[2:])
            block[self._row, self._slot] = q[0]
            view = store[first_row : first_row + rows, : mask.shape[-1]]
            return masked_attention(block, view[:, :, 0], view[:, :, 1], mask)[self._row, self._slot][None]

        return run
