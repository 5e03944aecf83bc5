"""Imported last by the process that engine processes are forked from: what a first load of a model builds once.

transformers compiles about a thousand patterns when it loads its first model, and imports what Qwen3 and Llama are made
of. An engine that is forked afterwards finds both, and is at work sooner in the place of one that died. Nothing here
starts a thread; where a version of transformers has none of it, the engine does it.
"""

from __future__ import annotations

import contextlib
import importlib

with contextlib.suppress(ImportError, AttributeError):
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen3")
for _name in ("auto.modeling_auto", "auto.tokenization_auto", "qwen3.modeling_qwen3", "llama.modeling_llama"):
    with contextlib.suppress(ImportError):
        importlib.import_module(f"transformers.models.{_name}")
