"""The pool of a run under Ray, with the cluster it stands on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from estr.config import Config
from estr.runtime.cluster.connection import Cluster, connect
from estr.runtime.pools import Pool

_SPARE_STORE = 1 << 28  # bytes beside the weights, for trajectories on their way


def ray_pool(
    config: Config,
    model_path: Path,
    weights: Mapping[str, Tensor],
    older: dict[int, dict[str, Tensor]],
    *,
    engines: int,
    learner_threads: int,
) -> Pool:
    """Engines under Ray, ready to work; closing the pool also leaves the cluster, or ends it where it was started here.

    ``older`` are versions that a resumed lockstep run still samples from.

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: the cluster that is to be joined cannot be.
        RunError: no cluster could be started, or no engine.
    """
    lockstep = config.schedule.mode == "lockstep"
    threads = learner_threads if lockstep else config.runtime.engine_threads
    window = config.schedule.inter + config.schedule.intra + config.learner.minibatches * config.learner.epochs
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    cluster = connect(
        config.runtime.address,
        cpus=float(max(1, engines * threads)),
        gpus=None if config.runtime.engine_gpus else 0,
        resources={name: amount * engines for name, amount in config.runtime.engine_resources.items()},
        store=int(config.runtime.object_store * 2**30) or _SPARE_STORE + size * (window + 3 if lockstep else 4),
    )
    try:
        from estr.runtime.cluster.placement import check_possible, engine_needs

        if cluster.owned:
            check_possible(engine_needs(config.runtime, threads))
        if lockstep:
            return _lockstep(cluster, config, model_path, older, engines=engines, threads=threads, window=window)
        from estr.runtime.cluster.pool import RayPool

        follow = not cluster.owned and not config.runtime.engines
        cores = learner_threads * config.learner.ranks
        return RayPool(cluster, config, model_path, engines=0 if follow else engines, learner_threads=cores)
    except BaseException:
        cluster.close()
        raise


def _lockstep(
    cluster: Cluster,
    config: Config,
    model_path: Path,
    older: dict[int, dict[str, Tensor]],
    *,
    engines: int,
    threads: int,
    window: int,
) -> Pool:
    from estr.runtime.cluster.lockstep import RayLockstepPool

    pool = RayLockstepPool(cluster, config, model_path, engines=engines, threads=threads, window=window)
    for version, tensors in older.items():
        pool.restore(version, tensors)
    return pool
