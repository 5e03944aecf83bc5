"""A task whose environment runs whatever the model says as a Python program."""

from __future__ import annotations

from estr.environments.base import Reply
from estr.environments.sandbox import Limits, Sandbox
from loop_tasks import Echo, EchoEnvironment


class Code(Echo):
    name = "code"

    def environment(self) -> CodeEnvironment:
        return CodeEnvironment(self)


class CodeEnvironment(EchoEnvironment):
    blocking = True

    def step(self, text: str) -> Reply:
        result = Sandbox(Limits(seconds=20, memory_mb=128)).python(text)
        reply = super().step(text)
        return Reply(({"role": "tool", "content": result.status},), done=reply.done)
