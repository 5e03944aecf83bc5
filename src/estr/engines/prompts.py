"""Prefill shared between rows that begin with the same tokens: siblings of a group copy what one of them computed."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Holder(Protocol):
    """A row whose cache may begin with a known prompt."""

    index: int
    prompt: Any


class Prompt:
    """``length`` tokens that were prefilled as ``first``: their last hidden state [D], once it is known, and the rows
    whose cache begins with them."""

    def __init__(self, length: int, first: Holder) -> None:
        self.length = length
        self.hidden: Tensor | None = None
        self._holders = [first]
        first.prompt = self

    @property
    def last(self) -> Tensor:
        assert self.hidden is not None
        return self.hidden

    def source(self) -> Holder | None:
        """A row to copy from, as long as one that was filled from it still holds it."""
        while self._holders and self._holders[-1].prompt is not self:
            self._holders.pop()
        return self._holders[-1] if self._holders else None

    def add(self, holder: Holder) -> None:
        """``holder`` has got a copy."""
        holder.prompt = self
        self._holders.append(holder)


class Prompts:
    """What was prefilled under each version, by tokens; nothing outlives a version of the weights."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], Prompt] = {}

    def find(self, version: int, tokens: bytes) -> Prompt | None:
        """A prompt that some row still holds."""
        prompt = self._known.get((version, tokens))
        if prompt is not None and prompt.source() is None:
            del self._known[version, tokens]
            return None
        return prompt

    def add(self, version: int, tokens: bytes, prompt: Prompt) -> None:
        """Remember a prompt; those that nobody holds any more are forgotten."""
        self._known = {key: known for key, known in self._known.items() if known.source() is not None}
        self._known[version, tokens] = prompt

    def forget(self) -> None:
        """Forget everything: the weights are no longer those."""
        self._known.clear()
