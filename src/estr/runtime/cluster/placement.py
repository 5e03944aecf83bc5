"""What an engine reserves in a cluster, as a placement group of its own, so that engines can come and go one by one.

Ranks of a learner are the bundles of one group; an engine of several processes would have a bundle for each in its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from estr.config.sections import RuntimeConfig
from estr.errors import RunError, UsageError

_LEARNER_WAIT = 5.0  # seconds
_ON_NODE_WAIT = 20.0


def engine_needs(runtime: RuntimeConfig, threads: int) -> dict[str, float]:
    """Resources of one engine by Ray's names."""
    needs = {"CPU": float(threads), **runtime.engine_resources}
    return needs | ({"GPU": runtime.engine_gpus} if runtime.engine_gpus else {})


def rank_needs(runtime: RuntimeConfig, threads: int) -> dict[str, float]:
    """Resources of one rank of the learner by Ray's names."""
    return {"CPU": float(threads)} | ({"GPU": runtime.learner_gpus} if runtime.learner_gpus else {})


class Reservation:
    """Room for the bundles ``needs``, close together; there is none until ``wait`` says so."""

    def __init__(self, needs: Sequence[Mapping[str, float]]) -> None:
        self._needs = [dict(bundle) for bundle in needs]
        self._group = placement_group(self._needs, strategy="PACK")

    def wait(self, seconds: float) -> bool:
        """Whether the room is there; waits for it."""
        return bool(self._group.wait(seconds))

    def require(self, seconds: float, what: str = "engine") -> None:
        """Wait for the room of a ``what``; RunError where it does not come in time."""
        if not self.wait(seconds):
            raise no_room(self._needs[0], seconds, what)

    def options(self, bundle: int = 0) -> dict[str, Any]:
        """Options of an actor that takes the whole of a bundle."""
        needs = dict(self._needs[bundle])
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
        return {**options, "scheduling_strategy": strategy, "max_restarts": 0}

    def free(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            remove_placement_group(self._group)


def no_room(needs: Mapping[str, float], seconds: float, what: str = "engine") -> RunError:
    """What is said when a ``what`` waited ``seconds`` for room."""
    return RunError(
        f"no {what} could be placed within {seconds:g} s (runtime.start_timeout): one needs {_shown(needs)}, the "
        f"cluster has {_shown(ray.available_resources())} free"
    )


def check_possible(needs: Mapping[str, float], what: str = "engine") -> None:
    """Refuse a ``what`` that this machine can never hold."""
    total = ray.cluster_resources()
    for name, amount in needs.items():
        if amount > total.get(name, 0):
            raise UsageError(
                f"one {what} needs {_shown(needs)} (threads, GPUs and resources under runtime), but this machine has "
                f"{_shown(total)}"
            )


def _shown(resources: Mapping[str, float]) -> str:
    internal = ("node:", "object_store", "bundle", "memory", "accelerator")
    named = {name: n for name, n in resources.items() if not name.startswith(internal) and "_group_" not in name}
    return ", ".join(f"{amount:.3g} {name}" for name, amount in sorted(named.items())) or "nothing"


def reserve_for_driver(cpus: float) -> Reservation | None:
    """Room for the learner's threads on the driver's node, so that engines are not put in its way; None where that node
    has none to give."""
    here = f"node:{ray.util.get_node_ip_address()}"
    reservation = Reservation([{"CPU": cpus, here: 0.001}])
    if reservation.wait(_LEARNER_WAIT):
        return reservation
    reservation.free()
    return None


def on_node(node: str, here: str, function: Any, *arguments: Any) -> Any:
    """What ``function`` gives on a node; None where it cannot be asked in time."""
    if node == here:
        return function(*arguments)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    try:
        return ray.get(task.remote(*arguments), timeout=_ON_NODE_WAIT)
    except (ray.exceptions.RayError, TimeoutError):
        return None
