"""A conversation in tokens: what the engine reads before each turn, without ever re-tokenizing what was sampled.

The tokens of a row are the prompt as the chat template renders it, then in turn the sampled ids exactly as sampled and
the *glue* around them: end-of-turn, the environment's messages, the next generation prompt. Glue is found in text: the
history is rendered with a sentinel behind the turn's content, and what follows the sentinel is encoded on its own.
Where the template now renders earlier text differently (one that drops earlier thinking), the row cannot go on: the
history forks and the whole new prompt starts another segment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from estr.environments.base import Message
from estr.errors import UsageError

_SENTINEL = "zqSENTINELqz"
_BREAK = "\ufdd0"  # a noncharacter: text is encoded piece by piece between them


@dataclass(frozen=True)
class Extension:
    """What follows a finished turn: ``tokens`` to append (never actions), or the whole new prompt where ``fork``."""

    tokens: list[int]
    fork: bool


class Conversation:
    """One conversation in the chat format of ``tokenizer``.

    Messages have the roles system, user, assistant, tool; a template without a tool role reads those as the user's,
    one without a system role reads that text at the head of the first user message. What a tool says is text: special
    tokens spelled out in it are encoded as ordinary characters. Raises `UsageError` where the template refuses the
    messages.
    """

    def __init__(self, tokenizer: Any, messages: Sequence[Message]) -> None:
        self._format = chat_format(tokenizer)
        self._messages = list(messages)
        self._text = self._format.render(self._messages)
        self.prompt_ids: list[int] = self._format.encode(self._text)

    @property
    def messages(self) -> list[Message]:
        """All messages so far; a conversation made from them goes on where this one stands."""
        return list(self._messages)

    @property
    def end_ids(self) -> frozenset[int]:
        """Every id that ends a turn."""
        return self._format.end_ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a turn, without end-of-turn and other special tokens."""
        return self._format.decode(ids)

    def extend(self, turn_ids: Sequence[int], turn_text: str, messages: Sequence[Message]) -> Extension:
        """Close the assistant turn ``turn_ids`` (whose text is ``turn_text``), add ``messages``, open the next turn.

        A template that only changes white space inside or around the turn just sampled does not fork it: the row
        keeps the ids as sampled. End-of-turn is part of the glue, so never an action, unless the policy sampled it.
        """
        before, after = self._split(turn_text, messages)
        self._messages += [{"role": "assistant", "content": turn_text}, *messages]
        rendered = self._format.render(self._messages)
        goes_on = (
            before.startswith(self._text)
            and _bare(before[len(self._text) :]) == _bare(turn_text)
            and _bare(rendered) == _bare(before + after)
        )
        self._text = rendered
        if not goes_on:
            return Extension(self._format.encode(rendered), fork=True)
        return Extension(self._format.encode_glue(self._without_sampled_end(turn_ids, after)), fork=False)

    def _split(self, turn_text: str, messages: Sequence[Message]) -> tuple[str, str]:
        """The next prompt, cut where the content of the turn just sampled ends."""
        sentinel = _sentinel_beside(turn_text, *(message["content"] for message in [*self._messages, *messages]))
        turn = {"role": "assistant", "content": turn_text + sentinel}
        before, found, after = self._format.render([*self._messages, turn, *messages]).partition(sentinel)
        return (before, after) if found else ("", "")

    def _without_sampled_end(self, turn_ids: Sequence[int], glue: str) -> str:
        last = turn_ids[-1] if len(turn_ids) else None
        if last not in self._format.end_ids:
            return glue
        return glue.removeprefix(self._format.token_text(last))


