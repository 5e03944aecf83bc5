"""Stored rollouts as flat arrays: N action tokens of R rows, whatever file they came from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOKEN_COLUMNS = (
    "position",
    "logprob",
    "learner_logprob",
    "proximal_logprob",
    "entropy",
    "entropy_upper",
    "learner_entropy",
    "version",
    "advantage",
)
ROW_COLUMNS = (
    "group",
    "reward",
    "row_advantage",
    "target_version",
    "trained_step",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "standard",
    "name",
    "text",
)


@dataclass(frozen=True)
class Stream:
    """Token ids of R rows one after the other, with prompts and tool text: row r is ids[offsets[r]:offsets[r+1]]."""

    ids: Ints  # [M]
    offsets: Ints  # [R + 1]

    def select(self, rows: Ints) -> Stream:
        """The rows with these indices."""
        lengths = np.diff(self.offsets)[rows]
        begin = np.repeat(self.offsets[rows] - (np.cumsum(lengths) - lengths), lengths)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return Stream(self.ids[np.arange(int(lengths.sum())) + begin], offsets)


@dataclass(frozen=True)
class Dump:
    """What ``estr inspect`` knows of a file or a run.

    A row is what the model read in one piece: a trajectory, or a part of one where its history forked. Token arrays are
    [N] (action tokens only, in the order they were sampled inside each row) and float64 with NaN where a value is not
    known; row arrays are [R].
    """

    source: str
    preset: str
    row: Ints  # [N], non-decreasing
    position: Ints  # [N], index of the token in its row's stream, or among its action tokens without a stream
    logprob: Floats  # [N] log μ
    learner_logprob: Floats  # [N] log π as the learner saw it
    proximal_logprob: Floats  # [N] log q
    entropy: Floats  # [N] H of μ in nats, or the lower end of an interval
    entropy_upper: Floats  # [N]
    learner_entropy: Floats  # [N]
    version: Floats  # [N], optimizer steps behind the weights that sampled the token
    advantage: Floats  # [N]
    trajectory: Ints  # [R], 0..S-1
    group: Ints  # [R], -1 where unknown
    reward: Floats  # [R]
    row_advantage: Floats  # [R]
    target_version: Floats  # [R], the learner's version when it trained the row
    trained_step: Floats  # [R]
    temperature: Floats  # [R]
    top_p: Floats  # [R]
    top_k: Floats  # [R]
    min_p: Floats  # [R]
    standard: NDArray[np.bool_]  # [R], tokens were drawn from the distribution that log μ and H belong to
    entropy_kind: str  # "exact" | "bounded" | "proxy" | "mixed" | "absent"
    name: NDArray[Any]  # [R], strings
    text: NDArray[Any]  # [R], strings
    stream: Stream | None = None
    misplaced: tuple[str, ...] = ()  # columns whose row lengths are those of other rows
    notes: tuple[str, ...] = field(default=())

    @property
    def token_count(self) -> int:
        return len(self.row)

    @property
    def rows(self) -> int:
        return len(self.trajectory)

    @property
    def trajectories(self) -> int:
        return int(self.trajectory.max()) + 1 if self.rows else 0

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """Rows sampled from less than the whole vocabulary [R]."""
        return (self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)

    def select(self, chosen: NDArray[np.bool_]) -> Dump:
        """The dump of the chosen rows [R] alone."""
        index = np.flatnonzero(chosen)
        number = np.cumsum(chosen) - 1
        kept = chosen[self.row]
        per_token = {name: getattr(self, name)[kept] for name in TOKEN_COLUMNS}
        per_row = {name: getattr(self, name)[index] for name in ROW_COLUMNS}
        _, trajectory = np.unique(self.trajectory[index], return_inverse=True)
        return replace(
            self,
            row=number[self.row[kept]],
            trajectory=trajectory.astype(np.int64),
            stream=None if self.stream is None else self.stream.select(index),
            **per_token,
            **per_row,
        )

    def has(self, column: str) -> bool:
        """Whether a column holds at least one known value."""
        if column in ("tokens", "group_id"):
            return self.stream is not None if column == "tokens" else bool((self.group >= 0).any())
        return bool(np.isfinite(getattr(self, column)).any())

    @cached_property
    def delta(self) -> Floats:
        """δ = log π − log μ [N]; NaN where either is missing or infinite."""
        with np.errstate(invalid="ignore"):
            delta = self.learner_logprob - self.logprob
        return np.where(np.isfinite(delta), delta, np.nan)

    @cached_property
    def surprisal(self) -> Floats:
        """−log μ of the sampled token [N], NaN where it is not finite."""
        return np.where(np.isfinite(self.logprob), -self.logprob, np.nan)

    @cached_property
    def lag(self) -> Floats:
        """v_target − version of each token [N], in optimizer steps."""
        return self.target_version[self.row] - self.version

    @cached_property
    def inter(self) -> Floats:
        """Δ_inter = v_target − v_last of each token's trajectory [N]."""
        return self.target_version[self.row] - self._last_version[self.trajectory[self.row]]

    @cached_property
    def intra(self) -> Floats:
        """v_last − version [N]: how far the weights moved between a token and the end of its trajectory."""
        return self._last_version[self.trajectory[self.row]] - self.version

    @cached_property
    def batch(self) -> Ints:
        """A number for the optimizer step that trained each token's row [N]; 0 for all where steps are not known."""
        steps = np.where(np.isfinite(self.trained_step), self.trained_step, self.target_version)
        return np.unique(np.where(np.isfinite(steps), steps, -1.0), return_inverse=True)[1][self.row].astype(np.int64)

    @cached_property
    def starts(self) -> Ints:
        """Index of each row's first action token, and N at the end [R + 1]."""
        return np.searchsorted(self.row, np.arange(self.rows + 1)).astype(np.int64)

    @cached_property
    def _last_version(self) -> Floats:
        """Version of the last action token of each trajectory [S]."""
        last = np.full(self.trajectories, np.nan)
        known = np.isfinite(self.version)
        last[self.trajectory[self.row[known]]] = self.version[known]  # the last assignment stays
        return last
