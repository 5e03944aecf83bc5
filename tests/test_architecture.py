"""The house as it is drawn: which room may import which, nothing listens, files stay readable."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "estr"
BOTTOM = {"errors", "registry", "state", "trajectory", "batch", "own_code"}
MATHS = {"objectives", "advantages", "controllers", "shaping", "diagnostics"}
ALLOWED = {
    **dict.fromkeys(BOTTOM, BOTTOM),
    **dict.fromkeys(MATHS, BOTTOM),
    "controllers": BOTTOM | {"advantages"},
    "shaping": BOTTOM | {"advantages"},
    "config": BOTTOM | {"objectives", "advantages", "controllers", "shaping"},
    "environments": BOTTOM,
    "models": BOTTOM | {"config", "environments"},
    "engines": BOTTOM | {"models"},
    "schedule": BOTTOM,
    "learner": BOTTOM | MATHS | {"config", "models"},
    "transport": BOTTOM,
    "storage": BOTTOM | {"config"},
    "runtime": BOTTOM
    | MATHS
    | {"config", "environments", "models", "engines", "schedule", "learner", "transport", "storage"},
}
ALLOWED["inspect"] = BOTTOM | MATHS | {"storage", "report"}
ALLOWED["plan"] = BOTTOM | {"config", "environments", "schedule", "storage", "report"}
ALLOWED["compare"] = BOTTOM | MATHS | {"config", "storage", "runtime", "inspect", "report"}
TOP = {"report", "cli", "__init__", "__main__"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "estr" else [f"estr.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("estr.")}
    return rooms


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down_only(path: Path) -> None:
    room = room_of(path)
    if room in TOP:
        return
    assert room in ALLOWED, f"the room {room!r} is not on the drawing in ARCHITECTURE.md"
    odd = imported_rooms(path) - ALLOWED[room] - {room}
    assert not odd, f"{path.relative_to(SOURCE)} imports {sorted(odd)}"


def test_nine_files_in_ten_are_under_five_hundred_lines() -> None:
    long = [path for path in FILES if len(path.read_text().splitlines()) > 500]
    assert len(long) <= len(FILES) / 10, long


def test_importing_the_package_loads_no_torch() -> None:
    code = "import estr, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_using_only_the_objective_loads_no_transformers() -> None:
    code = (
        "from estr import objective, advantage; objective('estr'); advantage('grpo'); import sys; "
        "sys.exit('transformers' in sys.modules or 'pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["pickle", "torch.load", "eval(", "exec("])
def test_nothing_executes_what_it_reads(name: str) -> None:
    found = [
        str(path.relative_to(SOURCE))
        for path in FILES
        for line in path.read_text().splitlines()
        if name in line and not line.strip().startswith(("#", '"', "'", "*")) and f".{name}" not in line
    ]
    assert not [path for path in found if _calls(SOURCE / path, name.rstrip("("))]


def _calls(path: Path, name: str) -> bool:
    """Whether the file imports or calls ``name`` (words in texts do not count)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import) and any(alias.name == name for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == name:
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            return True
    return False
