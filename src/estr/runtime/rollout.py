"""Episodes on an engine: conversations, tools and rewards around turns that the engine generates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from estr.engines.local import LocalEngine, Turn
from estr.environments.base import Environment, Reply, Task
from estr.environments.runner import EnvironmentFailure, Pending, score, start
from estr.errors import EstrError
from estr.models.conversation import Conversation
from estr.runtime.messages import Failed, Finished, Job
from estr.trajectory import Segment, Trajectory, derive_seed


@dataclass(frozen=True)
class EpisodeLimits:
    max_new_tokens: int
    max_turns: int
    tool_timeout: float


@dataclass
class _Episode:
    job: Job
    environment: Environment
    conversation: Conversation
    seed: int
    turns: int = 0
    segments: list[Segment] = field(default_factory=list)
    waiting: Pending | None = None
    last: Turn | None = None
    last_text: str = ""


class RolloutWorker:
    """Runs jobs on a local engine: submit, then tick until the results are there.

    ``clock`` is monotonic seconds. With ``wait_for_tools`` False artificial latency is skipped and blocking tools are
    waited for in place, so that what happens depends on nothing but the jobs (lockstep, evaluation).
    """

    def __init__(
        self,
        engine: LocalEngine,
        task: Task,
        tokenizer: object,
        limits: EpisodeLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait_for_tools: bool = True,
    ) -> None:
        self.engine, self.task, self.limits = engine, task, limits
        self._tokenizer = tokenizer
        self._clock, self._wait = clock, wait_for_tools
        self._episodes: dict[str, _Episode] = {}
        self._results: list[Finished | Failed] = []

    @property
    def running(self) -> int:
        return len(self._episodes)

    @property
    def idle(self) -> bool:
        """Whether only time can bring something to do."""
        return not self.engine.busy and not self._results

    def submit(self, job: Job) -> None:
        seed = derive_seed(job.run_seed, job.group, job.sibling, job.attempt)
        try:
            environment = self.task.environment()
            conversation = Conversation(self._tokenizer, environment.reset(job.problem, seed))
        except EstrError as error:
            self._results.append(Failed(job, str(error)))
            return
        except Exception as error:
            self._results.append(Failed(job, f"the environment's reset raised {type(error).__name__}: {error}"))
            return
        episode = _Episode(job, environment, conversation, seed)
        try:
            self.engine.start(
                job.key,
                conversation.prompt_ids,
                seed=self._turn_seed(episode),
                limit=self.limits.max_new_tokens,
                rule=job.window,
            )
        except ValueError as error:
            self._results.append(Failed(job, f"problem {job.problem.task_id}: {error}", final=True))
            return
        self._episodes[job.key] = episode

    def cancel_all(self) -> list[Job]:
        """Forget everything that runs; returns the jobs."""
        jobs = [episode.job for episode in self._episodes.values()]
        for key in list(self._episodes):
            self.engine.cancel(key)
        self._episodes.clear()
        return jobs

    def cancel_group(self, group: int) -> None:
        """Forget the trajectories of a group that was dropped."""
        for key in [key for key, episode in self._episodes.items() if episode.job.group == group]:
            self.engine.cancel(key)
            del self._episodes[key]

    def tick(self) -> list[Finished | Failed]:
        """Take tool replies that have come, make one engine step, hand out what finished."""
        for episode in [episode for episode in self._episodes.values() if episode.waiting is not None]:
            self._poll(episode)
        if self.engine.busy:
            for turn in self.engine.step():
                self._turn_ended(self._episodes[turn.key], turn)
        results, self._results = self._results, []
        return results

    def run_all(self) -> list[Finished | Failed]:
        """Tick until nothing runs."""
        results = self.tick()
        while self._episodes:
            if self.idle:
                time.sleep(0.001)
            results += self.tick()
        return results

    def _turn_seed(self, episode: _Episode) -> int:
        job = episode.job
        return derive_seed(job.run_seed, job.group, job.sibling, episode.turns, job.attempt)

    def _turn_ended(self, episode: _Episode, turn: Turn) -> None:
        episode.turns += 1
        episode.last = turn
        episode.last_text = episode.conversation.decode(turn.tokens)
        episode.waiting = start(
            episode.environment, episode.last_text, timeout=self.limits.tool_timeout, clock=self._clock
        )
        self._poll(episode)

    def _poll(self, episode: _Episode) -> None:
        assert episode.waiting is not None
        reply = episode.waiting.poll() if self._wait else episode.waiting.wait()
        if reply is None:
            return
        episode.waiting = None
        if isinstance(reply, EnvironmentFailure):
            self._fail(episode, reply.sentence)
        else:
            self._go_on(episode, reply)

    def _go_on(self, episode: _Episode, reply: Reply) -> None:
        assert episode.last is not None
        if episode.last.end != "stop" and not reply.done:
            self._finish(episode, "length")
        elif reply.done:
            self._finish(episode, "stop" if episode.last.end == "stop" else "length")
        elif episode.turns >= self.limits.max_turns:
            self._finish(episode, "turns")
        elif not self._next_turn(episode, reply):
            self._finish(episode, "length")

    def _next_turn(self, episode: _Episode, reply: Reply) -> bool:
        assert episode.last is not None
        key, seed, limit = episode.job.key, self._turn_seed(episode), self.limits.max_new_tokens
        extension = episode.conversation.extend(episode.last.tokens, episode.last_text, reply.messages)
        if not extension.fork:
            return self.engine.extend(key, extension.tokens, seed=seed, limit=limit)
        segment = self.engine.fork(key, extension.tokens, seed=seed, limit=limit)
        if segment is None:
            return False
        episode.segments.append(segment)
        return True

    def _finish(self, episode: _Episode, reason: str) -> None:
        reward = score(episode.environment)
        if isinstance(reward, EnvironmentFailure):
            self._fail(episode, reward.sentence)
            return
        job = episode.job
        segments = [*episode.segments, self.engine.release(job.key)]
        del self._episodes[job.key]
        self._results.append(
            Finished(
                Trajectory(
                    group=job.group,
                    sibling=job.sibling,
                    attempt=job.attempt,
                    task_id=job.problem.task_id,
                    prompt=job.problem.prompt,
                    seed=episode.seed,
                    segments=segments,
                    text=self._text(segments),
                    reward=reward,
                    finish_reason=reason,
                    turns=episode.turns,
                    forks=len(segments) - 1,
                    group_key=job.problem.task_id,
                )
            )
        )

    def _text(self, segments: list[Segment]) -> str:
        decode = self._tokenizer.decode  # type: ignore[attr-defined]
        return "\n".join(str(decode(segment.tokens.tolist(), skip_special_tokens=False)) for segment in segments)

    def _fail(self, episode: _Episode, reason: str) -> None:
        self.engine.cancel(episode.job.key)
        del self._episodes[episode.job.key]
        self._results.append(Failed(episode.job, f"problem {episode.job.problem.task_id}: {reason}"))
