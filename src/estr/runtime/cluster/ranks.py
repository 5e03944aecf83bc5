"""The learner's other ranks as actors of a Ray cluster, on whatever nodes have room for them.

Commands and answers travel as calls of actors, in order; the process group of PyTorch carries tensors between the ranks
themselves. A rank that fails says why and ends at once, so that the collective in which the others wait breaks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from estr.config import Config
from estr.errors import EstrError, RunError
from estr.learner.rank import call
from estr.runtime.cluster.connection import Cluster
from estr.runtime.cluster.engine import Hello, Home, hello, prepare
from estr.runtime.cluster.handles import actor_ending, end_process
from estr.runtime.cluster.placement import Reservation, on_node, rank_needs
from estr.runtime.group import Meeting, joined_group, listen
from estr.runtime.messages import Died
from estr.runtime.ranks import GO_ON, RankHost, RankSpec, explained, rank_specs

_STOP_TIMEOUT = 5.0
_TO_BE_HEARD = 1.0  # seconds between a rank's last words and its end


class RankActor:
    """One rank; ``live`` never returns, so that its end is that of the process, and is called beside the others."""

    def __init__(self, spec: RankSpec, home: Home) -> None:
        prepare(home)
        self._spec, self._stack = spec, contextlib.ExitStack()
        self._rank: Any = None

    def load(self) -> Hello | Died:
        """Load the model."""
        try:
            self._host = RankHost(self._spec)
        except Exception as error:
            return self._fail(error)
        return hello()

    def join(self) -> Died | None:
        """Wait for the other ranks and be one of them."""
        try:
            self._rank = self._stack.enter_context(self._host.joined())
        except Exception as error:
            return self._fail(error)
        return None

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """What the rank's method gives."""
        try:
            return call(self._rank, name, arguments)
        except Exception as error:
            return self._fail(error)

    @ray.method(concurrency_group="beside")  # type: ignore[untyped-decorator, unused-ignore]
    def live(self) -> None:
        threading.Event().wait()

    def _fail(self, error: Exception) -> Died:
        """Last words; the process ends when they have been heard."""
        threading.Timer(_TO_BE_HEARD, os._exit, [1]).start()
        return Died(str(error) if isinstance(error, EstrError) else f"{type(error).__name__}: {error}", said=True)


