"""The frozen reference model of a KL term."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from estr.models.forward import prepare_model


class Reference:
    """The weights a run started from: a model that is given, the base model under adapters, or a frozen copy."""

    def __init__(self, model: Any, given: nn.Module | None) -> None:
        self._adapted = model if given is None and hasattr(model, "disable_adapter") else None
        self.is_copy = given is None and self._adapted is None
        self._frozen: nn.Module | None = None
        if self._adapted is None:
            self._frozen = copy.deepcopy(model) if given is None else given
            prepare_model(self._frozen)
            self._frozen.requires_grad_(False)

    @contextmanager
    def weights(self) -> Iterator[nn.Module]:
        """The reference, ready to be scored."""
        if self._frozen is not None:
            yield self._frozen
            return
        assert self._adapted is not None
        with self._adapted.disable_adapter():
            yield self._adapted
