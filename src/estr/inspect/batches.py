"""Stored tokens as the batches that objectives read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from estr.batch import TokenBatch
from estr.inspect.dump import Dump, Floats, Ints

Mask = NDArray[np.bool_]


def seen_by_learner(dump: Dump) -> Mask:
    """Tokens of rows with any learner's log-probability: what the learner dropped as invalid is among them [N]."""
    known = np.bincount(dump.row[np.isfinite(dump.learner_logprob)], minlength=dump.rows) > 0
    return np.asarray(known[dump.row], bool)


@dataclass(frozen=True)
class TokenColumns:
    """Tokens in order of their optimizer batch, then of their trajectory, as tensors; ``cuts`` bound the batches."""

    fields: Mapping[str, torch.Tensor]
    sequence: torch.Tensor
    group: torch.Tensor
    reward: torch.Tensor
    target: Floats
    cuts: Ints  # [batches + 1]
    order: Ints  # [n], index of each token in the dump
    notes: list[str]

    def batch(self, names: frozenset[str], first: int, last: int) -> TokenBatch:
        """Tokens first..last-1 with the fields that a recipe reads."""
        sequence = self.sequence[first:last]
        ids, sequence = torch.unique_consecutive(sequence, return_inverse=True)
        always = {"logprob", "behavior_logprob", "advantage"}
        chosen: dict[str, Any] = {n: self.fields[n][first:last] for n in self.fields if n in names | always}
        if "proximal_logprob" in names and "proximal_logprob" not in chosen:
            chosen["proximal_logprob"] = chosen["logprob"]
        targets = np.unique(self.target[first:last])
        known = len(targets) == 1 and np.isfinite(targets[0])
        return TokenBatch(
            sequence=sequence,
            group=self.group[ids],
            reward=self.reward[ids],
            target_version=int(targets[0]) if known else None,
            advantage_scope="token",
            **chosen,
        )

    @classmethod
    def of(cls, dump: Dump, chosen: Mask) -> TokenColumns:
        """The chosen tokens [N] of a dump. Where log q is missing, log π stands in for it."""
        return _columns(dump, chosen)


def _columns(dump: Dump, seen: Mask) -> TokenColumns:
    trajectory = dump.trajectory[dump.row]
    order = np.flatnonzero(seen)
    order = order[np.lexsort((order, trajectory[order], dump.batch[order]))]
    notes = []
    fields = {
        "logprob": dump.learner_logprob,
        "behavior_logprob": dump.logprob,
        "advantage": dump.advantage,
    }
    if not dump.has("advantage"):
        notes.append("No advantages are stored; gates that look at their sign are computed as if all were positive.")
        fields["advantage"] = np.ones(dump.token_count)
    if dump.has("proximal_logprob"):
        fields["proximal_logprob"] = np.where(
            np.isnan(dump.proximal_logprob), dump.learner_logprob, dump.proximal_logprob
        )
    if dump.has("entropy"):
        fields["behavior_entropy"] = dump.entropy
        if dump.has("entropy_upper"):
            fields["behavior_entropy_upper"] = np.where(np.isnan(dump.entropy_upper), dump.entropy, dump.entropy_upper)
    elif dump.has("learner_entropy"):
        fields["behavior_entropy"] = dump.learner_entropy
        notes.append("No entropy of the behavior policy is stored; the learner's stands in for it.")
    if dump.has("learner_entropy"):
        fields["entropy"] = dump.learner_entropy
    tensors = {name: torch.from_numpy(values[order].astype(np.float32)) for name, values in fields.items()}
    if np.isfinite(dump.version[order]).all():
        tensors["version"] = torch.from_numpy(dump.version[order].astype(np.int64))
    first_row = np.unique(dump.trajectory, return_index=True)[1]
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(dump.batch[order])) + 1, [len(order)]])
    return TokenColumns(
        tensors,
        torch.from_numpy(trajectory[order]),
        torch.from_numpy(dump.group[first_row]),
        torch.from_numpy(dump.reward[first_row]),
        dump.target_version[dump.row[order]],
        cuts,
        order,
        notes,
    )
