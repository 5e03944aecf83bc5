"""What a check is: a fault of FAULTS.md, the columns that show it, and a function that looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from estr.inspect.dump import Dump

CANNOT_TELL = "cannot-tell"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, in one sentence, with the numbers that show it."""

    code: str
    sentence: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One fault. ``needs`` lists alternatives, each a set of columns that suffices; ``explained_by`` are findings after
    which this one would only repeat another fault's traces."""

    code: str
    fault: str  # what the fault is, in a few words
    needs: tuple[tuple[str, ...], ...]
    look: Callable[[Dump], Finding | None]
    explained_by: tuple[str, ...] = ()

    def missing(self, dump: Dump) -> tuple[str, ...]:
        """The fewest columns that would have to be there too; empty where the dump suffices."""
        there = dump.misplaced  # stored, though not where it belongs
        gaps = [tuple(n for n in columns if not dump.has(n) and n not in there) for columns in self.needs]
        return min(gaps, key=len)

    def run(self, dump: Dump) -> Finding | None:
        missing = self.missing(dump)
        if missing:
            return Finding(
                CANNOT_TELL,
                f"{self.code} ({self.fault}) cannot be checked: there is no {' and no '.join(missing)}.",
                {"fault": self.code, "missing": list(missing)},
            )
        return self.look(dump)
