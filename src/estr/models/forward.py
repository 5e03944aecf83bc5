"""Hidden states of packed rows, and the head that turns them into logits, for any causal language model.

A packed row is several token sequences end to end: ``tokens`` ``[T]`` and their boundaries ``cu_seqlens`` ``[S + 1]``.
Sequences may share tokens at their begin: ``read`` ``[V]`` then names the token that each of their V positions reads.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from estr.errors import UsageError
from estr.models import attention
from estr.models.head import Head

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_CHECK_LENGTHS = (5, 9, 3)


def prepare_model(model: nn.Module, gradient_checkpointing: bool = False) -> None:
    """Make ``model`` ready for packed rows: attention ``"estr"``, no dropout, so that π equals μ at equal weights.

    Everything is in evaluation mode; with gradient checkpointing only the checkpointed layers' own flag says training.
    Raises UsageError where the architecture does not take another attention implementation.
    """
    base = base_model(model)
    if base.config._attn_implementation != attention.NAME:
        if not base._supports_attention_backend:
            raise UsageError(f"{type(base).__name__} has attention code of its own, which cannot be replaced by 'estr'")
        base.set_attn_implementation(attention.NAME)
    model.eval()
    if gradient_checkpointing:
        enable = getattr(base, "activation_checkpointing_enable", base.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside ``model`` (itself, or what an adapter wraps)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def packed_hidden(
    model: nn.Module,
    tokens: Tensor,
    cu_seqlens: Tensor,
    autocast: torch.dtype | None = None,
    read: Tensor | None = None,
) -> Tensor:
    """Last hidden states ``[T, D]`` in float32 or wider, before the head; no sequence sees another.

    ``tokens`` int64 ``[T]``, ``cu_seqlens`` int ``[S + 1]`` from 0 to V; positions start at 0 in each sequence.
    ``read`` int64 ``[V]``: the token at each position of the sequences, where some begin with the same ones, which are
    then computed once (all that read a token do so at the same position of their sequence); by default V = T.
    """
    base = base_model(model)
    if base.config._attn_implementation != attention.NAME:
        raise UsageError("packed rows need the attention implementation 'estr'; call estr.models.prepare_model first")
    lengths = cu_seqlens.diff()
    total = len(tokens) if read is None else len(read)
    positions = torch.arange(total, device=tokens.device) - torch.repeat_interleave(
        cu_seqlens[:-1].long(), lengths.long(), output_size=total
    )
    bounds = cu_seqlens.to(torch.int32)
    layout = attention.packed_layout(bounds)
    if read is not None:
        layout = layout.sharing(read, len(tokens))
        positions = torch.empty_like(tokens).scatter_(0, read, positions)
    longest = int(lengths.max()) if len(lengths) else 0
    with torch.autocast(tokens.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        hidden = base.get_decoder()(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=_no_mask(tokens.device),
            use_cache=False,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=longest,
            max_length_k=longest,
            packed=layout,
        ).last_hidden_state[0]
    return hidden if hidden.dtype == torch.float64 else hidden.float()


def _no_mask(device: torch.device) -> Tensor:
    """A four-dimensional mask is passed through as it is, so that no model builds one of its own for ``[T, T]``."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def head_of(model: nn.Module) -> Head:
    """The head of ``model`` with what its configuration does to the logits; the weight is the parameter itself."""
    base = base_model(model)
    layer = base.get_output_embeddings()
    if layer is None or getattr(layer, "weight", None) is None:
        raise UsageError(f"{type(base).__name__} has no output embeddings; choose a causal language model")
    config = base.config.get_text_config()
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= getattr(config, name, None) or 1.0
    granite = getattr(config, "logits_scaling", None)
    if granite:  # Granite divides by it, HyperCLOVA X multiplies
        scale *= granite if "hyperclova" in config.model_type else 1.0 / granite
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(layer.weight, getattr(layer, "bias", None), scale, softcap)


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Compare packed rows and :func:`head_of` with the model's own logits on a few tokens.

    Raises UsageError where they do not agree: an unknown transformation of the logits, or layers that carry state
    from one packed sequence into the next.
    """
    base = base_model(model)
    config = base.config.get_text_config()
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise UsageError(f"{type(base).__name__} uses chunked attention, which packed rows do not support")
    head = head_of(model)
    device, vocabulary = head.weight.device, head.weight.shape[0]
    columns = sorted({0, vocabulary // 3, vocabulary // 2, vocabulary - 1})
    rows = [(torch.arange(n, device=device) * 7 + 3 + n) % vocabulary for n in _CHECK_LENGTHS]
    bounds = [0, *itertools.accumulate(_CHECK_LENGTHS)]
    hidden = packed_hidden(model, torch.cat(rows), torch.tensor(bounds, device=device))
    tolerance = 1e-3 if base.dtype == torch.float32 else 5e-2
    for i, row in enumerate(rows):
        expected = base(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(-1)[:, columns]
        got = _logprobs_at(head, hidden[bounds[i] : bounds[i + 1]], columns)
        if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance):
            raise UsageError(_disagreement(type(base).__name__, float((got - expected).abs().max()), alone=i == 0))


@torch.no_grad()
def can_share_prompts(model: nn.Module) -> bool:
    """Whether sequences may read a common begin once: true where attention alone carries one position to another."""
    device = next(model.parameters()).device
    vocabulary = base_model(model).get_input_embeddings().weight.shape[0]
    prompt, *answers = ((torch.arange(n, device=device) * 7 + 3 + n) % vocabulary for n in (5, 4, 9))
    rows = [torch.cat([prompt, answer]) for answer in answers]
    bounds = torch.tensor([0, *itertools.accumulate(map(len, rows))], device=device)
    read = torch.cat([torch.arange(9), torch.arange(5), torch.arange(9, 18)]).to(device)
    expected = packed_hidden(model, torch.cat(rows), bounds)
    try:
        got = packed_hidden(model, torch.cat([prompt, *answers]), bounds, read=read).index_select(0, read)
    except (RuntimeError, ValueError, IndexError):
        return False
    tolerance = 1e-3 if base_model(model).dtype == torch.float32 else 5e-2
    return torch.allclose(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def _logprobs_at(head: Head, hidden: Tensor, columns: list[int]) -> Tensor:
    """Log-probabilities ``[n, len(columns)]`` of a few tokens of the vocabulary."""
    targets = [torch.full((len(hidden),), column, device=hidden.device) for column in columns]
    return torch.stack([head.logprob_entropy(hidden, target)[0] for target in targets], -1).float()


def _disagreement(name: str, difference: float, alone: bool) -> str:
    if alone:
        cause = "its logits are not the output embeddings of the last hidden state with a known scale and soft cap"
    else:
        cause = "its layers let one packed sequence see another"
    return f"{name} cannot be trained here: {cause} (log-probabilities differ by {difference:.3g}); use another model"
