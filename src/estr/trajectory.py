"""The domain's nouns: what travels from the engine through the schedule to the learner."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FINISH_REASONS = ("stop", "length", "turns", "error")


@dataclass
class Support:
    """Which token ids the sampler could have drawn at each of A action tokens, ragged.

    Action token i was drawn from ``ids[offsets[i] : offsets[i + 1]]``; an empty span stands for the whole vocabulary.
    """

    ids: NDArray[np.int32]  # [M]
    offsets: NDArray[np.int64]  # [A + 1], from 0 to M

    def __post_init__(self) -> None:
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.ids) or (np.diff(self.offsets) < 0).any():
            raise ValueError(f"a support's offsets must rise from 0 to {len(self.ids)}, the number of its ids")

    @classmethod
    def of(cls, parts: Sequence[NDArray[np.int32]]) -> Support:
        """The support whose spans are ``parts``, one per action token."""
        sizes = np.array([len(part) for part in parts], np.int64)
        return cls(np.concatenate([np.zeros(0, np.int32), *parts]), np.concatenate([[0], sizes.cumsum()]))

    @classmethod
    def join(cls, supports: Iterable[Support | None], counts: Iterable[int]) -> Support | None:
        """Supports of several rows with ``counts`` action tokens one after the other; None where all are None."""
        pairs = list(zip(supports, counts, strict=True))
        if all(support is None for support, _ in pairs):
            return None
        ids = [support.ids for support, _ in pairs if support is not None]
        sizes = [np.zeros(count, np.int64) if s is None else np.diff(s.offsets) for s, count in pairs]
        return cls(np.concatenate(ids), np.concatenate([[0], np.concatenate(sizes).cumsum()]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        """The ids of one action token."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


@dataclass
class Segment:
    """One row of tokens exactly as the model read it: prompt, actions and tool text, L tokens in all.

    ``logprob`` (log μ of the sampled token), ``entropy`` (H of μ in nats) and ``version`` belong to the token at the
    same index; where ``action`` is False they are NaN, NaN and -1. Where H is only known as an interval, ``entropy`` is
    its lower end and ``entropy_upper`` its upper one. The other optional columns belong to the A action tokens in
    order: ``support``, where the sampler drew from less than the whole vocabulary, and the K most likely ids of μ with
    their log μ (-inf outside the support).
    """

    tokens: NDArray[np.int32]  # [L]
    action: NDArray[np.bool_]  # [L]
    logprob: NDArray[np.float32]  # [L]
    entropy: NDArray[np.float32]  # [L]
    version: NDArray[np.int32]  # [L]
    support: Support | None = None  # None: the whole vocabulary everywhere
    topk_ids: NDArray[np.int32] | None = None  # [A, K], most likely first
    topk_logprob: NDArray[np.float32] | None = None  # [A, K]
    entropy_upper: NDArray[np.float32] | None = None  # [L]; None: ``entropy`` is exact

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.action), len(self.logprob), len(self.entropy), len(self.version)}
        if self.entropy_upper is not None:
            lengths.add(len(self.entropy_upper))
        if len(lengths) != 1:
            raise ValueError(f"a segment's columns must have one length, got {sorted(lengths)}")
        if self.support is None and self.topk_ids is None and self.topk_logprob is None:
            return
        if (self.topk_ids is None) != (self.topk_logprob is None):
            raise ValueError("a segment has topk_ids if and only if it has topk_logprob")
        optional = [x for x in (self.support, self.topk_ids, self.topk_logprob) if x is not None]
        if {len(x) for x in optional} != {self.action_count}:
            raise ValueError(
                f"a segment's support and top-k must have {self.action_count} entries, one per action token"
            )

    @property
    def action_count(self) -> int:
        return int(self.action.sum())


def trajectory_id(group: int, sibling: int, attempt: int) -> str:
    """The name of an attempt at a sibling of a group, unique in a run."""
    return f"{group:08d}-{sibling:03d}" + (f".{attempt}" if attempt else "")


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
    resumed_at: list[int] = field(default_factory=list)  # turns after which it went on in another process, re-prefilled

    @property
    def trajectory_id(self) -> str:
        return trajectory_id(self.group, self.sibling, self.attempt)

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
