"""Sample trajectories for the page: which to show, their tokens as text, and what each token carries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr.diagnostics import DEFAULTS, keep_mask
from estr.report.data import Floats, Run
from estr.report.decode import Decode, load_decoder, token_texts
from estr.report.rollouts import Rollouts, read_rows
from estr.report.staleness import run_staleness
from estr.report.verdict import Gate, own_gate

MOST_TOKENS = 1200  # shown of one row
MOST_CONTEXT = 4000  # characters of one stretch of prompt or tool text


@dataclass(frozen=True)
class Piece:
    """A stretch of a row: one action token (``index`` into the details), or prompt or tool text in one piece."""

    kind: str  # "action" | "prompt" | "tool"
    text: str
    index: int = -1
    uncertainty: int = 0  # percent, 1 − μ
    entropy: int = 0  # percent of the highest H shown
    age: int = 0  # percent, 0 the newest version of the trajectory, 100 the oldest
    dropped: bool = False
    unknown: bool = False  # the learner never saw it
    switch: bool = False  # first token of another version


@dataclass(frozen=True)
class Row:
    """One stored row (a segment) of a sample."""

    name: str
    pieces: Sequence[Piece]
    details: dict[str, list[Any]]
    left_out: int


@dataclass(frozen=True)
class Sample:
    """A trajectory with the reason it is shown and its facts."""

    why: str
    name: str
    facts: Sequence[tuple[str, str]]
    rows: Sequence[Row]


def pick_samples(run: Run) -> list[tuple[str, int]]:
    """(reason, trajectory) of up to five different trajectories: best, worst, median, most stale, most dropped."""
    rollouts = run.rollouts
    if not len(rollouts):
        return []
    first = rollouts.first_rows()
    reward = rollouts.columns["reward"][first].astype(np.float64)
    step = np.nan_to_num(rollouts.columns["trained_step"][first].astype(np.float64), nan=-1.0)
    tokens = np.bincount(rollouts.trajectory[rollouts.row], minlength=len(first))
    candidates = np.flatnonzero(tokens > 0)
    trained = candidates[step[candidates] >= 0]
    candidates = trained if len(trained) else candidates
    staleness = run_staleness(run)
    lag = np.nan_to_num(staleness.intra) + np.nan_to_num(staleness.inter)
    dropped = _dropped_share(run, own_gate(run), tokens)
    ranked = candidates[np.lexsort((step[candidates], np.nan_to_num(reward[candidates], nan=-np.inf)))]
    picks: dict[int, str] = {}
    _pick(picks, "best", ranked[::-1])
    _pick(picks, "worst", _latest_first(ranked, reward, step))
    _pick(picks, "median", _from_middle(ranked))
    _pick(picks, "most stale", candidates[np.lexsort((staleness.intra[candidates], lag[candidates]))][::-1])
    masked = candidates[dropped[candidates] > 0]
    _pick(picks, "most dropped", masked[np.lexsort((tokens[masked], dropped[masked]))][::-1])
    return [(why, trajectory) for trajectory, why in picks.items()]


def build_samples(run: Run) -> list[Sample]:
    """Samples ready for the template; token texts from the run's tokenizer, ids where there is none."""
    decode = load_decoder(run)
    gate = own_gate(run)
    return [_sample(run, why, trajectory, gate, decode) for why, trajectory in pick_samples(run)]


def _pick(picks: dict[int, str], why: str, ranked: NDArray[np.intp]) -> None:
    chosen = next((int(index) for index in ranked if int(index) not in picks), None)
    if chosen is not None:
        picks[chosen] = why


def _latest_first(ranked: NDArray[np.intp], reward: Floats, step: Floats) -> NDArray[np.intp]:
    """Lowest reward first; among equals the one trained last, which says most about the run's end."""
    return ranked[np.lexsort((-step[ranked], np.nan_to_num(reward[ranked], nan=np.inf)))]


def _from_middle(ranked: NDArray[np.intp]) -> NDArray[np.intp]:
    return ranked[np.argsort(np.abs(np.arange(len(ranked)) - (len(ranked) - 1) / 2), kind="stable")]


def _dropped_share(run: Run, gate: Gate, tokens: NDArray[np.intp]) -> Floats:
    """Share of its tokens that the gate drops, by trajectory [S]."""
    rollouts = run.rollouts
    seen = np.isfinite(rollouts.delta)
    keep = _keep(gate.recipe, gate.settings, rollouts)
    owner = rollouts.trajectory[rollouts.row]
    dropped = np.bincount(owner[seen & ~keep], minlength=len(tokens))
    return np.where(tokens >= 4, dropped / np.maximum(tokens, 1), 0.0)


def _keep(recipe: str, settings: dict[str, float], rollouts: Rollouts) -> NDArray[np.bool_]:
    tokens = rollouts.tokens
    return keep_mask(
        recipe,
        tokens["learner_logprob"],
        tokens["logprob"],
        tokens["entropy"],
        tokens["proximal_logprob"],
        rollouts.advantage,
        **settings,
    )


def _sample(run: Run, why: str, trajectory: int, gate: Gate, decode: Decode | None) -> Sample:
    indices = np.flatnonzero(run.rollouts.trajectory == trajectory).tolist()
    stored = read_rows(run.rollouts, indices)
    versions = [v for row in stored for v in row["version"] or [] if v is not None and v >= 0]
    span = (min(versions), max(versions)) if versions else (0, 0)
    rows = [_row(row, gate, decode, span) for row in stored]
    return Sample(why, str(stored[0]["trajectory_id"]), _facts(stored, span), rows)


