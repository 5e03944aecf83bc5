"""The flat batch that objectives, advantages and diagnostics see: N action tokens and a sequence index."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from estr.errors import nearest, shown

_GRAPH = ("logprob", "entropy", "topk_logprob")  # fields that may carry the graph of the current policy
_TOKEN_FLOAT = (
    "logprob",
    "behavior_logprob",
    "behavior_entropy",
    "behavior_entropy_upper",
    "proximal_logprob",
    "proximal_entropy",
    "reference_logprob",
    "entropy",
)
_TOPK = ("topk_ids", "behavior_topk_logprob", "topk_logprob")
_SEQUENCE = ("group", "reward")
_INTEGER = ("version", "group", "topk_ids")


@dataclass(eq=False)
class TokenBatch:
    """N action tokens of S sequences; no padding, no prompt, no tool output.

    Shapes are checked strictly: a field of shape [N, 1] is refused, never broadcast. Floating types narrower than
    float32 are raised to it, float64 stays. Everything but ``logprob``, ``entropy`` and ``topk_logprob`` is detached.
    All log-probabilities and entropies are natural (nats), of the sampled token, after temperature.
    """

    logprob: Tensor  # [N] log π, carries the graph
    behavior_logprob: Tensor  # [N] log μ
    advantage: Tensor  # [N]; [S] is broadcast to the tokens
    sequence: Tensor  # int64 [N], non-decreasing, 0..S-1
    sequences: int | None = None  # S; default sequence.max() + 1
    behavior_entropy: Tensor | None = None  # [N] H of μ, or the lower end of an interval
    behavior_entropy_upper: Tensor | None = None  # [N] the upper end, where H is known as an interval only
    proximal_logprob: Tensor | None = None  # [N] log q
    proximal_entropy: Tensor | None = None  # [N] entropy of q
    reference_logprob: Tensor | None = None  # [N] log-probability under a frozen reference model
    entropy: Tensor | None = None  # [N] entropy of π, may carry a graph
    version: Tensor | None = None  # int64 [N] optimizer steps behind the weights that sampled the token
    target_version: int | None = None  # version of the learner that trains the batch
    group: Tensor | None = None  # int64 [S]
    reward: Tensor | None = None  # [S]
    topk_ids: Tensor | None = None  # int64 [N, K]
    behavior_topk_logprob: Tensor | None = None  # [N, K] log μ of those ids
    topk_logprob: Tensor | None = None  # [N, K] log π of those ids, may carry a graph
    advantage_scope: InitVar[str | None] = None  # "token" or "sequence", where N = S leaves it open

    def __post_init__(self, advantage_scope: str | None) -> None:
        for name in ("logprob", "behavior_logprob", "advantage", "sequence"):
            if getattr(self, name) is None:
                raise ValueError(f"a TokenBatch needs {name}")
        for name in _TOKEN_FLOAT + _TOPK + _SEQUENCE + ("advantage", "sequence", "version"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, _convert(name, value))
        self._check_tokens()
        self.sequences = self._count_sequences()
        self._check_sequences()
        self.advantage = self._token_advantage(advantage_scope)

    @property
    def tokens(self) -> int:
        """N, the number of action tokens."""
        return int(self.logprob.shape[0])

    @property
    def sequence_count(self) -> int:
        """S, the number of sequences, empty ones included."""
        return int(self.sequences or 0)

    @classmethod
    def from_padded(cls, mask: Tensor, **values: Any) -> TokenBatch:
        """Selects the action tokens of padded rows, row by row.

        ``mask`` is bool [B, T], True at action tokens. Token fields are [B, T], top-k fields [B, T, K],
        ``advantage`` is [B] or [B, T], ``group`` and ``reward`` are [B]. Row i becomes sequence i, empty or not.
        """
        mask = torch.as_tensor(mask)
        if mask.dim() != 2 or mask.is_floating_point():
            raise ValueError(f"mask must be bool [B, T], got {mask.dtype} {list(mask.shape)}")
        mask = mask.bool()
        _check_names(values)
        rows = torch.arange(mask.shape[0], device=mask.device)
        sequence = rows.unsqueeze(1).expand_as(mask)[mask]
        flat = {name: _select(name, value, mask, sequence) for name, value in values.items()}
        return cls(sequence=sequence, sequences=mask.shape[0], advantage_scope="token", **flat)

    @classmethod
    def concatenate(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """One batch of all sequences in order; an optional field must be given in all of ``batches`` or in none."""
        if not batches:
            raise ValueError("batches is empty; give at least one TokenBatch")
        joined: dict[str, Any] = {}
        for name in _TOKEN_FLOAT + _TOPK + _SEQUENCE + ("advantage", "version"):
            joined[name] = _join(name, [getattr(batch, name) for batch in batches])
        targets = {batch.target_version for batch in batches}
        if len(targets) > 1:
            raise ValueError(
                f"target_version differs between batches of one optimizer step: {sorted(map(str, targets))}"
            )
        offset, sequence = 0, []
        for batch in batches:
            sequence.append(batch.sequence + offset)
            offset += batch.sequence_count
        joined |= {"sequence": torch.cat(sequence), "sequences": offset, "target_version": targets.pop()}
        return cls(advantage_scope="token", **joined)

    def slice(self, start: int, stop: int) -> TokenBatch:
        """The sequences start..stop-1 as a batch of their own, with graph: one micro-batch."""
        first, last = torch.searchsorted(self.sequence, self.sequence.new_tensor([start, stop])).tolist()
        values: dict[str, Any] = {"target_version": self.target_version}
        for name in _TOKEN_FLOAT + _TOPK + ("advantage", "version"):
            value = getattr(self, name)
            values[name] = None if value is None else value[first:last]
        for name in _SEQUENCE:
            value = getattr(self, name)
            values[name] = None if value is None else value[start:stop]
        values |= {"sequence": self.sequence[first:last] - start, "sequences": stop - start}
        return TokenBatch(advantage_scope="token", **values)

    def detach(self) -> TokenBatch:
        """The same batch without graph."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _GRAPH:
            if values[name] is not None:
                values[name] = values[name].detach()
        copy = object.__new__(TokenBatch)
        copy.__dict__.update(values)
        return copy

    def _check_tokens(self) -> None:
        if self.logprob.dim() != 1:
            raise ValueError(f"logprob must have shape [N], got {list(self.logprob.shape)}")
        N = self.tokens
        for name in (*_TOKEN_FLOAT, "sequence", "version"):
            _check_shape(name, getattr(self, name), [N], self.logprob.device)
        given = [name for name in _TOPK if getattr(self, name) is not None]
        if given:
            first = getattr(self, given[0])
            if first.dim() != 2:
                raise ValueError(f"{given[0]} must have shape [{N}, K], got {list(first.shape)}")
            width = first.shape[-1]
            for name in given:
                _check_shape(name, getattr(self, name), [N, width], self.logprob.device)
        if self.target_version is not None:
            self.target_version = _whole("target_version", self.target_version)

    def _count_sequences(self) -> int:
        if self.sequences is not None:
            self.sequences = _whole("sequences", self.sequences)
        if self.tokens == 0:
            return self.sequences or 0
        steps = self.sequence.diff()
        falling = (steps < 0).any().to(torch.int64)
        first, last, broken = torch.stack([self.sequence[0], self.sequence[-1], falling]).tolist()
        if broken or first < 0:
            raise ValueError("sequence must be non-decreasing and start at 0 or above; sort the tokens by sequence")
        if self.sequences is None:
            return int(last) + 1
        if last >= self.sequences:
            raise ValueError(f"sequence holds index {last}, but sequences is {self.sequences}")
        return self.sequences

    def _check_sequences(self) -> None:
        for name in _SEQUENCE:
            _check_shape(name, getattr(self, name), [self.sequence_count], self.logprob.device)

    def _token_advantage(self, scope: str | None) -> Tensor:
        if scope not in (None, "token", "sequence"):
            raise ValueError(f'advantage_scope must be "token" or "sequence", got {scope!r}')
        N, S, given = self.tokens, self.sequence_count, list(self.advantage.shape)
        if given not in {"token": [[N]], "sequence": [[S]], None: [[N], [S]]}[scope]:
            raise ValueError(f"advantage must have shape [{N}] (per token) or [{S}] (per sequence), got {given}")
        if self.advantage.device != self.logprob.device:
            raise ValueError(f"advantage is on {self.advantage.device}, logprob on {self.logprob.device}")
        if scope is None and N == S and not bool((self.sequence == torch.arange(N, device=self.sequence.device)).all()):
            raise ValueError(
                f"advantage of shape [{N}] is ambiguous: there are as many tokens as sequences, and a sequence holds "
                'several; set advantage_scope to "token" or "sequence"'
            )
        per_sequence = scope == "sequence" or (scope is None and given == [S] and N != S)
        return self.advantage[self.sequence] if per_sequence else self.advantage


