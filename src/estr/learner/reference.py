"""The frozen reference model of a KL term."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from estr.learner.policy import Policy
from estr.models.forward import prepare_model


class Reference:
    """The weights a run started from: a model that is given, the base model under adapters, or a frozen copy."""

    def __init__(self, policy: Policy, given: nn.Module | None) -> None:
        model: Any = policy.model
        self._policy = policy
        self._adapted = model if given is None and hasattr(model, "disable_adapter") else None
        self.is_copy = given is None and self._adapted is None
        self.frozen: Policy | None = None
        if self._adapted is None:
            frozen = copy.deepcopy(model) if given is None else given
            prepare_model(frozen)
            frozen.requires_grad_(False)
            self.frozen = Policy(frozen, policy.temperature, policy.autocast)

    @contextmanager
    def weights(self) -> Iterator[Policy]:
        """The reference, ready to be scored."""
        if self.frozen is not None:
            yield self.frozen
            return
        assert self._adapted is not None
        with self._adapted.disable_adapter():
            yield self._policy
