"""Which tokens each recipe would drop at its defaults, and where recipes disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch

from estr.diagnostics import keep_masks
from estr.inspect.batches import Mask, TokenColumns, seen_by_learner
from estr.inspect.dump import Dump
from estr.inspect.ratios import entropy_of
from estr.objectives import Objective, objective, recipes

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


def verdicts(dump: Dump, own: Sequence[str] = ()) -> Verdicts:
    """Masks of all recipes at their defaults over the tokens of rows that the learner saw; ``own`` are further ones,
    as ``module:name``."""
    seen, names = seen_by_learner(dump), [*recipes(), *own]
    if not seen.any():
        why = "no learner_logprob is stored"
        return Verdicts(0, {}, dict.fromkeys(names, why), {}, [], [])
    columns = TokenColumns.of(dump, seen)
    masked, left_out = {}, {}
    for name in names:
        try:
            masked[name] = _masked_fraction(objective(name), columns)
        except ValueError as error:
            left_out[name] = str(error)
    gates, disagreements = _disagreements(dump, seen)
    return Verdicts(int(seen.sum()), masked, left_out, gates, disagreements, columns.notes)


@torch.no_grad()
def _masked_fraction(recipe: Objective, columns: TokenColumns) -> float:
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
