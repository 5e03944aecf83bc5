"""Which tokens each recipe would drop at its defaults, and where recipes disagree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from estr.batch import TokenBatch
from estr.diagnostics import keep_masks
from estr.inspect.dump import Dump, Floats
from estr.inspect.ratios import entropy_of
from estr.objectives import Objective, objective, recipes

Mask = NDArray[np.bool_]

BATCHES = 48  # optimizer batches looked at for recipes that need the whole of one; evenly chosen beyond
EXAMPLES = 4  # of each kind of disagreement


@dataclass(frozen=True)
class Disagreement:
    """Tokens that one gate keeps and another stops."""

    kept_by: str
    dropped_by: str
    tokens: int
    share: float
    examples: list[int]  # token indices, the largest |δ| first


@dataclass(frozen=True)
class Verdicts:
    """What recipes would do with the stored tokens."""

    tokens: int  # that the learner saw
    masked: dict[str, float]
    left_out: dict[str, str]  # recipe → why it could not be computed
    gates: dict[str, float]  # gate → share it stops (for PPO's clip: where it leaves no gradient)
    disagreements: list[Disagreement]
    notes: list[str]


def verdicts(dump: Dump) -> Verdicts:
    """Masks of all recipes at their defaults over the tokens of rows that the learner saw."""
    seen = _seen(dump)
    if not seen.any():
        why = "no learner_logprob is stored"
        return Verdicts(0, {}, dict.fromkeys(recipes(), why), {}, [], [])
    columns, notes = _columns(dump, seen)
    masked, left_out = {}, {}
    for name in recipes():
        try:
            masked[name] = _masked_fraction(objective(name), columns)
        except ValueError as error:
            left_out[name] = str(error)
    gates, disagreements = _disagreements(dump, seen)
    return Verdicts(int(seen.sum()), masked, left_out, gates, disagreements, notes)


def _seen(dump: Dump) -> Mask:
    """Tokens of rows with any learner's log-probability: what the learner dropped as invalid is among them [N]."""
    known = np.bincount(dump.row[np.isfinite(dump.learner_logprob)], minlength=dump.rows) > 0
    return np.asarray(known[dump.row], bool)


@dataclass(frozen=True)
class _Columns:
    """The seen tokens in order of their trajectory, as tensors; ``cuts`` bound the optimizer batches."""

    fields: Mapping[str, torch.Tensor]
    sequence: torch.Tensor
    group: torch.Tensor
    reward: torch.Tensor
    target: Floats
    cuts: NDArray[np.int64]

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


def _columns(dump: Dump, seen: Mask) -> tuple[_Columns, list[str]]:
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
    return (
        _Columns(
            tensors,
            torch.from_numpy(trajectory[order]),
            torch.from_numpy(dump.group[first_row]),
            torch.from_numpy(dump.reward[first_row]),
            dump.target_version[dump.row[order]],
            cuts,
        ),
        notes,
    )


@torch.no_grad()
def _masked_fraction(recipe: Objective, columns: _Columns) -> float:
    """Share of tokens that are not kept; batch by batch for recipes that look at the whole of an optimizer batch."""
    names = recipe.uses | recipe.needs
    whole = any(part.measure is not None for part in recipe.composition.parts) or "target_version" in names
    cuts = columns.cuts if whole else columns.cuts[[0, -1]]
    chosen = np.unique(np.linspace(0, len(cuts) - 2, min(BATCHES, len(cuts) - 1)).round().astype(int))
    kept = tokens = 0
    for index in chosen:
        first, last = int(cuts[index]), int(cuts[index + 1])
        kept += int(recipe.statistics(columns.batch(names, first, last)).kept_tokens)
        tokens += last - first
    return 1.0 - kept / max(tokens, 1)


def _disagreements(dump: Dump, seen: Mask) -> tuple[dict[str, float], list[Disagreement]]:
    """Pairs of the token gates that everyone compares with: ESTR, IcePop, KPop, PPO's clip."""
    entropy = entropy_of(dump) if dump.has("entropy") or dump.has("learner_entropy") else None
    advantage = dump.advantage[seen] if dump.has("advantage") else None
    masks = keep_masks(
        dump.learner_logprob[seen],
        dump.logprob[seen],
        np.full(int(seen.sum()), np.nan) if entropy is None else entropy[seen],
        dump.proximal_logprob[seen] if dump.has("proximal_logprob") else None,
        advantage,
    )
    if entropy is None:
        del masks["estr"]
    index, size = np.flatnonzero(seen), np.abs(np.nan_to_num(dump.delta[seen]))
    valid = np.isfinite(dump.delta[seen])
    found = []
    for kept, dropped in permutations(masks, 2):
        differ = np.flatnonzero(masks[kept] & ~masks[dropped] & valid)
        if len(differ):
            largest = differ[np.argpartition(-size[differ], min(EXAMPLES, len(differ)) - 1)[:EXAMPLES]]
            largest = largest[np.argsort(-size[largest])]
            share = len(differ) / len(index)
            found.append(Disagreement(kept, dropped, len(differ), share, index[largest].tolist()))
    found.sort(key=lambda pair: -pair.tokens)
    return {name: float((~mask).mean()) for name, mask in masks.items()}, found
