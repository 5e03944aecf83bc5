"""For every test: builtin models are made in a directory of the session's own, not in the user's cache."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("ESTR_CACHE")
    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one for all workers
        session = session.parent
    os.environ["ESTR_CACHE"] = str(session / "builtin-models")
    yield
    os.environ.pop("ESTR_CACHE")
    if before is not None:
        os.environ["ESTR_CACHE"] = before
