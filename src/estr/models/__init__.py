"""Models: loading and builtin ones, conversations in tokens, the fused head, packed rows, engine precision.

Names are loaded on first use, so that importing one module of this room does not import transformers for another.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from estr.models.builtin import resolve_model as resolve_model
    from estr.models.conversation import Conversation as Conversation
    from estr.models.conversation import Extension as Extension
    from estr.models.forward import check_head as check_head
    from estr.models.forward import head_of as head_of
    from estr.models.forward import packed_hidden as packed_hidden
    from estr.models.forward import prepare_model as prepare_model
    from estr.models.head import Head as Head
    from estr.models.load import LoadedModel as LoadedModel
    from estr.models.load import apply_lora as apply_lora
    from estr.models.load import load_model as load_model
    from estr.models.load import load_tokenizer as load_tokenizer
    from estr.models.load import merged_state as merged_state
    from estr.models.load import parameter_names as parameter_names
    from estr.models.load import save_model as save_model
    from estr.models.precision import parse_dtype as parse_dtype
    from estr.models.precision import to_engine as to_engine
    from estr.models.stops import StopTexts as StopTexts

_HOME = {
    "builtin": ("resolve_model",),
    "conversation": ("Conversation", "Extension"),
    "forward": ("check_head", "head_of", "packed_hidden", "prepare_model"),
    "head": ("Head",),
    "load": (
        "LoadedModel",
        "apply_lora",
        "load_model",
        "load_tokenizer",
        "merged_state",
        "parameter_names",
        "save_model",
    ),
    "precision": ("parse_dtype", "to_engine"),
    "stops": ("StopTexts",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name in _MODULE:
        return getattr(importlib.import_module(f"estr.models.{_MODULE[name]}"), name)
    raise AttributeError(f"module 'estr.models' has no attribute {name!r}")
