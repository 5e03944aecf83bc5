"""Supervised warm-up of a builtin model on a task's demonstrations.

Each demonstration is laid out in tokens exactly as a rollout would be (`Conversation`), and the loss is the mean
negative log-likelihood of the tokens that the policy would have sampled: the assistant's, never the user's, the
tool's or the template's. A killed warm-up goes on from its last checkpoint and ends with the same weights.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from estr.environments.base import Message, Task
from estr.errors import UsageError
from estr.models.conversation import Conversation
from estr.models.forward import head_of, packed_hidden, prepare_model
from estr.models.muon import Muon
from estr.models.tokenizer import CONTEXT
from estr.trajectory import derive_seed

Progress = Callable[[int, int, float], None]
"""Called after each step with (steps done, steps in all, loss in nats per token)."""
CHECKPOINT_SECONDS = 10.0
_STATE = "state.safetensors"


@dataclass(frozen=True)
class WarmupConfig:
    """``steps`` batches of about ``tokens`` tokens under a rate that rises linearly, then falls as a cosine to
    ``floor`` of the peak. Muon for the matrices inside, at ``learning_rate``; AdamW for embeddings and vectors."""

    steps: int
    tokens: int = 2048
    learning_rate: float = 0.015
    warmup: float = 0.05
    floor: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.05
    embedding_learning_rate: float = 4e-3
    beta1: float = 0.9
    beta2: float = 0.98
    max_grad_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One row of tokens and which of them the policy would have sampled."""

    tokens: list[int]
    action: list[bool]


