"""Optional families around an optimizer step: reward shaping, token re-weighting, entropy regularizer, controllers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from estr.advantages import Reweighting, reweighting
from estr.batch import TokenBatch
from estr.config.sections import Config
from estr.controllers import EntropyRegularizer, StepController, controller, regularizer
from estr.errors import UsageError
from estr.shaping import ArbitraryEntropy, RewardShaping, selection, shaping
from estr.state import Stateful, finite_mean


@dataclass
class Prepared:
    """What the extensions make of a minibatch before its loss: advantages and entropy weights by micro-batch."""

    advantages: list[Tensor]
    entropy_weights: list[Tensor] | None
    metrics: dict[str, float]


@dataclass
class Extensions:
    """Shapings and controllers, any number in order, at most one re-weighting and one regularizer.

    Shapings change rewards before advantages, ``replacing`` puts trajectories of second rollouts in place of others;
    the rest act inside the optimizer step.
    """

    shapings: Sequence[RewardShaping] = ()
    reweighting: Reweighting | None = None
    regularizer: EntropyRegularizer | None = None
    controllers: Sequence[StepController] = ()
    replacing: ArbitraryEntropy | None = None

    @classmethod
    def of(cls, config: Config) -> Extensions:
        """Those that ``config`` names; raises UsageError for a name or an option that does not exist."""
        section, learner = config.objective, config.learner
        try:
            return cls(
                shapings=[shaping(name, **section.shaping_options.get(name, {})) for name in section.shaping],
                reweighting=None
                if section.reweighting == "none"
                else reweighting(section.reweighting, **section.reweighting_options),
                regularizer=None
                if section.regularizer == "none"
                else regularizer(section.regularizer, **section.regularizer_options),
                controllers=[
                    controller(name, **learner.controller_options.get(name, {})) for name in learner.controllers
                ],
                replacing=_replacing(config),
            )
        except ValueError as error:
            raise UsageError(f"[objective] or [learner] {error}") from None

    def extra_temperature(self) -> float:
        """What second rollouts are sampled at now; 0 where there are none."""
        return 0.0 if self.replacing is None else self.replacing.temperature

    @property
    def need_values(self) -> bool:
        """Whether log π and entropies of the whole minibatch must be known before its loss."""
        return self.reweighting is not None or self.regularizer is not None

    @property
    def needs_polarity(self) -> bool:
        """Whether the re-weighting reads Σ p² (log p + H) of the whole distribution."""
        return self.reweighting is not None and "correction" in self.reweighting.needs

    def prepare(self, batches: Sequence[TokenBatch], polarity: Sequence[Tensor] = ()) -> Prepared:
        """Advantages and entropy weights for the micro-batches ``batches`` of one optimizer step."""
        whole = TokenBatch.concatenate([batch.detach() for batch in batches])
        sizes = [batch.tokens for batch in batches]
        advantage, weights = whole.advantage, None
        metrics: dict[str, float] = {}
        assert whole.entropy is not None
        if self.reweighting is not None:
            metrics |= self.reweighting.observe(finite_mean(whole.entropy))
            part = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(advantage.device)
            available = {**vars(whole), "part": part, "correction": torch.cat(list(polarity)) if polarity else None}
            fields = {name: available[name] for name in self.reweighting.needs}
            advantage = self.reweighting.reweight(advantage, **fields)
        if self.regularizer is not None:
            assert whole.group is not None
            shared = {"sequence": whole.sequence, "group": whole.group}
            weight = self.regularizer.token_weight(reward=whole.reward, **shared)
            advantage = self.regularizer.advantage(advantage, entropy=whole.entropy, **shared)
            metrics |= self.regularizer.observe(whole.entropy, whole.sequence)
            weights = list(weight.split(sizes))
        return Prepared(list(advantage.split(sizes)), weights, metrics)

    def state(self) -> dict[str, Any]:
        """The JSON part of every extension's memory."""
        return {name: extension.state_dict() for name, extension in self._named().items()}

    def state_tensors(self) -> dict[str, Tensor]:
        """The tensors of every extension's memory, by ``<extension>/<name>``."""
        named = self._named().items()
        return {f"{name}/{key}": tensor for name, ext in named for key, tensor in ext.state_tensors().items()}

    def load_state(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take back what :meth:`state` and :meth:`state_tensors` gave."""
        for name, extension in self._named().items():
            extension.load_state_dict(state[name])
            prefix = f"{name}/"
            extension.load_state_tensors(
                {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            )

    def _named(self) -> dict[str, Stateful]:
        named: dict[str, Stateful | None] = {
            "reweighting": self.reweighting,
            "regularizer": self.regularizer,
            "replacing": self.replacing,
        }
        named |= {f"controller{number}": controller for number, controller in enumerate(self.controllers)}
        return {name: extension for name, extension in named.items() if extension is not None}


def _replacing(config: Config) -> ArbitraryEntropy | None:
    section = config.objective
    if section.selection == "none":
        return None
    rule = selection(section.selection, **section.selection_options)
    return rule if isinstance(rule, ArbitraryEntropy) else None  # dynamic sampling acts where groups come in
