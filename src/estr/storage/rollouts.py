"""rollouts/*.parquet: settled trajectories, one row per segment (columns of CONTRACT section 4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from estr.config.sections import RolloutConfig
from estr.storage.encoding import clean_text
from estr.trajectory import Segment, Trajectory

Row = dict[str, Any]
State = Literal["trained", "finished", "dropped"]

_FLOATS, _INTS = pa.list_(pa.float32()), pa.list_(pa.int32())
_OPTIONAL = {"support": pa.list_(_INTS), "topk_ids": pa.list_(_INTS), "topk_logprob": pa.list_(_FLOATS)}

SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("tokens", _INTS, nullable=False),
        pa.field("action", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprob", _FLOATS, nullable=False),
        pa.field("entropy", _FLOATS, nullable=False),
        pa.field("version", _INTS, nullable=False),
        pa.field("entropy_kind", pa.string(), nullable=False),
        pa.field("entropy_upper", _FLOATS),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("min_p", pa.float64(), nullable=False),
        pa.field("sampler", pa.string(), nullable=False),  # "standard" or "cuts", by sibling
        *(pa.field(name, kind) for name, kind in _OPTIONAL.items()),  # one entry a token, null where it has none
        pa.field("learner_logprob", _FLOATS),
        pa.field("learner_entropy", _FLOATS),
        pa.field("proximal_logprob", _FLOATS),
        pa.field("reward", pa.float64()),
        pa.field("advantage", pa.float64()),
        pa.field("token_advantage", _FLOATS),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("turns", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("drop_reason", pa.string()),
        pa.field("trained_step", pa.int64()),
        pa.field("target_version", pa.int64()),
        pa.field("text", pa.string(), nullable=False),
        pa.field("parent_id", pa.string()),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("group_key", pa.string(), nullable=False),
        pa.field("sibling", pa.int32(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("resumed_at", _INTS, nullable=False),
    ]
)

PerSegment = Sequence[NDArray[np.floating[Any]] | None]


@dataclass(frozen=True)
class Settlement:
    """What became of a trajectory.

    ``used``: a dropped trajectory that was used up together with its trained group (AEPO chose others in its place), so
    that the ledger counts it with them.

    The learner's columns hold one float array [L] per segment, aligned with the segment's tokens and NaN where a token
    is no action: values as the learner saw them when it trained the row.
    """

    state: State
    drop_reason: str | None = None
    trained_step: int | None = None  # optimizer step, 1-based
    target_version: int | None = None  # the learner's version when it trained the row
    advantage: float | None = None
    token_advantage: PerSegment | None = None  # only where it differs by token
    learner_logprob: PerSegment | None = None
    learner_entropy: PerSegment | None = None  # nats
    proximal_logprob: PerSegment | None = None
    used: bool = False

    def __post_init__(self) -> None:
        if (self.state == "trained") != (self.trained_step is not None):
            raise ValueError("a trajectory has a trained_step if and only if its state is 'trained'")
        if (self.state == "dropped") != (self.drop_reason is not None):
            raise ValueError("a trajectory has a drop_reason if and only if its state is 'dropped'")


@dataclass(frozen=True)
class Settled:
    """A trajectory and what became of it, to be made into rows by whoever writes them."""

    trajectory: Trajectory
    settlement: Settlement
    rollout: RolloutConfig

    def names(self) -> list[str]:
        """The ids of its rows."""
        name = self.trajectory.trajectory_id
        return [_row_id(name, index) for index in range(max(1, len(self.trajectory.segments)))]

    def rows(self) -> list[Row]:
        return rows_from(self.trajectory, self.settlement, self.rollout)


def rows_from(trajectory: Trajectory, settlement: Settlement, rollout: RolloutConfig) -> list[Row]:
    """One row per segment (one empty row where nothing was generated); later segments are ``ID#1``, ``ID#2``…

    Raises:
        ValueError: a learner's column does not have its segment's length.
    """
    segments = trajectory.segments or [_empty_segment()]
    shared = _trajectory_columns(trajectory) | _settlement_columns(settlement)
    shared |= _sampling_columns(rollout, trajectory.sibling)
    return [
        shared
        | _segment_columns(trajectory.trajectory_id, index, segment)
        | _learner_columns(settlement, index, len(segment.tokens))
        | {"text": clean_text(trajectory.text) if index == 0 else ""}
        for index, segment in enumerate(segments)
    ]


def to_table(rows: Sequence[Row]) -> pa.Table:
    """Rows as an Arrow table of ``SCHEMA``."""
    columns = [pa.array([row[field.name] for row in rows], type=field.type) for field in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _empty_segment() -> Segment:
    floats = np.zeros(0, np.float32)
    return Segment(np.zeros(0, np.int32), np.zeros(0, np.bool_), floats, floats, np.zeros(0, np.int32))


def _trajectory_columns(trajectory: Trajectory) -> Row:
    return {
        "group_id": f"{trajectory.group:08d}",
        "task_id": clean_text(trajectory.task_id),
        "prompt": clean_text(trajectory.prompt),
        "reward": float(trajectory.reward),
        "finish_reason": trajectory.finish_reason,
        "turns": trajectory.turns,
        "seed": trajectory.seed,
        "group_key": clean_text(trajectory.group_key),
        "sibling": trajectory.sibling,
        "attempt": trajectory.attempt,
        "resumed_at": list(trajectory.resumed_at),
        "error": None if trajectory.error is None else clean_text(trajectory.error),
    }


def _settlement_columns(settlement: Settlement) -> Row:
    return {
        "state": settlement.state,
        "drop_reason": None if settlement.drop_reason is None else clean_text(settlement.drop_reason),
        "trained_step": settlement.trained_step,
        "target_version": settlement.target_version,
        "advantage": None if settlement.advantage is None else float(settlement.advantage),
    }


def _sampling_columns(rollout: RolloutConfig, sibling: int) -> Row:
    return {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "sampler": _sampler(rollout, sibling),
    }


def _sampler(rollout: RolloutConfig, sibling: int) -> str:
    """Siblings beyond the group's size are AEPO's second rollouts: tempered, log μ and H those at ``temperature``."""
    if sibling >= rollout.group_size:
        return "tempered"
    return "cuts" if rollout.explores(sibling) else "standard"


def _row_id(trajectory_id: str, segment: int) -> str:
    return f"{trajectory_id}#{segment}" if segment else trajectory_id


def _segment_columns(trajectory_id: str, index: int, segment: Segment) -> Row:
    return {
        "trajectory_id": _row_id(trajectory_id, index),
        "parent_id": trajectory_id if index else None,
        "segment": index,
        "tokens": np.asarray(segment.tokens, np.int32),
        "action": np.asarray(segment.action, np.bool_),
        "logprob": np.asarray(segment.logprob, np.float32),
        "entropy": np.asarray(segment.entropy, np.float32),
        "version": np.asarray(segment.version, np.int32),
        "entropy_kind": "exact" if segment.entropy_upper is None else "bounded",
        "entropy_upper": None if segment.entropy_upper is None else np.asarray(segment.entropy_upper, np.float32),
        **_optional_columns(segment),
    }


def _optional_columns(segment: Segment) -> Row:
    """Lists by token: the support (null where it is the whole vocabulary) and the sampler's most likely tokens."""
    support = segment.support
    spans = (
        None
        if support is None
        else [ids if len(ids) else None for ids in map(support.__getitem__, range(len(support)))]
    )
    values = {"support": spans, "topk_ids": segment.topk_ids, "topk_logprob": segment.topk_logprob}
    return {name: None if column is None else _by_token(segment, column) for name, column in values.items()}


def _by_token(segment: Segment, column: Iterable[NDArray[Any] | None]) -> list[NDArray[Any] | None]:
    """One entry a token, None where it is no action, from one entry an action token."""
    given = iter(column)
    return [next(given) if action else None for action in segment.action.tolist()]


def _learner_columns(settlement: Settlement, index: int, length: int) -> Row:
    names = ("token_advantage", "learner_logprob", "learner_entropy", "proximal_logprob")
    return {name: _aligned(name, getattr(settlement, name), index, length) for name in names}


def _aligned(name: str, column: PerSegment | None, index: int, length: int) -> NDArray[np.float32] | None:
    values = column[index] if column is not None else None
    if values is None:
        return None
    aligned = np.asarray(values, np.float32)
    if aligned.shape != (length,):
        raise ValueError(f"{name} of segment {index} has shape {aligned.shape}, its tokens have length {length}")
    return aligned
