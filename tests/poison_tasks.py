"""Environments that do to their process what they like; ``how`` says what, ``only`` in which problem."""

from __future__ import annotations

import os
import signal
import time

from estr.environments.base import Reply
from loop_tasks import Echo, EchoEnvironment


class Poison(Echo):
    name = "poison"

    def __init__(self, *, how: str = "", only: int = 1, turns: int = 1, blocking: bool = False) -> None:
        super().__init__(turns=turns)
        self.how, self.only, self.blocking = how, only, blocking

    def environment(self) -> PoisonEnvironment:
        return PoisonEnvironment(self)


class PoisonEnvironment(EchoEnvironment):
    def __init__(self, task: Poison) -> None:
        super().__init__(task)
        self.blocking = task.blocking

    def step(self, text: str) -> Reply:
        if self.problem.answer == self.task.only:
            getattr(self, self.task.how)()
        return super().step(text)

    def loop(self) -> None:
        while True:
            time.sleep(0.01)

    def flood(self) -> None:
        self.kept = [bytearray(1 << 26) for _ in range(1 << 8)]

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        os._exit(7)
