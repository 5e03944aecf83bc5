"""The presets of verl's rollout correction (verl/trainer/config/algorithm.py, rollout_corr_helper.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from estr.errors import nearest
from estr.objectives import gates, surrogates, weights
from estr.objectives.composition import Composition, Gate, Recipe, Weight
from estr.objectives.hyperparameters import Parameter, choice, flag
from estr.objectives.table.common import clip, dual_clip, ppo

GEOMETRIC = ("seq_mean_k1", "0.999_1.001")
K3 = ("seq_mean_k3", 0.01)
OPTIONS = tuple(
    f"{statistic}_{estimator}"
    for statistic in ("token", "seq_sum", "seq_mean", "seq_max")
    for estimator in ("k1", "k2", "k3")
    if (statistic, estimator) != ("seq_max", "k1")
)


@dataclass(frozen=True)
class Threshold(Parameter):
    """A positive number, or two as verl writes them: "0.5_5.0"."""

    def check(self, value: Any) -> Any:
        try:
            parts = [1.0] if value is None else [float(part) for part in str(value).split("_")]
        except ValueError:
            parts = []
        if len(parts) not in (1, 2) or not all(part > 0 for part in parts) or parts[0] > parts[-1]:
            raise ValueError(f"must be {self.allowed}, got {value!r}")
        return value


@dataclass(frozen=True)
class Rejections(Parameter):
    """Names of rejection statistics, separated by commas."""

    def check(self, value: Any) -> str:
        for name in _names(value):
            if name not in OPTIONS:
                raise ValueError(f"has no statistic {name!r}{nearest(name, OPTIONS)}")
        return str(value)


def _threshold(default: float | str | None) -> Parameter:
    return Threshold(default, 'a positive number or "lower_upper"')


def _names(value: Any) -> list[str]:
    return [] if value == "none" else [name.strip() for name in str(value).split(",")]


def _bounds(name: str, value: float | str | None) -> tuple[float | None, float]:
    """Lower (None where not given) and upper bound."""
    if value is None:
        raise ValueError(f"{name} needs {name}_threshold")
    parts = [float(part) for part in str(value).split("_")]
    return (parts[0] if len(parts) == 2 else None, parts[-1])


def _importance(edge: str, h: SimpleNamespace) -> tuple[tuple[Gate, ...], tuple[Weight, ...]]:
    """The gate and the weight of rollout_is; a "lower_upper" threshold drops instead of truncating (IcePop)."""
    if h.rollout_is == "none":
        return (), ()
    low, high = _bounds("rollout_is", h.rollout_is_threshold)
    weight = weights.ratio(edge, cap=high if low is None else None, scope=h.rollout_is)
    if h.rollout_is_batch_normalize:
        inside = (0.0, math.inf) if low is None else (low, high)
        weight = weights.normalized(weight, *inside, h.rollout_is, outside="zero")
    return (() if low is None else (gates.band(edge, low, high, h.rollout_is),)), (weight,)


def _rejection(edge: str, name: str, threshold: float | str | None) -> Gate:
    low, high = _bounds("rollout_rs", threshold)
    statistic, estimator = name.rsplit("_", 1)
    statistic = statistic.removeprefix("seq_")
    if estimator == "k1":  # the band is on -log r, so that of r is [1/high, 1/low]
        return gates.divergence(
            edge, "k1", statistic, -math.log(high) if low is None else math.log(low), math.log(high)
        )
    return gates.divergence(edge, estimator, statistic, -math.inf, high)


def _compose(mode: str) -> Callable[[SimpleNamespace], Composition]:
    edge = "B" if mode == "decoupled" else "E"

    def compose(h: SimpleNamespace) -> Composition:
        kept, factors = _importance(edge, h)
        rejected = tuple(_rejection(edge, name, h.rollout_rs_threshold) for name in _names(h.rollout_rs))
        if mode == "bypass_pg":
            return Composition(surrogates.policy_gradient(), kept + rejected, factors)
        return Composition(ppo("U" if mode == "decoupled" else "E", h), kept + rejected, factors)

    return compose


def _preset(
    name: str,
    description: str,
    importance: str = "none",
    threshold: float | str = 2.0,
    rejection: tuple[str, float | str] | None = None,
) -> Recipe:
    mode = next((m for m in ("bypass_ppo", "bypass_pg") if name.startswith(m)), "decoupled")
    statistic, limit = rejection or ("none", None)
    levels = [level for level in ("none", "token", "sequence") if level != importance]
    parameters: dict[str, Parameter] = {
        "rollout_is": choice(importance, *levels),
        "rollout_is_threshold": _threshold(threshold),
        "rollout_is_batch_normalize": flag(False),
        "rollout_rs": Rejections(statistic, "names of " + ", ".join(OPTIONS) + ", separated by commas, or 'none'"),
        "rollout_rs_threshold": _threshold(limit),
    }
    if mode != "bypass_pg":
        parameters |= {**clip(), **dual_clip(3.0)}
    edge, base = {
        "decoupled": ("B", "ppo(U, A)"),
        "bypass_ppo": ("E", "ppo(E, A)"),
        "bypass_pg": ("E", "(-A·log π)"),
    }[mode]
    mask = f"1[{statistic}({edge}) within {limit}]·" if rejection else ""
    weight = {"none": "", "token": f"w({edge})·", "sequence": f"w(prod_t {edge})·"}[importance]
    return Recipe(
        name=f"verl/{name}",
        description=description,
        formula=mask + weight + base,
        source="verl, RolloutCorrectionConfig." + name,
        confidence="framework code",
        parameters=parameters,
        compose=_compose(mode),
        denominator="kept" if rejection else "all",
        note="Rejection shrinks the denominators, as in verl. A k1 band is on -log of the ratio." if rejection else "",
    )


RECIPES = (
    _preset("decoupled_token_is", "Token importance weights truncated at 2, PPO on π/q.", "token"),
    _preset("decoupled_seq_is", "Sequence product of weights truncated at 2, PPO on π/q.", "sequence"),
    _preset("decoupled_token_icepop", "Token weights inside .5..5, dropped outside, PPO on π/q.", "token", "0.5_5.0"),
    _preset(
        "decoupled_seq_is_rs",
        "Sequence weights truncated at 2; sequences with a product outside .5..2 rejected.",
        "sequence",
        rejection=("seq_sum_k1", "0.5_2.0"),
    ),
    _preset("decoupled_geo_rs", "Sequences with a geometric mean ratio off by .1 % rejected.", rejection=GEOMETRIC),
    _preset("decoupled_geo_rs_seq_tis", "Geometric rejection and sequence weights.", "sequence", rejection=GEOMETRIC),
    _preset("decoupled_geo_rs_token_tis", "Geometric rejection and token weights.", "token", rejection=GEOMETRIC),
    _preset("decoupled_k3_rs", "Sequences with a mean k3 above .01 rejected.", rejection=K3),
    _preset("decoupled_k3_rs_seq_tis", "k3 rejection and sequence weights.", "sequence", rejection=K3),
    _preset("decoupled_k3_rs_token_tis", "k3 rejection and token weights.", "token", rejection=K3),
    _preset("bypass_ppo_clip", "PPO on π/μ; the ratio itself corrects."),
    _preset("bypass_ppo_clip_geo_rs", "PPO on π/μ with geometric rejection.", rejection=GEOMETRIC),
    _preset("bypass_ppo_clip_k3_rs", "PPO on π/μ with k3 rejection.", rejection=K3),
    _preset("bypass_pg_is", "Policy gradient with sequence weights of π/μ truncated at 2.", "sequence"),
    _preset("bypass_pg_geo_rs", "Policy gradient with geometric rejection on π/μ.", rejection=GEOMETRIC),
    _preset(
        "bypass_pg_geo_rs_seq_tis", "The same with sequence weights truncated at 2.", "sequence", rejection=GEOMETRIC
    ),
    _preset("bypass_pg_geo_rs_token_tis", "The same with token weights truncated at 2.", "token", rejection=GEOMETRIC),
    _preset("bypass_pg_token_icepop", "Policy gradient with π/μ inside .5..5, dropped outside.", "token", "0.5_5.0"),
    _preset("disabled", "No correction: PPO on π/q, metrics of the mismatch only."),
)
