"""Engine processes as copies of the test process, which has everything imported: they start in a fraction of a second.

Only for tests: the product spawns its processes anew, because a copy of a process with threads may hang. The tests that
are about spawning are in test_runtime_pools.py.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def forked_engines() -> Iterator[None]:
    """Inside, engine processes are forked."""
    real = multiprocessing.get_context
    torch.set_num_threads(1)
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda kind=None: real("fork" if kind == "spawn" else kind))
        yield
    gc.unfreeze()
