"""A12: entropies or rewards attached to the wrong rows."""

from __future__ import annotations

import numpy as np

from estr.inspect.checks.base import Finding
from estr.inspect.checks.entropies import Column, columns
from estr.inspect.checks.statistics import FEWEST, SIGNIFICANT, Fit, compare, mean_of
from estr.inspect.dump import Dump, Floats, Ints

WIDTH = 256  # tokens of a row that are compared
SEARCHED = 96  # rows whose partner is looked for
CANDIDATES = 512
DISCORDANT = 0.1  # share of pairs of siblings whose order of rewards and advantages differs


def wrong_rows(dump: Dump) -> Finding | None:
    """A12. The entropies of a row fit another row's tokens, or no row's better than any other's."""
    for name in dump.misplaced:
        return Finding(
            "A12",
            f"The rows of {name} have the lengths of other rows: the same lengths occur, in another order, so its "
            "rows were "
            "not put back where they belong.",
            {"column": name},
        )
    for column in columns(dump):
        found = _rows_of(dump, column)
        if found is not None:
            return found
    return None


def _rows_of(dump: Dump, column: Column) -> Finding | None:
    if column.known.sum() < FEWEST or dump.rows < 4 or not column.refuted:
        return None
    random_row = compare(
        column.surprisal, column.entropy, _of_row(dump, column.entropy, _next_row(dump)), column.weight
    )
    if random_row.count < FEWEST // 2 or random_row.score < -0.6:
        return None  # a row's own entropy explains its tokens far better than another's
    for words, order, batch in _packings(dump):
        fit = compare(column.surprisal, column.entropy, _repacked(dump, column.entropy, order, batch), column.weight)
        if fit.score > 0.5 and fit.t > SIGNIFICANT:
            return _finding(column, fit, f"its rows were packed {words} and not put back in order")
    for batch in (_row_batch(dump), np.zeros(dump.rows, np.int64)):
        fit = _partners(dump, column, batch)
        if fit.score > 0.2 and fit.t > SIGNIFICANT:
            return _finding(column, fit, "what stands in a row fits the tokens of another row")
    if _unrelated(column, random_row):
        return _finding(column, random_row, "its mean is right, but what stands in a row fits another row as well")
    return None


def _unrelated(column: Column, random_row: Fit) -> bool:
    """Whether H has the mean of the surprisal but nothing to do with the tokens it stands at."""
    gap = mean_of((column.weight * (column.surprisal - column.entropy))[column.known])
    level = float(column.surprisal[column.known].mean())
    right_mean = abs(gap.value) < max(0.05 * level, 3 * gap.error)
    return right_mean and abs(random_row.score) < 0.3 and random_row.error < 0.1


def _finding(column: Column, fit: Fit, how: str) -> Finding:
    return Finding(
        "A12",
        f"{column.words} is attached to the wrong rows: {how} (score {fit.score:.2f}; 1 is another row's for certain, "
        "right "
        "data give −1).",
        {"column": column.name, "score": fit.score, "standard_error": fit.error},
    )


def _next_row(dump: Dump) -> Ints:
    """Another row of the same batch for each row [R]."""
    batch = _row_batch(dump)
    order = np.lexsort((np.arange(dump.rows), batch))
    partner = np.empty(dump.rows, np.int64)
    partner[order] = np.roll(order, -1)
    return partner


def _row_batch(dump: Dump) -> Ints:
    batch = np.zeros(dump.rows, np.int64)
    batch[dump.row] = dump.batch
    return batch


def _of_row(dump: Dump, values: Floats, partner: Ints) -> Floats:
    """The value at the same place of each token's partner row [N]; NaN beyond its end."""
    rank = np.arange(dump.token_count) - dump.starts[dump.row]
    other = partner[dump.row]
    index = dump.starts[other] + rank
    inside = index < dump.starts[other + 1]
    out: Floats = np.where(inside, values[np.where(inside, index, 0)], np.nan)
    return out


