"""vLLM keeps state of its process, so every engine gets a process of its own: a copy of this one, which has imported
everything. Nothing here starts an engine in the test process itself."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from estr.engines.vllm.engine import prepare_environment

prepare_environment()
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["ESTR_CACHE"] = str(tmp_path_factory.getbasetemp() / "builtin-models")


@pytest.fixture
def apart() -> Callable[..., Any]:
    """Calls a function in a forked process; what it returns, or fails with what it raised."""

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()

        def child() -> None:
            try:
                theirs.send((True, function(*arguments)))
            except BaseException:
                theirs.send((False, traceback.format_exc()))
            finally:
                os._exit(0)

        process = context.Process(target=child)
        process.start()
        theirs.close()
        try:
            worked, result = ours.recv()
        except EOFError:
            worked, result = False, "the process ended without a word"
        process.join()
        if not worked:
            pytest.fail(result)
        return result

    return call