def _facts(stored: Sequence[dict[str, Any]], span: tuple[int, int]) -> list[tuple[str, str]]:
    row = stored[0]
    versions = f"{span[0]}" if span[0] == span[1] else f"{span[0]} to {span[1]}"
    target = row["target_version"]
    facts = [
        ("reward", _short(row["reward"])),
        ("advantage", _short(row["advantage"])),
        ("sampled under version", versions),
        ("trained at version", _short(target)),
        ("finish", str(row["finish_reason"] or "–")),
        ("turns", _short(row["turns"])),
        ("task", str(row["task_id"] or "–")),
    ]
    if row["state"] and row["state"] != "trained":
        facts.append(("state", " ".join(filter(None, (str(row["state"]), str(row["drop_reason"] or ""))))))
    return facts


def _row(row: dict[str, Any], gate: Gate, decode: Decode | None, span: tuple[int, int]) -> Row:
    ids = [int(token) for token in row["tokens"] or []]
    shown = min(len(ids), MOST_TOKENS)
    ids, action = ids[:shown], [bool(flag) for flag in (row["action"] or [])[:shown]]
    texts = token_texts(ids, decode) if decode else [f"⟨{token}⟩" for token in ids]
    columns = {
        name: _column(row, name, shown) for name in ("logprob", "entropy", "learner_logprob", "proximal_logprob")
    }
    columns["advantage"] = _column(row, "token_advantage", shown)
    if np.isnan(columns["advantage"]).all() and row["advantage"] is not None:
        columns["advantage"] = np.full(shown, float(row["advantage"]))
    version = np.nan_to_num(_column(row, "version", shown), nan=-1).astype(int)
    keeps = {recipe: _row_keep(recipe, gate, columns) for recipe in DEFAULTS}
    pieces = _pieces(texts, action, columns, version, keeps[gate.recipe], span)
    chosen = [index for index, flag in enumerate(action) if flag]
    details = _details(chosen, ids, columns, version, keeps)
    return Row(str(row["trajectory_id"]), pieces, details, len(row["tokens"] or []) - shown)


def _row_keep(recipe: str, gate: Gate, columns: dict[str, Floats]) -> NDArray[np.bool_]:
    settings = gate.settings if recipe == gate.recipe else DEFAULTS[recipe]
    return keep_mask(
        recipe,
        columns["learner_logprob"],
        columns["logprob"],
        columns["entropy"],
        columns["proximal_logprob"],
        columns["advantage"],
        **settings,
    )


def _pieces(
    texts: Sequence[str],
    action: Sequence[bool],
    columns: dict[str, Floats],
    version: NDArray[np.int_],
    keep: NDArray[np.bool_],
    span: tuple[int, int],
) -> list[Piece]:
    pieces: list[Piece] = []
    context: list[str] = []
    known = columns["entropy"][np.isfinite(columns["entropy"])]
    highest = max(float(known.max()) if len(known) else 0.0, 1.0)
    count, last_version = 0, None
    for index, text in enumerate(texts):
        if not action[index]:
            context.append(text)
            continue
        _flush(context, pieces, count)
        seen = math.isfinite(columns["learner_logprob"][index]) and math.isfinite(columns["logprob"][index])
        pieces.append(
            Piece(
                kind="action",
                text=text,
                index=count,
                uncertainty=_percent(1.0 - math.exp(min(_or(columns["logprob"][index], 0.0), 0.0))),
                entropy=_percent(_or(columns["entropy"][index], 0.0) / highest),
                age=_percent((span[1] - version[index]) / max(span[1] - span[0], 1)),
                dropped=seen and not keep[index],
                unknown=not seen,
                switch=last_version is not None and version[index] != last_version,
            )
        )
        count, last_version = count + 1, version[index]
    _flush(context, pieces, count)
    return pieces


def _flush(context: list[str], pieces: list[Piece], actions: int) -> None:
    """Close a stretch of text the policy did not write: before its first token the prompt, later tool text."""
    if not context:
        return
    text = "".join(context)
    if len(text) > MOST_CONTEXT:
        text = f"{text[: MOST_CONTEXT // 2]} … {text[-MOST_CONTEXT // 2 :]}"
    pieces.append(Piece("tool" if actions else "prompt", text))
    context.clear()


def _details(
    chosen: Sequence[int],
    ids: Sequence[int],
    columns: dict[str, Floats],
    version: NDArray[np.int_],
    keeps: dict[str, NDArray[np.bool_]],
) -> dict[str, list[Any]]:
    """What the page tells of a token: columns over the row's action tokens, null where unknown."""
    verdict = np.sum([keeps[recipe].astype(int) << bit for bit, recipe in enumerate(DEFAULTS)], axis=0)
    return {
        "id": [ids[i] for i in chosen],
        "position": list(chosen),
        "mu": [_json(columns["logprob"][i]) for i in chosen],
        "pi": [_json(columns["learner_logprob"][i]) for i in chosen],
        "h": [_json(columns["entropy"][i]) for i in chosen],
        "version": [int(version[i]) for i in chosen],
        "keep": [int(verdict[i]) for i in chosen],
    }


def _column(row: dict[str, Any], name: str, length: int) -> Floats:
    values = row.get(name)
    out = np.full(length, np.nan)
    if values is not None and len(values) >= length:
        out[:] = [np.nan if value is None else value for value in values[:length]]
    return out


def _json(value: float) -> float | None:
    return round(float(value), 5) if math.isfinite(value) else None


def _or(value: float, default: float) -> float:
    return float(value) if math.isfinite(value) else default


def _percent(share: float) -> int:
    return round(100 * min(max(share, 0.0), 1.0))


def _short(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