def _packings(dump: Dump) -> list[tuple[str, Ints, Ints]]:
    """Words, order and batches of ways in which rows are often packed: all at once, and step by step."""
    length, index = np.diff(dump.starts), np.arange(dump.rows)
    orders = []
    for batch, where in ((np.zeros(dump.rows, np.int64), ""), (_row_batch(dump), " inside each step")):
        orders += [
            (f"longest first{where}", np.lexsort((index, -length, batch)), batch),
            (f"shortest first{where}", np.lexsort((index, length, batch)), batch),
            (f"in reverse{where}", np.lexsort((-index, batch)), batch),
        ]
    return orders


def _repacked(dump: Dump, values: Floats, order: Ints, batch: Ints) -> Floats:
    """What each token's value is if what is stored, batch by batch, is the rows' values in ``order`` [N]."""
    length = np.diff(dump.starts)
    begin = np.empty(dump.rows, np.int64)
    begin[order] = np.cumsum(length[order]) - length[order]
    rank = np.arange(dump.token_count) - dump.starts[dump.row]
    stream = values[np.argsort(batch[dump.row], kind="stable")]
    repacked: Floats = stream[begin[dump.row] + rank]
    return repacked


def _partners(dump: Dump, column: Column, batch: Ints) -> Fit:
    """For some rows the row of the same batch whose entropies fit best on every other token, judged on the rest.

    What they have to fit is the other policy's entropy where it is stored, for it is nearly theirs, else the surprisal.
    """
    other_entropy = dump.learner_entropy if column.name == "entropy" else dump.entropy
    reference = other_entropy if np.isfinite(other_entropy).mean() > 0.9 else column.surprisal
    entropies, targets = _padded(dump, column.entropy), _padded(dump, reference)
    rows = np.unique(np.linspace(0, dump.rows - 1, SEARCHED).astype(int))
    target, own, best = [], [], []
    for row in rows:
        near = np.flatnonzero(batch == batch[row])
        near = near[np.argsort(np.abs(near - row), kind="stable")][:CANDIDATES]
        partner = near[_errors(targets[row, ::2], entropies[near, ::2]).argmin()]
        target.append(targets[row, 1::2])
        own.append(entropies[row, 1::2])
        best.append(entropies[partner, 1::2])
    return compare(np.concatenate(target), np.concatenate(own), np.concatenate(best))


def _errors(surprisal: Floats, entropies: Floats) -> Floats:
    """Mean squared distance of one row's surprisals [W] from each candidate's entropies [C, W]."""
    there = np.isfinite(surprisal) & np.isfinite(entropies)
    gap = np.where(there, np.nan_to_num(surprisal) - np.nan_to_num(entropies), 0.0)
    count = there.sum(1)
    return np.where(count >= 3, (gap**2).sum(1) / np.maximum(count, 1), np.inf)


def _padded(dump: Dump, values: Floats) -> Floats:
    width = min(int(np.diff(dump.starts).max()), WIDTH)
    rank = np.arange(dump.token_count) - dump.starts[dump.row]
    out = np.full((dump.rows, width), np.nan)
    inside = rank < width
    out[dump.row[inside], rank[inside]] = values[inside]
    return out


def wrong_rewards(dump: Dump) -> Finding | None:
    """A12, its other half. Rewards order siblings other than the advantages do that were computed from them."""
    first = np.unique(dump.trajectory, return_index=True)[1]
    reward, advantage, group = dump.reward[first], dump.row_advantage[first], dump.group[first]
    known = np.isfinite(reward) & np.isfinite(advantage) & (group >= 0)
    reward, advantage, group = reward[known], advantage[known], group[known]
    order = np.argsort(group, kind="stable")
    reward, advantage, group = reward[order], advantage[order], group[order]
    same = opposite = 0
    for step in range(1, min(int(np.bincount(group).max(initial=0)), 64)):
        pair = group[step:] == group[:-step]
        agreement = np.sign(reward[step:] - reward[:-step]) * np.sign(advantage[step:] - advantage[:-step])
        same += int((agreement[pair] > 0).sum())
        opposite += int((agreement[pair] < 0).sum())
    if opposite < 5 or opposite < DISCORDANT * (same + opposite):
        return None
    share = opposite / (same + opposite)
    return Finding(
        "A12",
        f"Rewards are attached to the wrong rows: among siblings of one group, {share:.0%} of {same + opposite:,} "
        "pairs have "
        "the higher advantage where the reward is lower.",
        {"column": "reward", "pairs": same + opposite, "discordant": opposite},
    )
