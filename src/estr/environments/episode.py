"""One episode of solving a problem with the calculator: assistant turns, tool replies, one final answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from estr.environments import tool_call, verify
from estr.environments.base import Message, Problem, Reply
from estr.environments.latency import Latency
from estr.environments.options import Option, flag, number

SHUFFLE_OPTIONS = {
    "shuffle_rewards": Option(False, "Control run: training rewards are coins that carry no information.", flag),
    "shuffled_mean": Option(0.4, "Share of coins that pay 1 in such a run.", number(0, 1)),
}
HELD_OUT = "eval"


def opening(prompt: str, instructions: str = "") -> list[Message]:
    """The messages an episode begins with: one of the user's, ``instructions`` before the problem."""
    return [{"role": "user", "content": f"{instructions}\n\n{prompt}" if instructions else prompt}]


@dataclass
class CalculatorEnvironment:
    """The calculator as a tool, then an exact numeric match as the verifier.

    A turn with a call is answered by a message of role ``tool``; a turn with ``#### n`` ends the episode; a turn
    with neither ends it with reward 0. Latency is only reported (`Reply.delay`); nothing here waits.

    ``shuffled_mean`` turns the reward of training problems into a coin that pays 1 with that probability. The coin
    is drawn from the episode's seed alone, so the reward is independent of everything the policy wrote; held-out
    problems (``info["split"] == "eval"``) keep their true reward, so that an evaluation still measures.
    """

    latency: Latency = field(default_factory=Latency)
    instructions: str = ""
    shuffled_mean: float | None = None
    blocking: bool = False
    stop: tuple[str, ...] = (tool_call.CLOSE,)

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        self._problem = problem
        self._seed = seed
        self._turn = 0
        self._final: str | None = None
        return opening(problem.prompt, self.instructions)

    def state(self) -> dict[str, Any]:
        """The number of turns so far and the text of the final answer, if there is one."""
        return {"turn": self._turn, "final": self._final}

    def restore(self, problem: Problem, seed: int, state: dict[str, Any]) -> None:
        self.reset(problem, seed)
        self._turn, self._final = int(state["turn"]), state["final"]

    def step(self, text: str) -> Reply:
        turn, self._turn = self._turn, self._turn + 1
        call = tool_call.find_call(text)
        said = text if call is None else text[: call.start]
        if verify.extract_answer(said) is not None:
            self._final = said
            return Reply(done=True)
        if call is None:
            return Reply(done=True)
        message = {"role": "tool", "content": call.answer()}
        return Reply((message,), delay=self.latency.draw(self._seed, turn))

    def reward(self) -> float:
        if self.shuffled_mean is not None and self._problem.info.get("split") != HELD_OUT:
            return float(random.Random(f"coin/{self._seed}").random() < self.shuffled_mean)
        return float(self._final is not None and verify.is_correct(self._final, self._problem.answer))