class RayRanks:
    """Ranks 1, 2, … of a group whose rank 0 is this process; see :class:`estr.learner.ranks.Others`."""

    def __init__(self, specs: Sequence[RankSpec], needs: Mapping[str, float], timeout: float, start: float) -> None:
        self.device, self._timeout = torch.device("cpu"), timeout
        self._reservation = Reservation([needs] * len(specs))
        try:
            self._reservation.require(start, "rank of the learner")
            self._ranks = [_Actor(spec, self._reservation.options(place)) for place, spec in enumerate(specs)]
        except BaseException:
            self._reservation.free()
            raise

    def load(self, timeout: float) -> None:
        """Have all load their model; RunError where one cannot, or not within ``timeout`` seconds."""
        for rank in self._ranks:
            rank.ask("load")
        for rank in self._ranks:
            rank.hello = rank.answer(timeout, "runtime.start_timeout")

    @contextlib.contextmanager
    def joined(self, meeting: Meeting, listener: socket.socket | None) -> Iterator[None]:
        """All of them, and this process as rank 0, in one group."""
        for rank in self._ranks:
            rank.ask("join")
        with contextlib.ExitStack() as stack:
            try:
                group = joined_group(meeting, 0, len(self._ranks) + 1, self._timeout, listener)
                self.device = stack.enter_context(group)
                self.answers()
            except EstrError:
                raise
            except Exception as error:
                raise self.explain(error) or RunError(f"the ranks of the learner did not meet: {error}") from error
            yield

    def ask(self, name: str, arguments: Sequence[Sequence[Any]]) -> None:
        for rank, own in zip(self._ranks, arguments, strict=True):
            rank.ask("call", name, own)

    def answers(self) -> list[Any]:
        return [rank.answer(self._timeout, "learner.rank_timeout") for rank in self._ranks]

    def explain(self, error: Exception) -> EstrError | None:
        return explained(error, [rank.last_words for rank in self._ranks], self._timeout)

    def check(self) -> None:
        for rank in self._ranks:
            if (reason := rank.ended()) is not None:
                raise RunError(reason)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, each on its node, without this one."""
        return [rank.hello.pid for rank in self._ranks if rank.hello is not None]

    def close(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._reservation.free()


class _Actor:
    """One rank as the leader sees it."""

    def __init__(self, spec: RankSpec, options: Mapping[str, Any]) -> None:
        self.name, self._here = spec.name, ray.get_runtime_context().get_node_id()
        remote = ray.remote(concurrency_groups={"beside": 1})(RankActor)
        self._actor: Any = remote.options(**options).remote(spec, Home.here())
        self._life = self._actor.live.remote()
        self._asked: Any = None
        self.hello: Hello | None = None

    def ask(self, method: str, *arguments: Any) -> None:
        self._asked = getattr(self._actor, method).remote(*arguments)

    def answer(self, timeout: float, key: str) -> Any:
        """What it says; RunError where it died or says nothing for ``timeout`` seconds."""
        try:
            said = ray.get(self._asked, timeout=timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise RunError(f"{self.name} gave no answer for {timeout:g} s ({key}); {GO_ON}") from error
        except ray.exceptions.RayError as error:
            raise RunError(self._ending(error)) from error
        if isinstance(said, Died):
            raise RunError(f"{self.name} failed: {said.reason}")
        return said

    def last_words(self) -> str | None:
        """Why it failed or how it ended; None while it works."""
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            try:
                self.answer(_STOP_TIMEOUT, "its last words")
            except RunError as error:
                return str(error)
        return self.ended()

    def ended(self) -> str | None:
        """How it ended; None while it lives."""
        if not ray.wait([self._life], timeout=0)[0]:
            return None
        try:
            ray.get(self._life)
        except ray.exceptions.RayError as error:
            return self._ending(error)
        return f"{self.name} ended; {GO_ON}"

    def _ending(self, error: Exception) -> str:
        return f"{actor_ending(self.name, self.hello, error)}; {GO_ON}"

    def end(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actor)
        if self.hello is not None:  # Ray leaves a process alone that is stopped
            on_node(self.hello.node, self._here, end_process, self.hello.pid)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait([self._life], timeout=_STOP_TIMEOUT)


@contextlib.contextmanager
def ray_ranks(
    cluster: Cluster, config: Config, model: Path, reference: Path | None, *, threads: int
) -> Iterator[RayRanks]:
    """The other ranks of a learner that this process leads, with their process group; ended on the way out.

    In a cluster of the run's own they talk through the loopback device; in one that is joined they meet at an address
    of this node, and PyTorch's connections between nodes know no token.

    Raises RunError where one of them finds no room or cannot start.
    """
    start = config.runtime.start_timeout
    with _meeting(cluster, gpus=config.runtime.learner_gpus > 0) as (meeting, listener):
        specs = rank_specs(config, model, reference, meeting, threads=threads)
        others = RayRanks(specs, rank_needs(config.runtime, threads), config.learner.rank_timeout, start)
        try:
            others.load(start)
            with others.joined(meeting, listener):
                yield others
        finally:
            others.close()


@contextlib.contextmanager
def _meeting(cluster: Cluster, *, gpus: bool) -> Iterator[tuple[Meeting, socket.socket | None]]:
    if cluster.owned and not gpus:
        with tempfile.TemporaryDirectory(prefix="estr-ranks-") as directory:
            yield Meeting(file=str(Path(directory) / "store")), None
    else:
        host = "127.0.0.1" if cluster.owned else ray.util.get_node_ip_address()
        with listen(host) as listener:
            yield Meeting(host=host, port=listener.getsockname()[1], gpus=gpus), listener
