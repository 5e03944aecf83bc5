"""A task whose problems and openings are wrong in a way that is named."""

from typing import Any

from estr.environments import Message, Problem, Reply
from loop_tasks import Echo


class OddEnvironment:
    blocking = False
    stop = ()

    def __init__(self, how: str) -> None:
        self.how = how

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        text = "half \ud800" if self.how == "message" else problem.prompt
        return [] if self.how == "empty" else [{"role": "user", "content": text}]

    def step(self, text: str) -> Reply:
        return Reply(done=True)

    def reward(self) -> float:
        return 0.0


class Odd(Echo):
    def __init__(self, how: str = "none") -> None:
        super().__init__()
        self.how = how

    def train_problem(self, index: int) -> Any:
        problem = super().train_problem(index)
        return {"none": None, "prompt": Problem("x", "half \ud800")}.get(self.how, problem)

    def environment(self) -> Any:
        return OddEnvironment(self.how)
