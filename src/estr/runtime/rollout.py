"""Episodes on an engine: conversations, tools and rewards around turns that the engine generates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, cast

from estr.engines.interface import Engine, Turn, TurnEnd
from estr.environments.base import Environment, Message, Reply, Restorable, Task
from estr.environments.runner import (
    EnvironmentFailure,
    Pending,
    start,
    start_reset,
    start_restore,
    start_reward,
    take_state,
)
from estr.errors import EstrError, asked_to_stop
from estr.models.conversation import Conversation, Extension
from estr.runtime.calls import Calls
from estr.runtime.messages import Failed, Finished, Job, KeptTurn, Progress
from estr.trajectory import Segment, Trajectory, derive_seed

Result = Finished | Failed | KeptTurn
EngineKind = TypeVar("EngineKind", bound=Engine)


@dataclass(frozen=True)
class EpisodeLimits:
    max_new_tokens: int
    max_turns: int
    tool_timeout: float


@dataclass
class _Episode:
    """One job's way: reset → (turn → reply)* → reward; ``waiting`` is what the environment owes."""

    job: Job
    seed: int
    environment: Environment
    waiting: Pending[Any] | None
    phase: Literal["reset", "restore", "reply", "reward"] = "reset"
    conversation: Conversation | None = None
    turns: int = 0
    segments: list[Segment] = field(default_factory=list)
    last: Turn | None = None
    last_text: str = ""
    progress: Progress | None = None  # where an earlier process left it
    left: Segment | None = None  # the open row that an earlier process left, until the engine has it
    at_work: bool = False  # its environment runs in a thread
    finish_reason: str = ""
    asked_at: float = 0.0  # when the environment was given the last turn
    resumed_at: list[int] = field(default_factory=list)


