"""One key-value cache for a fixed number of rows, written at each row's own position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, columns, head_dim] each; the last column is scratch."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def empty(like: Tensor) -> Tensor:
            return torch.zeros(
                self.rows, like.shape[1], self.columns + 1, like.shape[3], dtype=like.dtype, device=like.device
            )

        self.keys, self.values = empty(key_states), empty(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("SlotLayer is written through SlotCache.update")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.columns


class SlotCache(Cache):
    """Cache of ``rows`` sequences of up to ``columns`` tokens.

    Before a forward pass ``target`` says where its tokens go; ``update`` writes them and returns the keys and values
    of those rows up to the longest one. Queries that are padding write into the scratch column.
    """

    layers: list[SlotLayer]

    def __init__(self, rows: int, columns: int, layers: int) -> None:
        super().__init__(layers=[SlotLayer(rows, columns) for _ in range(layers)])
        self.rows, self.columns = rows, columns
        self._rows: Tensor | None = None
        self._count = 0
        self._positions: Tensor = torch.zeros(0, dtype=torch.int64)
        self._width = 0

    def target(self, rows: Tensor | int, positions: Tensor, width: int) -> None:
        """``rows``: int64 [n], or n for the first n rows (no copy); ``positions``: int64 [n, Q], ``columns`` where a
        query is padding; ``width``: columns that attention reads."""
        self._rows = rows if isinstance(rows, Tensor) else None
        self._count = len(rows) if isinstance(rows, Tensor) else rows
        self._positions = positions
        self._width = width
        self._index = (self._rows if self._rows is not None else torch.arange(self._count, device=positions.device))[
            :, None
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        assert layer.keys is not None
        assert layer.values is not None
        if self._positions.shape[1] == 1:
            index, position = self._index[:, 0], self._positions[:, 0]
            layer.keys[index, :, position] = key_states[:, :, 0]
            layer.values[index, :, position] = value_states[:, :, 0]
        else:
            layer.keys[self._index, :, self._positions] = key_states.transpose(1, 2)
            layer.values[self._index, :, self._positions] = value_states.transpose(1, 2)
        if self._rows is None:
            return (
                layer.keys[: self._count, :, : self._width],
                layer.values[: self._count, :, : self._width],
            )
        return layer.keys[self._rows, :, : self._width], layer.values[self._rows, :, : self._width]

    def swap(self, a: int, b: int, width: int) -> None:
        """Exchange the first ``width`` columns of two rows."""
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            for store in (layer.keys, layer.values):
                assert store is not None
                held = store[a, :, :width].clone()
                store[a, :, :width] = store[b, :, :width]
                store[b, :, :width] = held

    def move(self, source: int, row: int, width: int) -> None:
        """Copy the first ``width`` columns of ``source`` to ``row``."""
        for layer in self.layers:
            if layer.is_initialized:
                for store in (layer.keys, layer.values):
                    assert store is not None
                    store[row, :, :width] = store[source, :, :width]

    def copy(self, source: int, rows: Tensor, width: int) -> None:
        """Copy the first ``width`` columns of ``source`` to every row of ``rows``: siblings share a prompt."""
        for layer in self.layers:
            if layer.is_initialized:
                for store in (layer.keys, layer.values):
                    assert store is not None
                    store[rows, :, :width] = store[source, :, :width]

    def grow(self, columns: int) -> None:
        """Make room for ``columns`` tokens a row, keeping what is there."""
        if columns <= self.columns:
            return
        for layer in self.layers:
            if layer.is_initialized:
                for name in ("keys", "values"):
                    old = getattr(layer, name)
                    new = old.new_zeros(old.shape[0], old.shape[1], columns + 1, old.shape[3])
                    new[:, :, : self.columns] = old[:, :, : self.columns]
                    setattr(layer, name, new)
            layer.columns = columns
        self.columns = columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
