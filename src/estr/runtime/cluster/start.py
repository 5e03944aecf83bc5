"""The cluster of a run under Ray, and the pool of engines in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from estr.config import Config
from estr.runtime.cluster.connection import Cluster, connect
from estr.runtime.pools import Pool

_SPARE_STORE = 1 << 28  # bytes beside the weights, for trajectories on their way


@contextlib.contextmanager
def ray_cluster(config: Config, weights: Iterable[Tensor], *, engines: int, learner_threads: int) -> Iterator[Cluster]:
    """The cluster of a run: joined and left again, or started on this machine and ended.

    One that is started has room for the engines, for the learner's further ranks, and for the ``weights`` of some
    versions; in one that is joined, room for the learner's threads is reserved on this node, where it has some.

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: the cluster that is to be joined cannot be, or this machine has not what an engine or rank needs.
        RunError: no cluster could be started.
    """
    runtime, lockstep = config.runtime, config.schedule.mode == "lockstep"
    threads, further = _engine_threads(config, learner_threads), config.learner.ranks - 1
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    cluster = connect(
        runtime.address,
        cpus=float(max(1, engines * threads + further * learner_threads)),
        gpus=None if runtime.engine_gpus or runtime.learner_gpus else 0,
        resources={name: amount * engines for name, amount in runtime.engine_resources.items()},
        store=int(runtime.object_store * 2**30) or _SPARE_STORE + size * (_window(config) + 3 if lockstep else 4),
    )
    driver = None
    try:
        from estr.runtime.cluster.placement import check_possible, engine_needs, rank_needs, reserve_for_driver

        if not cluster.owned:
            driver = reserve_for_driver(learner_threads)
        else:
            check_possible(engine_needs(runtime, threads))
            if further:
                check_possible(rank_needs(runtime, learner_threads), "rank of the learner")
        yield cluster
    finally:
        if driver is not None:
            driver.free()
        cluster.close()


def ray_pool(
    cluster: Cluster,
    config: Config,
    model_path: Path,
    older: dict[int, dict[str, Tensor]],
    *,
    engines: int,
    learner_threads: int,
) -> Pool:
    """Engines under Ray, ready to work.

    ``older`` are versions that a resumed lockstep run still samples from.

    Raises RunError where no engine could be placed or started.
    """
    threads = _engine_threads(config, learner_threads)
    if config.schedule.mode == "lockstep":
        return _lockstep(config, model_path, older, engines=engines, threads=threads)
    from estr.runtime.cluster.pool import RayPool

    follow = not cluster.owned and not config.runtime.engines
    return RayPool(cluster, config, model_path, engines=0 if follow else engines)


def _engine_threads(config: Config, learner_threads: int) -> int:
    """In lockstep engines and learner take turns."""
    return learner_threads if config.schedule.mode == "lockstep" else config.runtime.engine_threads


def _window(config: Config) -> int:
    """Versions that a lockstep run samples from."""
    return config.schedule.inter + config.schedule.intra + config.learner.minibatches * config.learner.epochs


def _lockstep(
    config: Config,
    model_path: Path,
    older: dict[int, dict[str, Tensor]],
    *,
    engines: int,
    threads: int,
) -> Pool:
    from estr.runtime.cluster.lockstep import RayLockstepPool

    pool = RayLockstepPool(config, model_path, engines=engines, threads=threads, window=_window(config))
    for version, tensors in older.items():
        pool.restore(version, tensors)
    return pool
