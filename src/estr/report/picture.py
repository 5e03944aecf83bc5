"""One compact picture of a run for a README: ``python -m estr.report.picture RUN OUT.svg|OUT.png``."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from estr.errors import EstrError, UsageError
from estr.report.curves import draw_reward
from estr.report.data import Run, read_run
from estr.report.svg import LIGHT, RC, THEMED, Ink, new_figure, standalone_svg
from estr.report.timeline import COLORS, draw_window
from estr.storage.files import disk_errors, write_atomic

USAGE = "usage: python -m estr.report.picture RUN OUT.svg|OUT.png"


def write_picture(run: Path, output: Path) -> Path:
    """Draw reward and timeline of one run into ``output``: an SVG that follows light and dark, or a light PNG.

    Raises UsageError for another suffix, a path that is no run or a run without a step, RunError for a full disk.
    """
    if output.suffix not in (".svg", ".png"):
        raise UsageError(f"the picture {output} must end in .svg or .png")
    found = read_run(run, run.resolve().name, token_budget=0)
    ink = THEMED if output.suffix == ".svg" else Ink(LIGHT)
    figure = draw_picture(found, ink)
    with disk_errors("write the picture", output):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, _svg(figure) if output.suffix == ".svg" else _png(figure))
    return output


def draw_picture(run: Run, ink: Ink) -> Figure:
    """Reward on top of the timeline, or reward alone where no timeline is stored."""
    timeline = run.timeline if len(run.timeline) and run.timeline.seconds > 0 else None
    lanes = len(timeline.actors) if timeline is not None else 0
    figure = new_figure(760, 250 + (50 + 32 * lanes if lanes else 0))
    ratios = (250, 50 + 32 * lanes) if lanes else (1,)
    grid = figure.add_gridspec(len(ratios), 1, height_ratios=ratios)
    reward = figure.add_subplot(grid[0])
    if not draw_reward(reward, [run], "step", "optimizer step", ink):
        raise UsageError(f"{run.path} has no reward in metrics.jsonl yet: there is nothing to draw")
    _legend(reward, ink, _reward_handles(run, ink))
    if timeline is not None:
        axes = figure.add_subplot(grid[1])
        draw_window(axes, timeline, ink)
        present = set(timeline.kind.tolist())
        words = (("generate", "generates"), ("train", "trains"), ("publish", "new weights"), ("wait", "waits"))
        _legend(axes, ink, [Patch(color=ink[COLORS[k]], label=text) for k, text in words if k in present])
    return figure


def _svg(figure: Figure) -> bytes:
    return standalone_svg(figure, "picture").encode()


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(buffer, format="png", dpi=200, facecolor=LIGHT["paper"])
    return buffer.getvalue()


def _reward_handles(run: Run, ink: Ink) -> list[Line2D]:
    handles = [Line2D([], [], color=ink["s1"], linewidth=1.8, label="training batch")]
    if len(run.evaluations):
        handles.append(Line2D([], [], color=ink["s2"], marker="o", markersize=4.5, label="held-out"))
    return handles


def _legend(axes: Axes, ink: Ink, handles: Sequence[Line2D | Patch]) -> None:
    axes.legend(
        handles=list(handles),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=4,
        frameon=False,
        labelcolor=ink["ink"],
        fontsize=9.5,
        handlelength=1.4,
        borderaxespad=0.1,
    )


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        print(write_picture(Path(arguments[0]), Path(arguments[1])))
    except EstrError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
