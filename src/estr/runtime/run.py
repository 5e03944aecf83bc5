"""A whole run: the loop that every schedule mode shares.

    fill ─▶ wait for a rollout batch ─▶ optimizer steps ─▶ publish ─▶ store ─▶ evaluate, checkpoint ─▶ again

Modes differ in the schedule's rules and in the pool behind it, never in this loop.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from estr.errors import EstrError
from estr.learner.results import BrokenWeights, StepResult, TrainedTrajectory
from estr.runtime.divergence import DIVERGED, Divergence
from estr.runtime.interrupts import Interrupted, Interrupts
from estr.runtime.reporter import Summary
from estr.runtime.setup import Parts
from estr.runtime.zero_signal import ZeroSignal
from estr.schedule import Group
from estr.storage.rollouts import Settlement
from estr.trajectory import Trajectory

_SPAN_AFTER = 10  # steps of start-up that the share of multi-version trajectories leaves out


class Run:
    """Drives the parts of one run from where they stand to ``run.steps``."""

    def __init__(self, parts: Parts, interrupts: Interrupts) -> None:
        self._p, self._interrupts = parts, interrupts
        self._config = parts.config
        self._step = parts.position.step
        self._evaluated = parts.position.evaluations
        self._zero_signal = ZeroSignal(parts.reporter.notice)
        self._spanning = self._counted = 0
        self._in_batch = self._owed = False
        self._left: list[Group] = []  # taken from the schedule, and the run ended before their minibatch

    # ------------------------------------------------------------------ the loop

    def go(self) -> Summary:
        """Run to the end.

        Raises:
            Interrupted: a signal asked to stop; a checkpoint was written.
            Divergence: too many steps in a row were skipped; a checkpoint was written unless the run may go back. Or a
                step broke the weights: they are nowhere, and what it trained counts as not trained.
            RunError: the run failed; a checkpoint was written where it stood between two rollout batches.
        """
        parts, config = self._p, self._config
        parts.reporter.start(parts.directory.path, self._step, config.run.steps)
        try:
            self._publish()
            self._make_up()
            while self._step < config.run.steps:
                self._interrupts.check()
                self._train_batch(self._collect())
                self._maybe_checkpoint()
            if self._owes_evaluation:
                self._interrupts.check()
        except BrokenWeights as error:
            raise Divergence(str(error), self._step + 1) from error
        except Divergence:
            if not parts.rollbacks.left:
                self._save_before_leaving(DIVERGED)
            raise
        except EstrError as error:
            self._save_before_leaving("interrupted" if isinstance(error, Interrupted) else "failed")
            raise
        return self._finish()

    def _collect(self) -> list[Group]:
        parts, version = self._p, self._p.learner.version
        parts.collecting = parts.schedule.next_group
        parts.journal.store_rows()  # written while the loop waits
        with parts.accounting.learner("wait", version):
            groups = parts.collector.next_batch(version)
        parts.collecting = None
        return groups

    def _train_batch(self, groups: Sequence[Group]) -> None:
        parts, self._in_batch = self._p, True
        results = iter(parts.learner.train([group.trajectories for group in groups]))
        trained: set[str] = set()
        for number in range(1, parts.steps_per_batch + 1):
            with parts.accounting.learner("train", parts.learner.version):
                result = next(results)
            self._publish()
            self._step += 1
            last = number == parts.steps_per_batch or self._step >= self._config.run.steps
            self._store(result, trained, refill=last and self._refills)
            self._report(result, boundary=last)
            if last:
                break
        self._in_batch = False
        self._end_if_diverged(result)
        self._left = [group for group in groups if group.forget(trained)]

    def _end_if_diverged(self, result: StepResult) -> None:
        if result.divergence is not None:
            self._p.learner.skipped_in_row = 0  # a resume has as many tries again
            raise Divergence(result.divergence, self._step)

    def _publish(self) -> None:
        parts = self._p
        if parts.published == parts.learner.version:
            return
        with parts.accounting.learner("publish", parts.learner.version):
            canary = parts.learner.canary(parts.canary_tokens)
            if not np.isfinite(canary).all():
                raise BrokenWeights(
                    f"the weights of version {parts.learner.version} give log-probabilities that are not finite "
                    f"(learning rate {self._config.learner.learning_rate:.3g})"
                )
            parts.pool.publish(parts.learner.version, parts.weights(), canary)
        parts.published = parts.learner.version

    @property
    def _refills(self) -> bool:
        """Whether engines are given new groups as soon as a step ends; other modes wait for the loop to come round."""
        return self._config.schedule.mode == "async" and self._step < self._config.run.steps

    def _store(self, result: StepResult, trained: set[str], *, refill: bool) -> None:
        """File the trajectories of this step that were not trained before, in one transaction with what came back
        meanwhile and what is issued next; their rows follow when the loop waits."""
        parts, rows = self._p, []
        for record in result.trajectories:
            trajectory = record.trajectory
            if trajectory.trajectory_id in trained:
                continue
            trained.add(trajectory.trajectory_id)
            self._count_span(trajectory)
            rows.append((trajectory, self._settlement(result, record)))
        for trajectory, reason in result.dropped:
            trained.add(trajectory.trajectory_id)
            rows.append((trajectory, self._passed_over(result, reason)))
        version = parts.learner.version if refill else None
        parts.collector.turn_over(lambda: parts.journal.trained(rows, self._step), version)

    def _settlement(self, result: StepResult, record: TrainedTrajectory) -> Settlement:
        if result.skipped:
            return Settlement("dropped", drop_reason=self._skipped(result))
        return Settlement(
            "trained",
            trained_step=self._step,
            target_version=result.target_version,
            advantage=record.advantage,
            token_advantage=record.token_advantage,
            learner_logprob=record.learner_logprob,
            learner_entropy=record.learner_entropy,
            proximal_logprob=record.proximal_logprob,
        )

    def _passed_over(self, result: StepResult, reason: str) -> Settlement:
        if result.skipped:
            return Settlement("dropped", drop_reason=self._skipped(result))
        return Settlement("dropped", drop_reason=reason, used=True)

    def _skipped(self, result: StepResult) -> str:
        return f"step {self._step} was skipped: {result.reason}"

    def _count_span(self, trajectory: Trajectory) -> None:
        if self._step > _SPAN_AFTER:
            self._counted += 1
            self._spanning += trajectory.intra_staleness > 0

    def _report(self, result: StepResult, *, boundary: bool) -> None:
        parts = self._p
        self._zero_signal.see(result)
        parts.accounting.trained(result.action_tokens)
        metrics = dict(result.metrics) | parts.collector.selection.metrics() | {"version": parts.learner.version}
        if not math.isnan(parts.collector.canary_error):
            metrics["engine/canary_error"] = parts.collector.canary_error
        if boundary and self._owes_evaluation:
            with contextlib.suppress(Interrupted):  # the loop sees it again, and a resume makes up for it
                metrics["eval/reward"] = self._evaluate()
        metrics |= parts.accounting.step()
        parts.metrics.write(self._step, metrics)
        for tracker in parts.trackers:
            tracker.log(self._step, metrics)
        parts.reporter.step(self._step, metrics)

    # ------------------------------------------------------------------ evaluation and checkpoints

    def _due(self, every: int) -> bool:
        """Whether a multiple of ``every`` lies in the rollout batch that has just ended."""
        steps = self._p.steps_per_batch
        return every > 0 and (
            self._step // every > (self._step - steps) // every or self._step >= self._config.run.steps
        )

    def _make_up(self) -> None:
        """What belongs to the step that the run stands at and is not there: it is new, or an earlier process was killed
        or interrupted before it."""
        if self._step == 0 and self._config.run.eval_every and not self._evaluated:
            reward = self._evaluate()
            self._p.reporter.notice(f"held-out reward before training: {reward:.3f}")
        elif self._step > 0 and self._owes_evaluation:
            self._p.metrics.amend(self._step, {"eval/reward": self._evaluate()})
        self._p.store.mark_best_of(self._evaluated)

    @property
    def _owes_evaluation(self) -> bool:
        """Whether this step, the last of its rollout batch, is to be evaluated and was not."""
        evaluated = bool(self._evaluated) and self._evaluated[-1][0] == self._step
        return self._due(self._config.run.eval_every) and not evaluated

    def _evaluate(self) -> float:
        parts = self._p
        assert parts.evaluator is not None
        with parts.accounting.learner("evaluate", parts.learner.version):
            evaluation = parts.evaluator.evaluate(parts.weights(), self._interrupts.check)
        self._evaluated.append((self._step, evaluation.mean))
        parts.directory_log.evaluation(self._step, evaluation)
        return evaluation.mean

    def _maybe_checkpoint(self) -> None:
        """One that is due amid skipped steps waits for an applied one: no rollback could use it."""
        self._owed |= self._due(self._config.run.checkpoint_every)
        if self._is_best():
            self._checkpoint("best")
            self._p.store.mark_best_of(self._evaluated)
        elif self._owed and not self._p.learner.skipped_in_row:
            self._checkpoint("periodic")

    def _is_best(self) -> bool:
        if not self._evaluated or self._evaluated[-1][0] != self._step or self._step == 0:
            return False
        return self._evaluated[-1][1] > max((r for s, r in self._evaluated[:-1] if s > 0), default=-math.inf)

    def _checkpoint(self, kind: str) -> Path:
        parts = self._p
        with parts.accounting.learner("checkpoint", parts.learner.version):
            path = parts.store.save(self._step, kind, self._evaluated, parts)
        self._owed = False
        return path

    def _save_before_leaving(self, kind: str) -> None:
        """A checkpoint on the way out; what went wrong before matters more than a failure to write it. None in the
        middle of a rollout batch, whose rest no resume could train: it goes back to the checkpoint before."""
        with contextlib.suppress(EstrError):
            if not self._in_batch and not self._p.store.has(self._step):
                self._checkpoint(kind)

    # ------------------------------------------------------------------ the end

    def _finish(self) -> Summary:
        parts = self._p
        parts.journal.unfinished([*self._left, *parts.schedule.outstanding], self._step)
        if not parts.store.has(self._step):
            self._checkpoint("final")
        rewards = [reward for _, reward in self._evaluated]
        summary = Summary(
            directory=parts.directory.path,
            steps=self._step,
            version=parts.learner.version,
            first_eval=rewards[0] if rewards else None,
            last_eval=rewards[-1] if rewards else None,
            best_eval=max(rewards, default=None),
            spanning_share=self._spanning / self._counted if self._counted else None,
            dropped=parts.journal.dropped_groups,
            skipped_steps=self._step - parts.learner.version,
            seconds=parts.accounting.elapsed,
        )
        parts.reporter.finish(summary)
        return summary