def warm_up(
    model: nn.Module,
    tokenizer: Any,
    task: Task,
    config: WarmupConfig,
    workplace: Path,
    progress: Progress | None = None,
    checkpoint_seconds: float | None = None,
) -> float:
    """Train ``model`` (float32) in place on one thread; the mean loss of the last tenth of the steps.

    Checkpoints go to ``workplace`` every ``checkpoint_seconds`` (`CHECKPOINT_SECONDS`); a later call with the same
    arguments goes on from there. ``progress`` None reports on stderr. Raises `UsageError` where the task has no
    demonstrations.
    """
    prepare_model(model)
    run = _Run(model, config, workplace)
    stream = itertools.islice(demonstrations(task, config.seed), run.consumed, None)
    stop = tuple(task.environment().stop)
    interval = CHECKPOINT_SECONDS if checkpoint_seconds is None else checkpoint_seconds
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _reporting(progress) as report:
            saved = time.monotonic()
            while run.step < config.steps:
                rows, used = _next_batch(stream, tokenizer, stop, config.tokens)
                run.train(rows, used)
                report(run.step, config.steps, run.losses[-1])
                if time.monotonic() - saved >= interval:
                    run.save()
                    saved = time.monotonic()
    finally:
        torch.set_num_threads(threads)
    tail = run.losses[-max(1, config.steps // 10) :]
    return sum(tail) / len(tail) if tail else math.nan


def demonstrations(task: Task, seed: int) -> Iterator[list[Message]]:
    """The task's demonstrations, over and over under derived seeds where the task's stream ends."""
    for epoch in itertools.count():
        found = False
        for messages in task.demonstrations(derive_seed(seed, epoch) if epoch else seed):
            found = True
            yield messages
        if not found:
            raise UsageError(f"task {task.name!r} has no demonstrations to warm up on; set model.warmup_steps = 0")


def demonstration_rows(tokenizer: Any, messages: Sequence[Message], stop: Sequence[str]) -> list[Row]:
    """A demonstration in tokens: one row, or several where the chat template forks the history.

    A turn's actions are its content and the end-of-turn token, which is left to the template where the content ends
    with a stop text, because there the engine stops before it.
    """
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    talk = Conversation(tokenizer, messages[:first])
    rows = [Row(list(talk.prompt_ids), [False] * len(talk.prompt_ids))]
    while first < len(messages):
        after = next((i for i in range(first + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        turn = _turn_ids(tokenizer, messages[first]["content"], stop)
        rows[-1].tokens.extend(turn)
        rows[-1].action.extend([True] * len(turn))
        if after < len(messages):
            glue = talk.extend(turn, messages[first]["content"], messages[first + 1 : after])
            if glue.fork:
                rows.append(Row([], []))
            rows[-1].tokens.extend(glue.tokens)
            rows[-1].action.extend([False] * len(glue.tokens))
        first = after
    return rows


def _turn_ids(tokenizer: Any, text: str, stop: Sequence[str]) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if text.endswith(tuple(stop)) else [*ids, tokenizer.eos_token_id]


def _next_batch(
    stream: Iterator[list[Message]], tokenizer: Any, stop: Sequence[str], tokens: int
) -> tuple[list[Row], int]:
    """Rows of at least ``tokens`` tokens together, and the number of demonstrations they took."""
    rows: list[Row] = []
    used = 0
    while sum(len(row.tokens) for row in rows) < tokens:
        fresh = demonstration_rows(tokenizer, next(stream), stop)
        rows += [row for row in fresh if len(row.tokens) <= CONTEXT and any(row.action)]
        used += 1
    return rows, used


class _Run:
    """Model, optimizers and place in the stream of demonstrations; everything that a checkpoint holds."""

    def __init__(self, model: nn.Module, config: WarmupConfig, workplace: Path) -> None:
        self._model = model
        self._config = config
        self._path = workplace / _STATE
        self._parameters = dict(model.named_parameters())
        self._optimizers = _optimizers(model, config)
        self.step = 0
        self.consumed = 0
        self.losses: list[float] = []
        self._restore()

    def train(self, rows: Sequence[Row], used: int) -> None:
        """One optimizer step on ``rows``, which took ``used`` demonstrations."""
        self._model.zero_grad(set_to_none=True)
        loss = row_loss(self._model, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm)
        share = rate_share(self._config, self.step)
        for optimizer, peak in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * peak
            optimizer.step()
        self.step += 1
        self.consumed += used
        self.losses.append(float(loss.detach()))

    def save(self) -> None:
        """Write everything to one file that appears whole, by rename."""
        names: dict[Tensor, str] = {p: name for name, p in self._parameters.items()}
        tensors = {f"weight/{name}": p.detach().contiguous() for name, p in self._parameters.items()}
        for optimizer, _ in self._optimizers:
            for p, state in optimizer.state.items():
                tensors |= {f"{key}/{names[p]}": value for key, value in state.items()}
        state = {"step": self.step, "consumed": self.consumed, "losses": self.losses, "config": asdict(self._config)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        staging = self._path.with_suffix(".writing")
        save_file(tensors, staging, metadata={"state": json.dumps(state)})
        staging.replace(self._path)

    def _restore(self) -> None:
        """Go on from the checkpoint, if there is one of the same warm-up."""
        try:
            with safe_open(self._path, "pt") as file:
                state = json.loads(file.metadata()["state"])
                if state["config"] != asdict(self._config):
                    return
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (FileNotFoundError, SafetensorError):
            return
        owner = {p: optimizer for optimizer, _ in self._optimizers for g in optimizer.param_groups for p in g["params"]}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            p = self._parameters[name]
            if kind == "weight":
                p.data.copy_(tensor)
            else:
                owner[p].state[p][kind] = tensor
        self.step, self.consumed, self.losses = state["step"], state["consumed"], state["losses"]


def _optimizers(model: nn.Module, config: WarmupConfig) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices between embedding and head, AdamW for the rest; each with its peak learning rate."""
    outer = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}  # type: ignore[operator]
    inner = [p for p in model.parameters() if p.dim() == 2 and id(p) not in outer]
    rest = [p for p in model.parameters() if p.dim() != 2 or id(p) in outer]
    return [
        (Muon(inner, momentum=config.momentum, weight_decay=config.weight_decay), config.learning_rate),
        (
            torch.optim.AdamW(rest, betas=(config.beta1, config.beta2), weight_decay=0.0),
            config.embedding_learning_rate,
        ),
    ]


def row_loss(model: nn.Module, rows: Sequence[Row]) -> Tensor:
    """Mean negative log-likelihood, in nats, of the action tokens of ``rows``; packed, with graph."""
    tokens = torch.tensor([token for row in rows for token in row.tokens])
    action = torch.tensor([flag for row in rows for flag in row.action])
    bounds = torch.tensor([0, *itertools.accumulate(len(row.tokens) for row in rows)])
    action[bounds[:-1]] = False
    where = action.nonzero()[:, 0]
    hidden = packed_hidden(model, tokens, bounds)
    logprob, _ = head_of(model).logprob_entropy(hidden[where - 1], tokens[where])
    return -logprob.mean()


def rate_share(config: WarmupConfig, step: int) -> float:
    """What the step after ``step`` steps gets of the peak: a linear rise over ``warmup``, a cosine to ``floor``."""
    rise = max(1, round(config.warmup * config.steps))
    if step < rise:
        return (step + 1) / rise
    share = (step - rise) / max(1, config.steps - rise)
    return config.floor + (1 - config.floor) * (1 + math.cos(math.pi * share)) / 2


@contextmanager
def _reporting(progress: Progress | None) -> Iterator[Progress]:
    """``progress``, or a bar on a terminal and a plain line every ten seconds elsewhere."""
    if progress is not None:
        yield progress
    elif sys.stderr.isatty():
        with _bar() as bar:
            yield bar
    else:
        yield _plain_lines()


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("warm-up"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as display:
        bar = display.add_task("warm-up", total=None, loss=math.nan)
        yield lambda step, steps, loss: display.update(bar, completed=step, total=steps, loss=loss)


def _plain_lines(seconds: float = 10.0) -> Progress:
    printed = -math.inf

    def report(step: int, steps: int, loss: float) -> None:
        nonlocal printed
        if time.monotonic() - printed >= seconds or step == steps:
            printed = time.monotonic()
            print(f"warm-up: step {step} of {steps}, loss {loss:.3f}", file=sys.stderr, flush=True)

    return report
