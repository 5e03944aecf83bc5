"""Load a Hugging Face causal language model and its tokenizer, or say in one sentence why that is not possible."""

from __future__ import annotations

import importlib.util
import json
import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as logging_of_library

from estr.errors import MissingExtraError, UsageError
from estr.models.attention import NAME as ATTENTION
from estr.models.conversation import chat_format

log = logging.getLogger("estr.models")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
PLAIN_LAYERS = {"full_attention", "sliding_attention"}
HUB_TIMEOUT = 5.0
FALLBACK_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""What a model without a chat template (a base model) reads; a warning line says that it is used."""


@dataclass
class LoadedModel:
    """A causal language model with the attention implementation ``"estr"``, and its tokenizer with a chat template."""

    model: Any
    tokenizer: Any


def load_model(path: str | Path, dtype: str | torch.dtype, trust_remote_code: bool = False) -> LoadedModel:
    """The model and tokenizer of a local directory or hub name, the weights in ``dtype``.

    Weights are read from safetensors only. The model's own generation defaults (temperature, repetition penalty, ...)
    are set aside, whatever its generation_config.json says; end-of-turn ids there still count (`Conversation.end_ids`).
    Raises `UsageError` for everything that cannot work here.
    """
    directory = locate(path, trust_remote_code)
    config = load_config(directory, trust_remote_code)
    tokenizer = load_tokenizer(directory, trust_remote_code)
    _check_weights(directory)
    _check_architecture(directory, config)
    model = _load_weights(directory, config, dtype, trust_remote_code)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UsageError(f"{directory}: the tokenizer has {len(tokenizer)} ids, the model embeds only {rows}")
    model.generation_config = GenerationConfig(
        bos_token_id=config.get_text_config().bos_token_id,
        eos_token_id=sorted(chat_format(tokenizer).end_ids),
        pad_token_id=tokenizer.pad_token_id,
    )
    return LoadedModel(model, tokenizer)


def locate(path: str | Path, trust_remote_code: bool = False) -> Path:
    """The local directory of ``path``, downloaded from the hub where it is a hub name that is not here yet."""
    name = str(path)
    if not name.strip():
        raise UsageError("model.path is empty; give a model directory, a hub name, builtin:tiny or builtin:micro")
    directory = _expanded(name)
    if directory.is_dir():
        return directory
    if directory.exists():
        raise UsageError(f"model.path: {name} is a file; give the directory that holds config.json and the weights")
    if not is_hub_name(name):
        raise UsageError(f"model.path: there is no directory {name!r}")
    return _download(name, trust_remote_code)


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~somebody who has no home
        return Path(name)


def is_hub_name(path: str) -> bool:
    """Whether `locate` would look for ``path`` on the hub."""
    directory = _expanded(path)
    odd = directory.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1 or ":" in path
    return not (odd or not path.strip() or directory.exists())


def load_tokenizer(directory: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory, with `FALLBACK_TEMPLATE` where it has no chat template."""
    if not trust_remote_code and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise UsageError(f"{directory} has no tokenizer (tokenizer.json or the like); save one beside the model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # files of others can raise anything
        raise _explained(directory, "tokenizer", error) from error
    if not tokenizer.chat_template:
        _say_fallback(directory)
        tokenizer.chat_template = FALLBACK_TEMPLATE
    if not chat_format(tokenizer).end_ids:
        raise UsageError(f"{directory}: the tokenizer has no end-of-sequence token, so no turn could ever end")
    return tokenizer


@cache
def _say_fallback(directory: Path) -> None:
    """Once, and not again by engine processes."""
    if multiprocessing.parent_process() is None:
        log.warning("%s has no chat template; 'User: ... Assistant:' is used instead", directory)


def save_model(model: nn.Module, tokenizer: Any, directory: Path) -> None:
    """Write a Hugging Face model directory: weights (adapters merged) as safetensors, configuration, tokenizer."""
    base: Any = model.get_base_model() if is_lora(model) else model  # type: ignore[operator]
    with without_bars():
        base.save_pretrained(directory, state_dict=merged_state(model) if is_lora(model) else None)
    tokenizer.save_pretrained(directory)


def apply_lora(model: Any, rank: int, alpha: float, seed: int = 0) -> Any:
    """``model`` with trainable LoRA adapters of ``rank`` on every linear layer but the head (through peft).

    Scale ``alpha / rank``, no dropout, no bias; B starts at zero, so that the policy starts unchanged. All other
    weights are frozen. Raises `MissingExtraError` without peft.
    """
    if rank < 1:
        raise UsageError(f"model.lora_rank must be at least 1 to use adapters, not {rank}")
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("peft", "peft")
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of peft about itself
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def is_lora(model: nn.Module) -> bool:
    """Whether ``model`` carries adapters of `apply_lora`."""
    return hasattr(model, "peft_config")


def parameter_names(model: nn.Module) -> list[str]:
    """Names of the weights an engine needs, each once: tied weights under one name, adapters merged into theirs."""
    return [name for name, _, _ in _weights(model)]


@torch.no_grad()
def merged_state(model: nn.Module, chosen: Callable[[Tensor], bool] = lambda weight: True) -> dict[str, Tensor]:
    """Name to weight as the plain base model has them, detached; W + scale · B A where there is an adapter.

    Weights without an adapter are the parameters' own storage, not copies. Only the ``chosen`` ones are there.
    """
    state = {}
    for name, weight, layer in _weights(model):
        if not chosen(weight):
            continue
        delta = sum((layer.get_delta_weight(adapter) for adapter in layer.active_adapters), 0) if layer else 0
        state[name] = weight.detach() if layer is None else weight.detach() + delta
    return state


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """(name in the base model, weight, the LoRA layer that changes it or None) of every distinct parameter."""
    if not is_lora(model):
        yield from ((name, weight, None) for name, weight in model.named_parameters())
        return
    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    layers = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    for name, weight in base.named_parameters():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        layer = layers.get(owner) if leaf == "weight" else None
        yield name.replace(".base_layer.", "."), weight, layer


def _download(name: str, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", *(["*.py"] if trust_remote_code else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=HUB_TIMEOUT))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"model.path: {name!r} is no directory here and could not be had from the hub ({reason}); "
            "give a local model directory or builtin:tiny, or check the name and the network"
        ) from error


def load_config(directory: Path, trust_remote_code: bool) -> Any:
    path = directory / "config.json"
    if not path.is_file():
        kind = "a LoRA adapter; merge it into its base model first" if _is_adapter(directory) else "no model directory"
        raise UsageError(f"{directory} has no config.json: it is {kind}")
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # among them errors of strict dataclasses
        raise _explained(directory, "configuration", error) from error


def _check_weights(directory: Path) -> None:
    if any(directory.glob("*.safetensors")):
        return
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickled:
        raise UsageError(
            f"{directory} has its weights only as pickled files ({pickled[0]}), which can run code when they are read; "
            "convert them to safetensors"
        )
    raise UsageError(f"{directory} has no weights (model.safetensors)")


def _check_architecture(directory: Path, config: Any) -> None:
    """Refuse what is no causal model, or keeps a state that a plain key-value cache cannot hold."""
    if config.is_encoder_decoder:
        raise UsageError(f"{directory}: {config.model_type} is an encoder-decoder; choose a causal language model")
    text = config.get_text_config()
    mapped = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    odd = set(getattr(text, "layer_types", None) or ()) - PLAIN_LAYERS
    if odd or getattr(mapped, "_is_stateful", False):
        why = f"layers of {', '.join(sorted(odd))}" if odd else "a recurrent state"
        raise UsageError(
            f"{directory}: {config.model_type} has {why}, which no plain key-value cache holds; "
            "choose a model of full or sliding attention"
        )


def _load_weights(directory: Path, config: Any, dtype: str | torch.dtype, trust_remote_code: bool) -> Any:
    torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    try:
        with without_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=torch_dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                attn_implementation=ATTENTION,
                output_loading_info=True,
            )
    except Exception as error:
        raise _explained(directory, "model", error) from error
    absent = sorted(report["missing_keys"])
    if absent:
        raise UsageError(f"{directory}: the weights are incomplete, {len(absent)} are absent, the first is {absent[0]}")
    return model


def check_model_directory(directory: Path, trust_remote_code: bool = False) -> None:
    """Everything about a model directory that can be checked without reading its weights; raises `UsageError`."""
    config = load_config(directory, trust_remote_code)
    load_tokenizer(directory, trust_remote_code)
    _check_weights(directory)
    _check_architecture(directory, config)


def _explained(directory: Path, what: str, error: Exception) -> UsageError:
    reason = " ".join(str(error).split())
    if "trust_remote_code" in reason or "custom code" in reason:
        return UsageError(
            f"{directory}: the {what} needs Python code that comes with it; read that code, "
            "then set model.trust_remote_code = true to run it"
        )
    return UsageError(f"{directory}: the {what} cannot be loaded: {reason[:300]}")


def _is_adapter(directory: Path) -> bool:
    path = directory / "adapter_config.json"
    return path.is_file() and "peft_type" in json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def without_bars() -> Iterator[None]:
    """Without the library's own progress bars, which say nothing at these sizes."""
    shown = logging_of_library.is_progress_bar_enabled()
    logging_of_library.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging_of_library.enable_progress_bar()