class ChatFormat:
    """What is fixed about a tokenizer's chat template: rendering, end-of-turn ids, which roles it knows."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tool_role = self._knows([_message("user"), _message("assistant"), _message("tool", _SENTINEL)])
        self._system_role = self._knows([_message("system", _SENTINEL), _message("user")])
        self.end_ids = frozenset(end_ids_of(tokenizer) | self._end_of_turn())
        specials = sorted(filter(None, map(self.token_text, special_ids(tokenizer))), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, specials)) or r"(?!)")

    def render(self, messages: Sequence[Message]) -> str:
        """The text of ``messages`` with a generation prompt."""
        adapted = [self._defused(message) if message["role"] == "tool" else message for message in messages]
        if not self._system_role:
            adapted = _fold_system(adapted)
        if not self._tool_role:
            adapted = [{**message, "role": "user"} if message["role"] == "tool" else message for message in adapted]
        try:
            return self._apply(adapted)
        except Exception as error:  # a template can raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise UsageError(f"the model's chat template refuses a conversation of {roles}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text that begins a row."""
        first, *others = text.split(_BREAK)
        return [*self._ids(first), *(token for piece in others for token in self._ids_behind(piece))]

    def encode_glue(self, text: str) -> list[int]:
        """Ids of rendered text that goes on with a row."""
        return [token for piece in text.split(_BREAK) for token in self._ids_behind(piece)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_text(self, token: int) -> str:
        return self._raw([token])

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _ids_behind(self, text: str) -> list[int]:
        """Ids of a text that stands behind other text: without the space some tokenizers put before a first word."""
        if not text:
            return []
        ids, anchor = self._ids(text), self._ids(".")
        if self._raw(anchor + ids) == "." + text:
            return ids
        anchored = self._ids("." + text)
        return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else ids

    def _defused(self, message: Message) -> Message:
        """The message with every special token that its text spells out broken in two."""
        text = message["content"].replace(_BREAK, "")
        return {**message, "content": self._specials.sub(lambda match: match[0][0] + _BREAK + match[0][1:], text)}

    def _raw(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _apply(self, messages: list[Message], prompt: bool = True) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

    def _knows(self, messages: list[Message]) -> bool:
        """Whether the template takes ``messages`` and shows the sentinel among them."""
        try:
            return _SENTINEL in self._apply(messages)
        except Exception:  # a template can raise anything
            return False

    def _end_of_turn(self) -> set[int]:
        """The special token that the template writes behind an assistant's content, if there is one."""
        try:
            text = self._apply([_message("user"), _message("assistant", _SENTINEL), _message("user")], prompt=False)
        except Exception:  # a template can raise anything
            return set()
        ids = self.encode_glue(text.partition(_SENTINEL)[2])
        return {ids[0]} & special_ids(self._tokenizer) if ids else set()


_FORMATS: WeakKeyDictionary[Any, tuple[str, ChatFormat]] = WeakKeyDictionary()


def chat_format(tokenizer: Any) -> ChatFormat:
    """The format of ``tokenizer``, worked out once for each template it carries."""
    template = str(tokenizer.chat_template)
    known = _FORMATS.get(tokenizer)
    if known is None or known[0] != template:
        known = _FORMATS[tokenizer] = (template, ChatFormat(tokenizer))
    return known[1]


def special_ids(tokenizer: Any) -> set[int]:
    """Ids that the tokenizer marks as special, whether or not they have a named role."""
    marked = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)


def end_ids_of(tokenizer: Any) -> set[int]:
    """End ids by declaration: the tokenizer's eos and those of the model's generation_config.json."""
    ends = _declared_ends(str(getattr(tokenizer, "name_or_path", "")))
    return set(ends) | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())


@lru_cache(maxsize=16)
def _declared_ends(directory: str) -> tuple[int, ...]:
    path = Path(directory) / "generation_config.json"
    if not directory or not path.is_file():
        return ()
    eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)


def _message(role: str, content: str = "x") -> Message:
    return {"role": role, "content": content}


def _fold_system(messages: list[Message]) -> list[Message]:
    """The same messages with the system text at the head of the first user message."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [_message("user", f"{system['content']}\n\n{rest[0]['content']}"), *rest[1:]]
    return [_message("user", system["content"]), *rest]


def _sentinel_beside(*texts: str) -> str:
    """A word that stands in none of ``texts``."""
    sentinel = _SENTINEL
    while any(sentinel in text for text in texts):
        sentinel += "q"
    return sentinel


def _bare(text: str) -> str:
    return "".join(text.split())
