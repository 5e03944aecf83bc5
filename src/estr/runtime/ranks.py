"""The learner's other ranks as processes of this machine: they are told what to call, and answer with what it gave.

Commands go through pipes, so that the process group carries tensors alone. A rank that fails says why and ends at once;
its connections break, and with them the collective the others are waiting in.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from estr.config import Config
from estr.errors import EstrError, RunError
from estr.runtime.builders import load_policy
from estr.runtime.group import Meeting, joined_group
from estr.runtime.handles import STOP_TIMEOUT, how_it_ended, preload, signals_held
from estr.runtime.kernel import take_name
from estr.runtime.messages import Died, Ready
from estr.runtime.worker import SIGNALS, end_with_learner

if TYPE_CHECKING:
    from estr.learner.rank import Rank

_PRELOADED = ("estr.runtime.ranks", "estr.learner.rank", "torch.distributed.fsdp", "torch.distributed.device_mesh")
_LAST_WORDS = 5.0  # seconds that a rank which broke a collective has to say why
GO_ON = "`estr resume` goes on from the last checkpoint"


@dataclass(frozen=True)
class RankSpec:
    """What a rank needs to start; plain data."""

    rank: int
    ranks: int
    config: dict[str, Any]
    model_path: str
    reference_path: str | None
    meeting: Meeting
    threads: int

    @property
    def name(self) -> str:
        return f"learner-{self.rank}"


# ---------------------------------------------------------------------- in the process of a rank


def rank_main(spec: RankSpec, connection: Connection) -> None:
    """Entry point of the process."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    end_with_learner()
    take_name(spec.name)
    try:
        _serve(spec, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException as error:
        if os.environ.get("ESTR_DEBUG"):
            raise
        said = str(error) if isinstance(error, EstrError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            send(connection, Died(said, said=True))
        os._exit(1)  # at once: the others wait in a collective


def _serve(spec: RankSpec, connection: Connection) -> None:
    from estr.learner.rank import call

    host = RankHost(spec)
    send(connection, Ready())
    with host.joined() as rank:
        while (message := connection.recv()) is not None:
            name, arguments = message
            send(connection, call(rank, name, arguments))


class RankHost:
    """A rank in a process of its own, wherever that is: first its model, then the group."""

    def __init__(self, spec: RankSpec) -> None:
        from estr.models.load import load_model

        torch.set_num_threads(spec.threads)
        self._spec, self._config = spec, Config.model_validate(spec.config)
        self._model = load_policy(self._config, Path(spec.model_path)).model
        self._reference = None
        if spec.reference_path is not None:
            trust = self._config.model.trust_remote_code
            self._reference = load_model(spec.reference_path, "float32", trust).model

    @contextlib.contextmanager
    def joined(self) -> Iterator[Rank]:
        """The rank, as long as it is in the group; waits for the others."""
        from estr.learner.extensions import Extensions
        from estr.learner.learner import methods, needs_reference
        from estr.learner.rank import Rank

        spec, config = self._spec, self._config
        chosen, _ = methods(config, self._model)
        with joined_group(spec.meeting, spec.rank, spec.ranks, config.learner.rank_timeout) as device:
            yield Rank(
                self._model,
                config,
                chosen,
                Extensions.of(config).controllers,
                needs_reference=needs_reference(config),
                reference=self._reference,
                device=device,
            )


# ---------------------------------------------------------------------- in the process that leads


class RankProcesses:
    """Ranks 1, 2, … of a group whose rank 0 is this process; ``device`` is that of rank 0."""

    def __init__(self, specs: Sequence[RankSpec], timeout: float) -> None:
        self.device, self._timeout = torch.device("cpu"), timeout
        self._ranks = [_Process(spec) for spec in specs]

    def wait_ready(self) -> None:
        """Wait until all have loaded their model; RunError where one cannot."""
        for rank in self._ranks:
            rank.receive(None)

    def ask(self, name: str, arguments: Sequence[Sequence[Any]]) -> None:
        for rank, own in zip(self._ranks, arguments, strict=True):
            rank.send((name, own))

    def answers(self) -> list[Any]:
        return [rank.receive(self._timeout) for rank in self._ranks]

    def explain(self, error: Exception) -> EstrError | None:
        return explained(error, [rank.last_words for rank in self._ranks], self._timeout)

    def check(self) -> None:
        for rank in self._ranks:
            if not rank.process.is_alive():
                raise RunError(rank.last_words() or rank.ending())

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, without this one."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def close(self) -> None:
        """Have all of them end, those that do not at once."""
        for rank in self._ranks:
            with contextlib.suppress(OSError, RunError):
                rank.send(None)
        deadline = time.monotonic() + STOP_TIMEOUT
        for rank in self._ranks:
            rank.end(max(0.0, deadline - time.monotonic()))


def explained(error: Exception, last_words: Sequence[Callable[[], str | None]], timeout: float) -> EstrError | None:
    """Why a collective failed: the first ``last_words`` of a rank that says any soon, or that one kept the others
    waiting for ``timeout`` seconds; None where neither is so."""
    deadline = time.monotonic() + _LAST_WORDS
    while time.monotonic() < deadline:
        for words in last_words:
            if (reason := words()) is not None:
                return RunError(reason)
        time.sleep(0.05)
    if "imed out" in str(error):
        return RunError(
            f"the ranks of the learner waited {timeout:g} s for each other (learner.rank_timeout); one of them hangs, "
            f"or a micro-batch takes longer than that; {GO_ON}"
        )
    return None


class _Process:
    """One rank as the leader sees it."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=rank_main, args=(spec, theirs), name=spec.name)
        with signals_held():
            self.process.start()
        theirs.close()

    def send(self, message: object) -> None:
        try:
            send(self._connection, message)
        except OSError as error:
            raise RunError(self.last_words() or self.ending()) from error

    def receive(self, timeout: float | None) -> Any:
        """What it says next; RunError where it died or says nothing for ``timeout`` seconds."""
        if not wait([self._connection], timeout):
            raise RunError(f"{self.spec.name} gave no answer for {timeout:g} s (learner.rank_timeout); {GO_ON}")
        try:
            message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RunError(self.ending()) from error
        if isinstance(message, Died):
            raise RunError(f"{self.spec.name} failed: {message.reason}")
        return message

    def last_words(self) -> str | None:
        """Why it failed or how it ended; None while it works."""
        try:
            while self._connection.poll():
                message = self._connection.recv()
                if isinstance(message, Died):
                    return f"{self.spec.name} failed: {message.reason}"
        except (EOFError, OSError):
            return self.ending()
        return None if self.process.is_alive() else self.ending()

    def ending(self) -> str:
        self.process.join(STOP_TIMEOUT)
        return f"{how_it_ended(self.spec.name, self.process.exitcode)}; {GO_ON}"

    def end(self, patience: float) -> None:
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(STOP_TIMEOUT)
        self._connection.close()


@contextlib.contextmanager
def rank_processes(
    config: Config, model: Path, reference: Path | None, *, threads: int, preloaded: Sequence[str] = ()
) -> Iterator[RankProcesses]:
    """The other ranks of a learner that this process leads, with their process group; ended on the way out.

    Raises RunError where one of them cannot start.
    """
    ranks = config.learner.ranks
    with tempfile.TemporaryDirectory(prefix="estr-ranks-") as directory:
        meeting = Meeting(file=str(Path(directory) / "store"))
        specs = rank_specs(config, model, reference, meeting, threads=threads)
        preload([*_PRELOADED, *preloaded])
        others = RankProcesses(specs, config.learner.rank_timeout)
        try:
            others.wait_ready()
            with joined_group(meeting, 0, ranks, config.learner.rank_timeout) as others.device:
                yield others
        finally:
            others.close()


def rank_specs(
    config: Config, model: Path, reference: Path | None, meeting: Meeting, *, threads: int
) -> list[RankSpec]:
    """What ranks 1, 2, … need."""
    ranks, reference_path = config.learner.ranks, None if reference is None else str(reference)
    return [
        RankSpec(rank, ranks, config.model_dump(), str(model), reference_path, meeting, threads)
        for rank in range(1, ranks)
    ]


# ---------------------------------------------------------------------- how messages travel


class _Pickler(ForkingPickler):
    """Tensors as their bytes: PyTorch's own way for pipes moves them to shared memory and hands over descriptors."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.dispatch_table = {**self.dispatch_table, Tensor: _reduced}


def send(connection: Connection, message: object) -> None:
    """Write a message that ``Connection.recv`` reads."""
    connection.send_bytes(_Pickler.dumps(message))


def _reduced(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _restored, (flat, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _restored(flat: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(flat).view(getattr(torch, dtype)).reshape(shape)