def _convert(name: str, value: Any) -> Tensor:
    tensor = _as_tensor(name, value)
    if name in _INTEGER or name == "sequence":
        if (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool) and tensor.numel():
            raise ValueError(f"{name} must hold integers, got {tensor.dtype}")
        return tensor.to(torch.int64)
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must hold floating-point numbers, got {tensor.dtype}")
    if not tensor.is_floating_point() or tensor.element_size() < 4:
        tensor = tensor.to(torch.float32)
    return tensor if name in _GRAPH else tensor.detach()


def _as_tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be a tensor or an array of numbers, got {shown(value)}") from error


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {shown(value)}") from None


def _check_shape(name: str, value: Tensor | None, shape: list[int], device: torch.device) -> None:
    if value is None:
        return
    if list(value.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {list(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, logprob on {device}; move them to one device")


def _check_names(values: dict[str, Any]) -> None:
    known = {field.name for field in fields(TokenBatch)} - {"sequence", "sequences"}
    for name in values:
        if name not in known:
            raise ValueError(f"unknown field {name!r} of TokenBatch.from_padded{nearest(name, known)}")
    for name in ("logprob", "behavior_logprob", "advantage"):
        if name not in values:
            raise ValueError(f"TokenBatch.from_padded needs {name}")


def _select(name: str, value: Any, mask: Tensor, sequence: Tensor) -> Any:
    if value is None or name == "target_version":
        return value
    tensor, rows = _as_tensor(name, value), list(mask.shape)
    if name in _TOPK and tensor.dim() != 3:
        raise ValueError(f"{name} must have shape [B, T, K], got {list(tensor.shape)}")
    if name in _SEQUENCE or (name == "advantage" and tensor.dim() == 1):
        _check_shape(name, tensor, rows[:1], mask.device)
        return tensor[sequence] if name == "advantage" else tensor
    _check_shape(name, tensor, rows + [tensor.shape[-1]] * (name in _TOPK), mask.device)
    return tensor[mask]


def _join(name: str, values: list[Tensor | None]) -> Tensor | None:
    given = [value for value in values if value is not None]
    if not given:
        return None
    if len(given) != len(values):
        raise ValueError(f"{name} is given in some batches of one optimizer step and missing in others")
    return torch.cat(given)
