"""Sets of token ids of different sizes, one per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """The token ids that each of N rows is normalized over; an empty set stands for the whole vocabulary."""

    ids: Tensor  # int64 [M]
    offsets: Tensor  # int64 [N + 1], from 0 to M: row i has ids[offsets[i] : offsets[i + 1]]

    def to(self, device: torch.device | str) -> Ragged:
        """The same sets on ``device``."""
        return Ragged(self.ids.to(device), self.offsets.to(device))

    def check(self, rows: int) -> None:
        """Raise ValueError unless there is one set for each of ``rows`` rows."""
        if self.ids.ndim != 1 or self.offsets.shape != (rows + 1,):
            raise ValueError(
                f"a support must have ids [M] and offsets [{rows + 1}], one more than there are rows; "
                f"got {list(self.ids.shape)} and {list(self.offsets.shape)}"
            )

    def outside(self, rows: Tensor, vocabulary: int) -> Tensor:
        """True at the ids that are not in the set of their row, bool ``[len(rows), vocabulary]``; ``rows`` int64."""
        starts, sizes = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        row = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), sizes)
        place = torch.arange(len(row), device=rows.device) - (sizes.cumsum(0) - sizes)[row]
        outside = (sizes > 0)[:, None].expand(-1, vocabulary).contiguous()
        outside[row, self.ids[starts[row] + place]] = False
        return outside
