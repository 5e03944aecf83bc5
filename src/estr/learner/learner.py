"""The learner: groups of trajectories in, optimizer steps out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from estr.advantages import AdvantageEstimator, advantage
from estr.config.sections import Config, ObjectiveConfig
from estr.controllers import effective_sample_size, sequence_log_weight
from estr.errors import RunError, UsageError
from estr.learner.extensions import Extensions
from estr.learner.metrics import finite_only, policy_entropy, reward_metrics, staleness_metrics
from estr.learner.minibatch import Minibatch
from estr.learner.packing import Columns, pack, unpack
from estr.learner.rank import Rank, Weights, under
from estr.learner.ranks import Others, Ranks
from estr.learner.replacing import put_in_place
from estr.learner.results import BrokenWeights, StepResult, TrainedTrajectory, aligned
from estr.learner.rollouts import Rollouts, minibatch_plan
from estr.learner.schedules import learning_rate
from estr.learner.step import Gradient, Seen
from estr.models.forward import head_of
from estr.objectives import Objective, find_recipe, objective
from estr.state import finite_mean
from estr.trajectory import Segment, Trajectory, derive_seed

_RECORDED = {
    "behavior_entropy",
    "proximal_logprob",
    "proximal_entropy",
    "reference_logprob",
    "entropy",
    "version",
    "target_version",
    "group",
    "reward",
}
_TOPK = {"topk_ids", "behavior_topk_logprob", "topk_logprob"}


class Learner:
    """Trains ``model`` in place on rollout batches.

    One rollout batch goes this way: rewards become advantages; where the recipe reads q, the weights at the start of
    the batch are scored as q; the groups are split into ``learner.minibatches`` parts, ``learner.epochs`` times; each
    part is one optimizer step of one or more micro-batches. ``version`` counts the steps that were applied.

    Where the recipe's proximal policy is an average of the weights (``ppo_ewma``), that average is kept here and scored
    before each step. ``extensions`` default to those that ``config`` names; their memory is part of :meth:`state`.

    ``reference`` is the frozen model of ``objective.kl_coef`` or of the recipe; without one, a copy of the starting
    weights is kept (with adapters: the base model, no copy). ``think_end`` is the token that ends thinking, where the
    tokenizer has one. ``others`` are the other ranks, where the weights are shared out between several processes.
    Raises UsageError where recipe, advantage or model cannot work together.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        *,
        reference: nn.Module | None = None,
        extensions: Extensions | None = None,
        think_end: int | None = None,
        others: Others | None = None,
    ) -> None:
        self.model, self.config, self._think_end = model, config, think_end
        self.version = 0
        self.skipped = 0
        self.skipped_in_row = 0
        self._held_back = False
        self.objective, self._estimator = methods(config, model)
        self.extensions = extensions or Extensions.of(config)
        own = Rank(
            model,
            config,
            self.objective,
            self.extensions.controllers,
            needs_reference=needs_reference(config),
            reference=reference,
            device=None if others is None else others.device,
        )
        self.ranks: Rank | Ranks = own if others is None else Ranks(own, others)
        self.device, self.optimizer = self.ranks.device, self.ranks.optimizer
        self._share = config.learner.share_prompts and own.can_share_prompts
        self._gradient = Gradient(self.ranks, self.objective, self.extensions)

    def train(self, groups: Sequence[Sequence[Trajectory]]) -> Iterator[StepResult]:
        """One rollout batch: yields after each optimizer step, before the next one begins.

        Raises BrokenWeights where a step has left weights that are not finite.
        """
        learner = self.config.learner
        rollouts, dropped = self._prepared(groups)
        seed = derive_seed(self.config.run.seed, "minibatches", self.version)
        plan = minibatch_plan(len(groups), learner.minibatches, learner.epochs, seed)
        self._freeze(rollouts, plan)
        for number, part in enumerate(plan):
            minibatch = Minibatch.of(
                rollouts, part, learner.tokens_per_microbatch, self.device, share=self._share, ranks=self.ranks.count
            )
            if self.ranks.average is not None:
                columns = self._columns("average", rollouts, minibatch.learning)
                rollouts.proximal_logprob, rollouts.proximal_entropy = columns
            result = self._step(minibatch, fresh=number == 0 and self._freezes_proximal)
            result.dropped, dropped = dropped, []
            yield result

    def canary(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """log π of ``tokens[1:]`` under the current weights at the rollout temperature, float32 [len - 1]."""
        ids = np.asarray(tokens, np.int32)
        action = np.arange(len(ids)) > 0
        nothing = np.zeros(len(ids), np.float32)
        segment = Segment(ids, action, nothing, nothing, np.zeros(len(ids), np.int32))
        ((logprob, _),) = self.ranks.score(pack([[segment]], len(ids), ranks=self.ranks.count), "policy")
        return logprob.float().cpu().numpy()

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's plain weights by name, each once: the parameters' own storage, of several ranks copies."""
        return self.ranks.weights()

    def trainable(self) -> Mapping[str, Tensor]:
        """The trainable weights (of adapters, those) by name of their parameter; copies of several ranks."""
        return self.ranks.trainable()

    def check(self) -> None:
        """Raises RunError where a rank has died."""
        self.ranks.check()

    def state(self) -> dict[str, Any]:
        """Counters and the extensions' memory, as JSON can hold them."""
        return {
            "version": self.version,
            "skipped": self.skipped,
            "skipped_in_row": self.skipped_in_row,
            "extensions": self.extensions.state(),
            **({} if self.ranks.average is None else {"average": self.ranks.average.state()}),
        }

    def state_tensors(self) -> dict[str, Tensor]:
        """Optimizer moments, the extensions' tensors and averaged weights by name; not the weights. No copies, but of
        several ranks, of which it is the whole."""
        extensions = {f"extension/{name}": tensor for name, tensor in self.extensions.state_tensors().items()}
        return {**extensions, **self.ranks.state_tensors()}

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` and :meth:`state_tensors` were taken; the model already holds those weights."""
        if state["version"] > 0 and self.ranks.reference is not None and self.ranks.reference.is_copy:
            raise RunError(
                "objective.kl_coef or the recipe needs the weights the run started from, but the model was loaded from "
                "a checkpoint; give the learner the starting model as its reference"
            )
        self.version, self.skipped, self.skipped_in_row = (
            int(state[name]) for name in ("version", "skipped", "skipped_in_row")
        )
        self.extensions.load_state(dict(state["extensions"]), under("extension/", tensors))
        self.ranks.load_state(state, tensors)

    # ------------------------------------------------------------------ one rollout batch

    def _prepared(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[Rollouts, list[tuple[Trajectory, str]]]:
        """The batch with its advantages, and what of it does not train because of second rollouts.

        Groups with second rollouts come first, so that all who change places are trained by the first minibatch.
        """
        rule, size = self.extensions.replacing, self.config.rollout.group_size
        if rule is None:
            return self._estimated(groups), []
        groups = sorted(groups, key=lambda group: len(group) <= size)
        rollouts = self._estimated([[t for t in group if t.sibling < size] for group in groups])
        second = [[t for t in group if t.sibling >= size] for group in groups]
        if not any(second):
            return rollouts, []
        return rollouts, put_in_place(rollouts, self._estimated([group for group in second if group]), rule)

    def _estimated(self, groups: Sequence[Sequence[Trajectory]]) -> Rollouts:
        rollouts = Rollouts.of(groups, self.config.learner)
        for shaping in self.extensions.shapings:
            rollouts.shape_rewards(shaping, self._think_end)
        try:
            rollouts.estimate(self._estimator, **self._estimator_fields(rollouts))
        except ValueError as error:
            raise RunError(f"objective.advantage: {error}") from error
        return rollouts

    @property
    def _freezes_proximal(self) -> bool:
        """Whether the recipe reads q and q is the weights at the start of the rollout batch."""
        reads = not self.objective.uses.isdisjoint(("proximal_logprob", "proximal_entropy"))
        return reads and self.ranks.average is None

    def _estimator_fields(self, rollouts: Rollouts) -> dict[str, Tensor]:
        if not self._estimator.needs:
            return {}
        chosen = range(len(rollouts.trajectories))
        norms, logprob = self.ranks.score_norms(rollouts.units(chosen))
        behavior = [s.logprob[s.action] for t in rollouts.trajectories for s in t.segments]
        flat = torch.from_numpy(np.concatenate([*behavior, np.zeros(0, np.float32)]))
        weight = sequence_log_weight(logprob, flat, rollouts.sequence, len(chosen))
        available = {"score_norm": norms, "log_weight": weight}
        return {name: available[name] for name in self._estimator.needs}

    def _freeze(self, rollouts: Rollouts, plan: list[list[int]]) -> None:
        """Score q and the reference once; the first step's q comes from its own pass, at the same weights."""
        if self._freezes_proximal:
            first = set(rollouts.of_groups(plan[0]))
            later = [i for i in rollouts.learning() if i not in first]
            rollouts.proximal_logprob, rollouts.proximal_entropy = self._columns("policy", rollouts, later)
        if self.ranks.reference is not None:
            rollouts.reference_logprob, _ = self._columns("reference", rollouts, rollouts.learning())

    def _columns(self, weights: Weights, rollouts: Rollouts, chosen: list[int]) -> tuple[Columns, Columns]:
        """log-probabilities and entropies of the chosen trajectories; empty for all others."""
        units = [t.segments if i in set(chosen) else [] for i, t in enumerate(rollouts.trajectories)]
        microbatches = pack(units, self.config.learner.tokens_per_microbatch, share=self._share, ranks=self.ranks.count)
        scored = self.ranks.score(microbatches, weights)
        logprob, entropy = unpack(units, microbatches, [a for a, _ in scored], [b for _, b in scored])
        return logprob, entropy

    # ------------------------------------------------------------------ one optimizer step

    def _step(self, minibatch: Minibatch, fresh: bool) -> StepResult:
        before, seen = self.version, Seen()
        applied: dict[str, float] = {}
        reason: str | None = "none of its action tokens takes part in the loss"
        if minibatch.learning:
            seen = self._gradient(minibatch, before, fresh, derive_seed(self.config.run.seed, "objective", before))
            applied, reason = self._apply(minibatch, seen, fresh)
        self.optimizer.zero_grad()
        trained = self._trained(minibatch, seen, fresh)
        return StepResult(
            version_before=before,
            version=self.version,
            target_version=before,
            skipped=reason is not None,
            reason=reason,
            divergence=self._count(reason, seen, applied),
            metrics=self._metrics(minibatch, seen, before) | finite_only(applied),
            trajectories=trained,
            action_tokens=minibatch.learning_tokens,
            read_tokens=sum(len(m.tokens) for m in minibatch.microbatches),
        )

    def _apply(self, minibatch: Minibatch, seen: Seen, fresh: bool) -> tuple[dict[str, float], str | None]:
        """Update the weights, or say why not; a gradient that is not finite never reaches them."""
        self._held_back = False
        norm = self.optimizer.gradient_norm()
        metrics = {"grad/norm": norm}
        if seen.metrics.get("tokens/invalid", 0) >= minibatch.learning_tokens > 0:
            return metrics, "all its action tokens are invalid: log-probabilities or entropies are not finite"
        if not math.isfinite(seen.loss):
            return metrics, f"its loss is {seen.loss}"
        if not math.isfinite(norm):
            return metrics, f"its gradient norm is {norm}"
        for number, controller in enumerate(self.extensions.controllers):
            metrics |= self.ranks.transform(number)
            if controller.skip:
                self._held_back = True
                return metrics, f"the controller {type(controller).__name__} asked for no step"
            norm = self.optimizer.gradient_norm()
        self.optimizer.clip(norm, self.config.learner.max_grad_norm)
        rate = learning_rate(self.version, self.config.run.steps, self.config.learner)
        rate *= self._rate_scale(minibatch, seen, fresh)
        self.optimizer.step(rate)
        if not self.optimizer.finite():
            raise BrokenWeights(
                f"the optimizer step at version {self.version} left weights that are not finite (loss {seen.loss:.3g}, "
                f"gradient norm {norm:.3g}, learning rate {rate:.3g})"
            )
        self.ranks.update_average()
        if self.extensions.replacing is not None:
            metrics |= self.extensions.replacing.observe(finite_mean(-torch.cat(seen.logprob)))
        self.version += 1
        return metrics | {"learner/learning_rate": rate}, None

    def _rate_scale(self, minibatch: Minibatch, seen: Seen, fresh: bool) -> float:
        """What controllers multiply the learning rate by; importance weights are q/μ, or π/μ where q is not known."""
        if not self.extensions.controllers:
            return 1.0
        proximal = seen.logprob if fresh or not self._freezes_proximal else minibatch.proximal_logprob()
        weights = [
            sequence_log_weight(logprob, m.behavior_logprob, m.sequence, len(m.units))
            for logprob, m in zip(proximal, minibatch.microbatches, strict=True)
        ]
        statistics = effective_sample_size(torch.cat(weights))
        return math.prod(c.scale_learning_rate(statistics) for c in self.extensions.controllers)

    def _count(self, reason: str | None, seen: Seen, applied: Mapping[str, float]) -> str | None:
        """Keep count of skipped steps; a diagnosis once there are too many in a row."""
        if reason is None:
            self.skipped_in_row = 0
            return None
        if self._held_back:  # a controller's choice is no sign of divergence
            self.skipped += 1
            return None
        self.skipped += 1
        self.skipped_in_row += 1
        if self.skipped_in_row < self.config.learner.max_skipped_steps:
            return None
        rate = learning_rate(self.version, self.config.run.steps, self.config.learner)
        invalid, deviation = seen.metrics.get("tokens/invalid", 0), seen.metrics.get("mismatch/delta_abs", math.nan)
        return (
            f"{self.skipped_in_row} optimizer steps in a row were skipped at version {self.version}, the last because "
            f"{reason} (loss {seen.loss:.3g}, gradient norm {applied.get('grad/norm', 0.0):.3g}, {invalid:.0f} invalid "
            f"tokens, mean |log π − log μ| {deviation:.3g}, learning rate {rate:.3g})"
        )

    def _metrics(self, minibatch: Minibatch, seen: Seen, target_version: int) -> dict[str, float]:
        return finite_only(
            {
                **seen.metrics,
                **policy_entropy(seen.entropy),
                **staleness_metrics(minibatch.trajectories, target_version),
                **reward_metrics(minibatch.trajectories),
                "tokens/action": minibatch.token_count,
                "tokens/truncated": minibatch.token_count - minibatch.learning_tokens,
                "learner/skipped": self.skipped,
            }
        )

    def _trained(self, minibatch: Minibatch, seen: Seen, fresh: bool) -> list[TrainedTrajectory]:
        """What was seen of each trajectory; the first step's own log π becomes q of its trajectories."""
        rollouts = minibatch.rollouts
        logprob, entropy, advantage = minibatch.by_trajectory(seen.logprob, seen.entropy, seen.advantage)
        if fresh:
            rollouts.set_proximal(logprob, entropy)
        by_token = rollouts.token_advantage is not None or self.extensions.need_values
        trained = []
        for i in minibatch.members:
            trajectory = rollouts.trajectories[i]
            record = TrainedTrajectory(trajectory, rollouts.advantage_of(i))
            if rollouts.learns[i]:
                record.learner_logprob = aligned(trajectory.segments, logprob[i])
                record.learner_entropy = aligned(trajectory.segments, entropy[i])
                if by_token:
                    record.token_advantage = aligned(trajectory.segments, advantage[i])
                if rollouts.proximal_logprob is not None:
                    record.proximal_logprob = aligned(trajectory.segments, rollouts.proximal_logprob[i])
            trained.append(record)
        return trained


def needs_reference(config: Config) -> bool:
    """Whether training reads log-probabilities of the weights the run started from."""
    section = config.objective
    return section.kl_coef > 0 or "reference_logprob" in objective(section.recipe, **section.hyperparameters()).uses


def methods(config: Config, model: nn.Module) -> tuple[Objective, AdvantageEstimator]:
    section = config.objective
    try:
        chosen = objective(section.recipe, **_with_vocabulary(section, model))
        estimator = advantage(section.advantage, **section.advantage_options)
    except ValueError as error:
        raise UsageError(f"[objective] {error}") from None
    recorded = _RECORDED | (_TOPK if config.rollout.topk_logprobs else set())
    absent = sorted(chosen.needs - recorded)
    if absent:
        raise UsageError(
            f"objective.recipe: the recipe {section.recipe!r} needs {', '.join(absent)}, which rollouts do not record; "
            "choose another recipe"
        )
    return chosen, estimator


def _with_vocabulary(section: ObjectiveConfig, model: nn.Module) -> dict[str, Any]:
    """The hyperparameters, with the model's vocabulary where the recipe asks for one and it is left at its default."""
    given = section.hyperparameters()
    defaults = find_recipe(section.recipe).hyperparameters
    if "vocabulary" in defaults and given.get("vocabulary", defaults["vocabulary"]) == defaults["vocabulary"]:
        given["vocabulary"] = int(head_of(model).weight.shape[0])
    return given