class RolloutWorker(Generic[EngineKind]):
    """Runs jobs on an engine: submit, then tick until the results are there.

    ``clock`` is monotonic seconds. With ``wait_for_tools`` False artificial latency is skipped and blocking tools are
    waited for in place, so that what happens depends on nothing but the jobs (lockstep, evaluation). ``calls`` is told
    whose environment is at work. With ``keep_progress`` every finished turn of a restorable environment is reported.
    """

    def __init__(
        self,
        engine: EngineKind,
        task: Task,
        tokenizer: Any,
        limits: EpisodeLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait_for_tools: bool = True,
        calls: Calls | None = None,
        keep_progress: bool = False,
    ) -> None:
        self.engine, self.task, self.limits = engine, task, limits
        self._tokenizer = tokenizer
        self._clock, self._wait = clock, wait_for_tools
        self._calls, self._keep_progress = calls or Calls(), keep_progress
        self._episodes: dict[str, _Episode] = {}
        self._results: list[Result] = []
        self._tool_seconds: list[float] = []

    @property
    def running(self) -> int:
        return len(self._episodes)

    @property
    def idle(self) -> bool:
        """Whether only time can bring something to do."""
        return not self.engine.busy and not self._results

    def submit(self, job: Job) -> None:
        seed = derive_seed(job.run_seed, job.group, job.sibling, job.attempt)
        with self._calls.during(job.key):
            try:
                environment = self.task.environment()
                episode = _Episode(job, seed, environment, None)
                self._wait_for(episode, self._opening(episode))
            except BaseException as error:
                if asked_to_stop(error):
                    raise
                self._results.append(Failed(job, f"making an environment raised {type(error).__name__}: {error}"))
                return
            self._episodes[job.key] = episode
            self._poll(episode)

    def _opening(self, episode: _Episode) -> Pending[Any]:
        about, limits = (
            (episode.environment, episode.job.problem, episode.seed),
            (self.limits.tool_timeout, self._clock),
        )
        if episode.job.kept is None or not isinstance(episode.environment, Restorable):
            return start_reset(*about, *limits)
        episode.phase = "restore"
        episode.progress = episode.job.kept.progress
        return start_restore(*about, episode.progress.environment, *limits)

    def cancel_all(self) -> list[Job]:
        """Forget everything that runs; returns the jobs."""
        jobs = [episode.job for episode in self._episodes.values()]
        for key in list(self._episodes):
            self.engine.cancel(key)
            self._stop_waiting(self._episodes.pop(key))
        return jobs

    def cancel_group(self, group: int) -> None:
        """Forget the trajectories of a group that was dropped."""
        for key in [key for key, episode in self._episodes.items() if episode.job.group == group]:
            self.engine.cancel(key)
            self._stop_waiting(self._episodes.pop(key))

    def tick(self) -> list[Result]:
        """Take tool replies that have come, make one engine step, hand out what finished."""
        for episode in list(self._episodes.values()):
            self._poll(episode)
        if self.engine.busy:
            for turn in self.engine.step():
                self._turn_ended(self._episodes[turn.key], turn)
        results, self._results = self._results, []
        return results

    def take_tool_seconds(self) -> list[float]:
        """How long each reply of an environment took since the last call, artificial delay included."""
        seconds, self._tool_seconds = self._tool_seconds, []
        return seconds

    def run_all(self) -> list[Result]:
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

    def _poll(self, episode: _Episode) -> None:
        if episode.waiting is None:
            return
        outcome = episode.waiting.poll() if self._wait else episode.waiting.wait()
        if outcome is None:
            return
        self._stop_waiting(episode)
        with self._calls.during(episode.job.key):
            if isinstance(outcome, EnvironmentFailure):
                self._fail(episode, outcome.sentence)
            elif episode.phase == "reset":
                self._begin(episode, outcome)
            elif episode.phase == "restore":
                self._restored(episode)
            elif episode.phase == "reply":
                if not outcome.done:
                    self._tool_seconds.append(self._clock() - episode.asked_at)
                self._go_on(episode, outcome)
            else:
                self._finish(episode, outcome)

    def _wait_for(self, episode: _Episode, pending: Pending[Any]) -> None:
        episode.waiting = pending
        if not pending.done:
            episode.at_work = True
            self._calls.begin(episode.job.key)

    def _stop_waiting(self, episode: _Episode) -> None:
        episode.waiting = None
        if episode.at_work:
            episode.at_work = False
            self._calls.end(episode.job.key)

    def _begin(self, episode: _Episode, messages: list[Message]) -> None:
        job = episode.job
        try:
            episode.conversation = Conversation(self._tokenizer, messages)
            self.engine.start(
                job.key,
                episode.conversation.prompt_ids,
                seed=self._turn_seed(episode),
                limit=self.limits.max_new_tokens,
                rule=job.window,
                explore=job.explore,
                heat=job.heat,
            )
        except (EstrError, ValueError) as error:
            self._fail(episode, str(error), final=True)
            return

    def _restored(self, episode: _Episode) -> None:
        """Take up an episode whose last turn had ended in an earlier process."""
        job, progress = episode.job, episode.progress
        assert progress is not None
        *episode.segments, episode.left = progress.trajectory.segments
        episode.resumed_at = [*progress.trajectory.resumed_at, progress.trajectory.turns]
        episode.turns = progress.trajectory.turns - 1
        episode.conversation = Conversation(self._tokenizer, progress.messages)
        tokens = episode.left.tokens[-progress.turn_tokens :].tolist()
        self._turn_ended(episode, Turn(job.key, tokens, cast(TurnEnd, progress.end)))

    def _turn_ended(self, episode: _Episode, turn: Turn) -> None:
        assert episode.conversation is not None
        episode.turns += 1
        episode.last = turn
        episode.phase, episode.asked_at = "reply", self._clock()
        with self._calls.during(episode.job.key):
            progress = self._progress(episode) if self._keep_progress else None
            if isinstance(progress, EnvironmentFailure):
                self._fail(episode, progress.sentence)
                return
            episode.last_text = episode.conversation.decode(turn.tokens)
            self._wait_for(
                episode, start(episode.environment, episode.last_text, self.limits.tool_timeout, self._clock)
            )
        self._poll(episode)
        if progress is not None and episode.phase == "reply" and episode.job.key in self._episodes:
            self._results.append(KeptTurn.of(progress))

    def _progress(self, episode: _Episode) -> Progress | EnvironmentFailure | None:
        """The episode before the environment answers; None where it can end here or cannot be restored."""
        assert episode.conversation is not None
        assert episode.last is not None
        state = take_state(episode.environment)
        if state is None or isinstance(state, EnvironmentFailure) or episode.last.end != "stop":
            return state if isinstance(state, EnvironmentFailure) else None
        row = episode.left if episode.left is not None else self.engine.peek(episode.job.key)
        trajectory = self._trajectory(episode, [*episode.segments, row])
        return Progress(
            trajectory, episode.conversation.messages, len(episode.last.tokens), episode.last.end, environment=state
        )

    def _go_on(self, episode: _Episode, reply: Reply) -> None:
        assert episode.last is not None
        if episode.last.end != "stop":
            self._judge(episode, "length")
        elif reply.done:
            self._judge(episode, "stop")
        elif episode.turns >= self.limits.max_turns:
            self._judge(episode, "turns")
        elif not self._next_turn(episode, reply):
            self._judge(episode, "length")

    def _judge(self, episode: _Episode, finish_reason: str) -> None:
        episode.finish_reason, episode.phase = finish_reason, "reward"
        self._wait_for(episode, start_reward(episode.environment, self.limits.tool_timeout, self._clock))
        self._poll(episode)

    def _next_turn(self, episode: _Episode, reply: Reply) -> bool:
        assert episode.last is not None
        assert episode.conversation is not None
        key, seed, limit = episode.job.key, self._turn_seed(episode), self.limits.max_new_tokens
        extension = episode.conversation.extend(episode.last.tokens, episode.last_text, reply.messages)
        if episode.left is not None:
            return self._hand_over(episode, extension)
        if not extension.fork:
            return self.engine.extend(key, extension.tokens, seed=seed, limit=limit)
        segment = self.engine.fork(key, extension.tokens, seed=seed, limit=limit)
        if segment is None:
            return False
        episode.segments.append(segment)
        return True

    def _hand_over(self, episode: _Episode, extension: Extension) -> bool:
        """Give the engine the row that an earlier process left, extended; False where there is no room for it."""
        job, row = episode.job, episode.left
        assert row is not None
        try:
            self.engine.start(
                job.key,
                extension.tokens,
                seed=self._turn_seed(episode),
                limit=self.limits.max_new_tokens,
                rule=job.window,
                explore=job.explore,
                heat=job.heat,
                history=None if extension.fork else row,
            )
        except ValueError:
            return False
        episode.left = None
        if extension.fork:
            episode.segments.append(row)
        return True

    def _finish(self, episode: _Episode, reward: float) -> None:
        key = episode.job.key
        row = episode.left if episode.left is not None else self.engine.release(key)
        del self._episodes[key]
        trajectory = self._trajectory(episode, [*episode.segments, row])
        trajectory.text, trajectory.reward = self._text(trajectory.segments), reward
        trajectory.finish_reason = episode.finish_reason
        self._results.append(Finished(trajectory))

    def _trajectory(self, episode: _Episode, segments: list[Segment]) -> Trajectory:
        """The episode so far."""
        job, problem = episode.job, episode.job.problem
        return Trajectory(
            group=job.group,
            sibling=job.sibling,
            attempt=job.attempt,
            task_id=problem.task_id,
            prompt=problem.prompt,
            seed=episode.seed,
            segments=segments,
            turns=episode.turns,
            forks=len(segments) - 1,
            group_key=problem.task_id,
            resumed_at=list(episode.resumed_at),
        )

    def _text(self, segments: list[Segment]) -> str:
        decode = self._tokenizer.decode
        return "\n".join(str(decode(segment.tokens.tolist(), skip_special_tokens=False)) for segment in segments)

    def _fail(self, episode: _Episode, reason: str, *, final: bool = False) -> None:
        self.engine.cancel(episode.job.key)
        del self._episodes[episode.job.key]
        self._results.append(Failed(episode.job, f"problem {episode.job.problem.task_id}: {reason}", final))
