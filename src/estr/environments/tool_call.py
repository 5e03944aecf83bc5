"""Tool calls as plain text: ``<calc>48/2</calc>`` inside an assistant turn."""

from __future__ import annotations

from dataclasses import dataclass

from estr.environments.arithmetic import calculate

OPEN = "<calc>"
CLOSE = "</calc>"


@dataclass(frozen=True)
class ToolCall:
    """A call in an assistant turn: ``expression`` is what stands inside, None where the call is malformed."""

    expression: str | None
    problem: str = ""  # why it is malformed, for the model
    start: int = 0  # index in the text where the call begins

    def answer(self) -> str:
        """What the tool says: a number or ``error: ...``. Never raises."""
        return f"error: {self.problem}" if self.expression is None else calculate(self.expression)


def find_call(text: str) -> ToolCall | None:
    """The first complete call, else the first malformed one, else None.

    One call a turn: the engine stops at ``</calc>``, so whatever follows it was not meant and is ignored.
    """
    start = text.find(OPEN)
    end = text.find(CLOSE, start + len(OPEN)) if start >= 0 else -1
    if start >= 0 and end >= 0:
        return ToolCall(text[start + len(OPEN) : end], start=start)
    if start >= 0:
        return ToolCall(None, "the call has no end tag", start)
    stray = text.find(CLOSE)
    return ToolCall(None, "the call has no start tag", stray) if stray >= 0 else None
