"""Stop texts: whether a turn's ids have just completed one, for any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_REPLACEMENT = "\ufffd"  # what decoding puts for bytes that are no character yet
_BATCH = 8192


class StopTexts:
    """``texts`` that end a turn of ``tokenizer``'s ids, however they are cut into tokens.

    ``candidates`` is bool [V], True for every id that may complete a stop text: a cheap test for a sampler, after
    which `ends` decides. V counts all ids of the tokenizer, added ones included. Raises `ValueError` for an empty text.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        if not all(texts):
            raise ValueError("a stop text must not be empty")
        self.texts = tuple(dict.fromkeys(texts))
        self._tokenizer = tokenizer
        self._window = max((len(text.encode()) for text in self.texts), default=0) + 4
        self.candidates = self._find_candidates()

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether the text of ``ids`` holds a stop text that their last id completes.

        A last id that reaches beyond the stop text (``>\\n``) completes it too.
        """
        if not len(ids) or not self.candidates[ids[-1]]:
            return False
        tail = list(ids[-self._window :])
        now, before = self._text(tail), self._text(tail[:-1])
        return any(now.count(text) > before.count(text) for text in self.texts)

    def _find_candidates(self) -> Tensor:
        size = len(self._tokenizer)
        found = torch.zeros(size, dtype=torch.bool)
        if not self.texts:
            return found
        last = {text[-1] for text in self.texts} | {_REPLACEMENT}
        anchor = self._tokenizer.encode(".", add_special_tokens=False)
        cut = len(self._text(anchor))
        for start in range(0, size, _BATCH):
            rows = [[*anchor, token] for token in range(start, min(start + _BATCH, size))]
            texts = self._tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            found[start : start + len(rows)] = torch.tensor([not last.isdisjoint(text[cut:]) for text in texts])
        return found

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
