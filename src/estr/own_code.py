"""Code of the user's own, written ``module:name``: a task's class, a recipe, a method of any family.

A module lies beside the configuration, in the current directory, or is installed. The first two are put at the end of
``sys.path``, so that they never hide a module that Python or this package needs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from estr.errors import nearest


def is_own(name: Any) -> bool:
    """Whether ``name`` has the form ``module:name``."""
    return isinstance(name, str) and ":" in name


def search_in(directories: Iterable[str | os.PathLike[str]]) -> None:
    """Look for modules there too, after all places where Python looks already."""
    for directory in map(os.path.abspath, directories):
        if directory not in map(os.path.abspath, sys.path):
            sys.path.append(directory)


def place_of(reference: str) -> Path | None:
    """The directory in which the module of ``module:name`` is found, without importing it; None where it is not."""
    top = reference.partition(":")[0].partition(".")[0]
    search_in([os.curdir])
    importlib.invalidate_caches()  # a module written a moment ago is found
    spec = PathFinder.find_spec(top) if top.isidentifier() else None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve().parent
    return Path(spec.origin).resolve().parent if spec.origin else None


def import_own(reference: str) -> tuple[ModuleType, str]:
    """The module of ``module:name``, imported, and the name.

    Raises:
        ValueError: the reference is malformed, there is no such module (the sentence says where it was looked for), or
            importing it failed.
    """
    module_name, _, name = reference.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(f"{reference!r} is not of the form module:name, as in my_code:MyName for a file my_code.py")
    search_in([os.curdir])
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name), name
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise ValueError(f"cannot import {module_name!r}: {error}") from error
        raise ValueError(_not_found(error.name)) from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"cannot import {module_name!r}: {type(error).__name__}: {error}") from error


def file_of(module: ModuleType) -> str:
    """Where a module came from, for errors."""
    return getattr(module, "__file__", None) or "built into Python"


def _not_found(module_name: str) -> str:
    directories = [path for path in dict.fromkeys(map(os.path.abspath, sys.path)) if _is_place(path)]
    modules = {path.stem for directory in directories for path in Path(directory).glob("*.py")}
    near = nearest(module_name, modules)
    hint = near if near.startswith("; did") else ""
    file = module_name.replace(".", "/") + ".py"
    return (
        f"cannot import {module_name!r}: there is no {file} in {' or '.join(directories)}, and none is installed; put "
        f"it beside the configuration or into the directory where estr is started{hint}"
    )


def _is_place(path: str) -> bool:
    """Whether a person would put a module there."""
    return os.path.isdir(path) and not path.startswith((sys.prefix, sys.base_prefix)) and "site-packages" not in path
