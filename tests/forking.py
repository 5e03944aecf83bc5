"""Engine processes as copies of the test process, which has everything imported: they start in a fraction of a second.

Only for tests: the product forks them from a helper process without threads (see estr.runtime.handles.preload), which
takes seconds to start. The tests of that are in test_runtime_pools.py.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from estr.runtime import pools


@contextmanager
def forked_engines() -> Iterator[None]:
    """Inside, engine processes are forked."""
    real = multiprocessing.get_context
    torch.set_num_threads(1)
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda kind=None: real("fork" if kind == "forkserver" else kind))
        patch.setattr(pools, "preload", lambda modules: None)
        yield
    gc.unfreeze()
