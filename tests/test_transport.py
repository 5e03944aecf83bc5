"""Weights through shared memory: hazards, leftovers, in another process."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from estr.errors import RunError
from estr.transport import WeightPublisher, WeightReader, remove_leftovers


def weights(value: float) -> dict[str, torch.Tensor]:
    value = float(value)
    return {
        "a": torch.full((3, 5), value),
        "b": torch.full((7,), value, dtype=torch.bfloat16),
        "scalar": torch.tensor(value),
    }


CANARY = np.array([-1.0, -2.0], np.float32)


@pytest.fixture
def publisher(tmp_path: Path) -> WeightPublisher:
    made = WeightPublisher(weights(0), tmp_path, readers=2)
    yield made
    made.close()


def test_what_is_published_is_what_is_read(publisher: WeightPublisher) -> None:
    reader = WeightReader(publisher.manifest, 0)
    assert reader.poll() is None
    assert reader.latest == -1
    publisher.publish(0, weights(1.5), CANARY)
    got = reader.poll()
    assert got is not None
    assert got.version == reader.latest == 0
    assert got.canary.tolist() == CANARY.tolist()
    for name, tensor in weights(1.5).items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor)
    assert reader.poll() is None


def test_a_buffer_in_use_is_not_overwritten(publisher: WeightPublisher) -> None:
    reader = WeightReader(publisher.manifest, 1)
    publisher.publish(0, weights(0), CANARY)
    held = reader.poll()
    assert held is not None
    publisher.publish(1, weights(1), CANARY)
    with pytest.raises(RunError, match="engine 1 has not taken"):
        publisher.publish(2, weights(2), CANARY, timeout=0.02)
    assert float(held.tensors["scalar"]) == 0.0
    assert reader.poll() is None or reader.version == 1


def test_a_reader_that_left_or_died_blocks_nobody(publisher: WeightPublisher) -> None:
    reader = WeightReader(publisher.manifest, 0)
    for version in range(3):
        publisher.publish(version, weights(version), CANARY)
        if version == 0:
            assert reader.poll() is not None
            reader.leave()
    dead = WeightReader(publisher.manifest, 1)
    assert dead.poll() is not None
    publisher.publish(3, weights(3), CANARY)
    publisher.forget_reader(1)
    publisher.publish(4, weights(4), CANARY, timeout=0.02)
    assert reader.poll().version == 4


def test_readers_never_see_a_torn_version(publisher: WeightPublisher) -> None:
    """A reader polls as fast as it can while versions are published as fast as they can."""
    reader, seen, torn, stop = WeightReader(publisher.manifest, 0), [], [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            got = reader.poll()
            if got is not None:
                seen.append(got.version)
                if not all(bool((tensor == got.version).all()) for tensor in got.tensors.values()):
                    torn.append(got.version)

    thread = threading.Thread(target=read)
    thread.start()
    for version in range(200):
        publisher.publish(version, weights(version), CANARY)
    time.sleep(0.01)
    stop.set()
    thread.join()
    assert not torn
    assert seen == sorted(set(seen))
    assert seen[-1] == 199


def _hold_and_die(directory: str) -> None:
    WeightPublisher(weights(0), Path(directory), readers=1)
    os._exit(9)


def test_leftovers_of_a_killed_publisher_are_removed_and_live_ones_stay(
    tmp_path: Path, publisher: WeightPublisher
) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_hold_and_die, args=(str(tmp_path),))
    process.start()
    process.join()
    assert len(list(tmp_path.glob("*.weights"))) == 2
    removed = remove_leftovers(tmp_path)
    assert len(removed) == 1
    assert publisher.path.exists()


def test_fault_D5_a_missing_or_extra_name_is_refused(publisher: WeightPublisher) -> None:
    short = weights(1)
    del short["b"]
    with pytest.raises(ValueError, match="'b'"):
        publisher.publish(0, short, CANARY)
    with pytest.raises(ValueError, match="'head'"):
        publisher.publish(0, weights(1) | {"head": torch.zeros(1)}, CANARY)
