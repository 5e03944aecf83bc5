"""Where the modules of a user's own tasks and methods lie, found when a configuration is read and kept with the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from estr.errors import UsageError
from estr.own_code import is_own, place_of, search_in

_KEYS = {
    "task": ("name",),
    "objective": ("recipe", "advantage", "reweighting", "regularizer", "shaping", "selection"),
    "learner": ("controllers",),
}


def settle_modules(
    run: Any, sources: Iterable[Mapping[str, Any]], home: Path | None, run_directory: Path | None
) -> Any:
    """Make own modules importable; [run] with the directories they were found in as run.module_directories.

    Args:
        run: that section as it was given.
        sources: all sections, of the file and of the command line.
        home: the directory of the configuration file, where modules may lie.
        run_directory: where the configuration is that of a run, its directory, from which nothing is executed.

    Raises:
        UsageError: a module lies in ``run_directory``.
    """
    references = [pair for source in sources for pair in _references(source)]
    given = run.get("module_directories", []) if isinstance(run, dict) else None
    if not references or not isinstance(given, list) or not all(isinstance(part, str) for part in given):
        return run
    searched = [*map(Path, given), *([home] if home is not None and run_directory is None else []), Path()]
    places = [path.resolve() for path in searched]
    search_in(searched)
    found = [place_of(reference) for _, reference in references]
    if run_directory is not None:
        _refuse_inside(found, references, run_directory.resolve())
        return run
    own = [str(path) for path in found if path in places]
    return {**run, "module_directories": list(dict.fromkeys([*(str(Path(part).absolute()) for part in given), *own]))}


def _references(source: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for section, keys in _KEYS.items():
        table = source.get(section)
        if not isinstance(table, dict):
            continue
        named = [(key, name) for key in keys for name in _listed(table.get(key))]
        named += [(key, key) for key in table]  # [objective."module:name"]
        yield from ((f"{section}.{key}", name) for key, name in named if is_own(name))


def _listed(names: Any) -> list[Any]:
    return names if isinstance(names, list) else [names]


def _refuse_inside(found: Sequence[Path | None], references: Sequence[tuple[str, str]], directory: Path) -> None:
    for place, (key, reference) in zip(found, references, strict=True):
        if place is not None and place.is_relative_to(directory):
            raise UsageError(
                f"{key}: the module of {reference!r} lies in the run directory {directory}, from which nothing "
                "is executed; move it elsewhere and name its directory in run.module_directories"
            )
