"""The domain's nouns: what travels from the engine through the schedule to the learner."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FINISH_REASONS = ("stop", "length", "turns", "error")


@dataclass
class Segment:
    """One row of tokens exactly as the model read it: prompt, actions and tool text, L tokens in all.

    ``logprob`` (log μ of the sampled token), ``entropy`` (H of μ in nats) and ``version`` belong to the token at the
    same index; where ``action`` is False they are NaN, NaN and -1.
    """

    tokens: NDArray[np.int32]  # [L]
    action: NDArray[np.bool_]  # [L]
    logprob: NDArray[np.float32]  # [L]
    entropy: NDArray[np.float32]  # [L]
    version: NDArray[np.int32]  # [L]

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.action), len(self.logprob), len(self.entropy), len(self.version)}
        if len(lengths) != 1:
            raise ValueError(f"a segment's columns must have one length, got {sorted(lengths)}")

    @property
    def action_count(self) -> int:
        return int(self.action.sum())


@dataclass
class Trajectory:
    """One attempt at one problem: one segment, or several where a history forked."""

    group: int  # the group's number in the ledger
    sibling: int  # 0..group_size-1
    attempt: int  # 0 unless an earlier attempt failed
    task_id: str
    prompt: str
    seed: int
    segments: list[Segment] = field(default_factory=list)
    text: str = ""
    reward: float = float("nan")
    finish_reason: str = "error"
    turns: int = 0
    error: str | None = None
    forks: int = 0  # segments beyond the first
    group_key: str = ""  # stable id of the problem, the same for all siblings

    @property
    def trajectory_id(self) -> str:
        suffix = f".{self.attempt}" if self.attempt else ""
        return f"{self.group:08d}-{self.sibling:03d}{suffix}"

    @property
    def action_versions(self) -> NDArray[np.int32]:
        """Versions of all action tokens in the order they were sampled, int32 [N]."""
        parts = [segment.version[segment.action] for segment in self.segments]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    @property
    def action_count(self) -> int:
        return sum(segment.action_count for segment in self.segments)

    @property
    def token_count(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def intra_staleness(self) -> int:
        """Δ_intra = v_last - v_first."""
        versions = self.action_versions
        return int(versions[-1] - versions[0]) if len(versions) else 0


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on ``parts`` alone (run seed, group number, sibling, turn, attempt)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
