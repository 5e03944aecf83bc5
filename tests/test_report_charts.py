"""What the charts compute before they draw, and the SVG they become."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from estr.report.curves import CHARTS, curve_panels, reward_panels
from estr.report.data import Run, Timeline, read_run
from estr.report.panel import drawn
from estr.report.scatter import boundary, scatter_panels
from estr.report.series import duration, number, percent, smooth, thin
from estr.report.staleness import late_multi_version_share, staleness_panels
from estr.report.svg import DARK, LIGHT, THEMED, new_figure, power_label, standalone_svg, style_axes, tick_label
from estr.report.timeline import busy_share, middle_window, overlap_share, timeline_panels
from report_synthetic import SCHEMA, write_rollouts, write_run


def spans(*rows: tuple[str, str, float, float]) -> Timeline:
    actor, kind, start, end = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Timeline(
        np.array(actor, np.str_),
        np.array(kind, np.str_),
        np.array(start, float),
        np.array(end, float),
        np.full(len(start), np.nan),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "run", 40), "run", 10**6)


def test_busy_share_of_slices():
    edges = np.array([0.0, 1.0, 2.0, 4.0])
    share = busy_share(np.array([0.5, 2.0]), np.array([1.5, 3.0]), edges)
    np.testing.assert_allclose(share, [0.5, 0.5, 0.5])
    np.testing.assert_allclose(busy_share(np.array([0.0, 0.0]), np.array([4.0, 1.0]), edges), [1, 1, 1])
    np.testing.assert_allclose(busy_share(np.zeros(0), np.zeros(0), edges), [0, 0, 0])


def test_overlap_is_the_part_of_training_in_which_an_engine_generated():
    timeline = spans(
        ("learner", "train", 0, 4),
        ("learner", "train", 10, 14),
        ("engine-0", "generate", 1, 3),
        ("engine-1", "generate", 2, 5),
        ("engine-0", "idle", 5, 20),
        ("engine-0", "generate", 13, 13.5),
    )
    assert overlap_share(timeline) == pytest.approx((3 + 0.5) / 8)
    assert overlap_share(spans(("learner", "wait", 0, 1))) is None
    assert overlap_share(spans(("learner", "train", 0, 1))) is None
    assert overlap_share(spans(("learner", "train", 0, 1), ("engine-0", "sync", 0, 1))) is None


def test_a_timeline_without_generating_is_drawn():
    timeline = spans(("learner", "train", 0, 1), ("engine-0", "sync", 0, 1))
    panels = timeline_panels([Run(None, "r", {}, None, None, timeline, None, [])])  # type: ignore[arg-type]
    assert [bool(panel.svg) for panel in panels] == [True, True]


def test_the_window_lies_in_the_run_and_avoids_evaluations():
    rows = [("learner", "train", float(t), t + 0.9) for t in range(100)]
    low, high = middle_window(spans(*rows))
    assert 0 <= low < 50 < high <= 100
    assert high - low == pytest.approx(4.2)
    low, high = middle_window(spans(*rows, ("learner", "evaluate", 48, 52)))
    assert high <= 48 or low >= 52


def test_the_window_stays_with_the_training_where_evaluations_are_everywhere():
    rows = [("learner", "train", 100.0 + t, 100.4 + t) for t in range(30)]
    rows += [("learner", "evaluate", 100.4 + t, 101.0 + t) for t in range(30)]
    low, high = middle_window(spans(*rows))
    assert 100 <= low < high <= 130


def test_the_window_of_a_single_span():
    low, high = middle_window(spans(("learner", "train", 0, 0.4)))
    assert (low, high) == (0.0, pytest.approx(0.4))


def test_smoothing_keeps_constants_and_averages():
    np.testing.assert_allclose(smooth(np.full(20, 3.0), 7), 3.0)
    np.testing.assert_allclose(smooth(np.array([0.0, 3, 6, 9]), 3), [1.5, 3, 6, 7.5])
    np.testing.assert_allclose(smooth(np.array([1.0, 5.0]), 9), [1, 5])


def test_thinning_bounds_the_points_and_keeps_the_mean():
    x, y = thin(np.arange(10_000.0), np.arange(10_000.0) % 7, 400)
    assert len(x) == 400
    assert x[0] == 12.0
    assert y.mean() == pytest.approx((np.arange(10_000) % 7).mean())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.873, "0.873"), (1.0, "1"), (1234567.0, "1,234,567"), (2.1e-5, "2.1·10⁻⁵"), (None, "–"), (float("nan"), "–")],
)
def test_numbers(value, text):
    assert number(value) == text


def test_words_for_shares_durations_and_ticks():
    assert [percent(x).replace("\u00a0", " ") for x in (0.0, 0.0123, 0.57, 1e-4, None)] == [
        "0 %",
        "1.2 %",
        "57 %",
        "0.01 %",
        "–",
    ]
    assert [duration(x) for x in (0.42, 48, 303, 7620, None)] == ["0.4 s", "48 s", "5 min 03 s", "2 h 07 min", "–"]
    assert [power_label(x) for x in (0.01, 100, 1e-5, 2e-4, 0)] == ["0.01", "100", "10⁻⁵", "2·10⁻⁴", ""]
    assert [tick_label(x) for x in (0, 0.25, 2e-4, 2000)] == ["0", "0.25", "2·10⁻⁴", "2,000"]


def test_the_boundary_of_the_method_sheet():
    np.testing.assert_allclose(boundary(np.array([0.33, 0.06]), 1.0, 0.01), [0.5831, 0.2646], atol=5e-5)


def test_every_chart_of_a_full_run_is_drawn_with_units_and_a_sentence(run):
    panels = [*reward_panels([run]), *staleness_panels([run]), *scatter_panels([run]), *timeline_panels([run])]
    for group in CHARTS:
        panels += curve_panels([run], group)
    assert len({panel.name for panel in panels}) == len(panels)
    for panel in panels:
        assert panel.svg.startswith("<svg viewBox="), panel.name
        assert panel.sentence.endswith("."), panel.name
        assert "<text" in panel.svg, panel.name


def test_charts_color_with_variables_only_and_keep_their_ids_apart(run):
    one, other = reward_panels([run])
    for panel in (one, other):
        assert re.findall(r"#[0-9a-fA-F]{6}", panel.svg) == []
        assert set(re.findall(r"var\(--([\w-]+)\)", panel.svg)) <= {*LIGHT, "chart-font"}
        identifiers = re.findall(r'\bid="([^"]*)"', panel.svg)
        assert all(name.startswith(f"{panel.name}-") for name in identifiers)
        references = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', panel.svg)
        assert {a or b for a, b in references} <= set(identifiers)


def test_both_themes_name_the_same_colors():
    assert LIGHT.keys() == DARK.keys()


def test_several_runs_share_a_chart_a_metric(run):
    panels = curve_panels([run, run], "speed")
    assert [panel.title for panel in panels] == [
        "Throughput: generated",
        "Throughput: trained",
        "Idle time: engines",
        "Idle time: learner",
    ]
    assert [entry.text for entry in panels[0].legend] == ["run", "run"]


def test_an_actor_may_have_any_name():
    timeline = spans(("$x^", "generate", 0, 1), ("<b>\\1", "train", 0, 1), ("learner", "train", 0, 1))
    run = Run(None, "r", {}, None, None, timeline, None, [])  # type: ignore[arg-type]
    window, whole = timeline_panels([run])
    assert "&lt;b&gt;\\1" in window.svg
    assert "<b>" not in window.svg + whole.svg
    assert "$x^" in whole.svg


def test_a_description_with_quotes_and_backslashes_stays_an_attribute():
    figure = new_figure()
    style_axes(figure.add_subplot(), THEMED, "x", "y")
    svg = drawn("n", '"><script>\\1', "A & B.", figure).svg
    assert 'aria-label="&quot;>&lt;script>\\1. A &amp; B."' in svg


def test_standalone_svg_follows_the_readers_theme():
    figure = new_figure()
    style_axes(figure.add_subplot(), THEMED, "x", "y")
    text = standalone_svg(figure, "picture")
    assert "prefers-color-scheme: dark" in text
    assert text.count("<style") == 1
    assert f"--ink:{DARK['ink']}" in text


def test_late_multi_version_share_counts_what_was_trained_after_step_ten(run):
    share, count = late_multi_version_share(run)
    columns, rollouts = run.rollouts.columns, run.rollouts
    late = columns["trained_step"] > 10
    spanning = [len(set(rollouts.tokens["version"][rollouts.row == r].tolist())) > 1 for r in np.flatnonzero(late)]
    assert count == late.sum()
    assert share == pytest.approx(np.mean(spanning))
    assert 0.1 < share < 0.9


def test_more_runs_than_colors_are_told_apart_by_dashes(run):
    panel = curve_panels([run] * 10, "policy")[0]
    assert len({(entry.role, entry.mark) for entry in panel.legend}) == 10
    assert "stroke-dasharray" in panel.svg


def test_a_long_timeline_is_drawn_in_slices():
    rows = [("learner", "train", float(t), t + 0.9) for t in range(4000)]
    run = Run(None, "r", {}, None, None, spans(*rows), None, [])  # type: ignore[arg-type]
    whole = timeline_panels([run])[1]
    assert whole.sentence.startswith("Height is the share")
    assert len(whole.svg) < 60_000


def test_a_log_chart_of_zeros_is_drawn_as_zeros(tmp_path):
    run = write_run(tmp_path / "run", 5)
    lines = [json.loads(line) | {"grad/norm": 0.0} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    panel = curve_panels([read_run(run, "r", 10)], "optimization")[0]
    assert "gradient norm\u00a00." in panel.sentence
    assert panel.svg.count("var(--s1)") == 1


def test_no_power_law_is_claimed_where_entropies_are_alike(tmp_path):
    rows = pq.read_table(write_run(tmp_path / "run", 3) / "rollouts" / "000001.parquet", schema=SCHEMA).to_pylist()
    for row in rows:
        row["entropy"] = [h and 2.0 + 0.1 * (i % 7) for i, h in enumerate(row["entropy"])]
    for path in (tmp_path / "run" / "rollouts").glob("*.parquet"):
        path.unlink()
    write_rollouts(tmp_path / "run" / "rollouts" / "1.parquet", rows)
    panel = scatter_panels([read_run(tmp_path / "run", "r", 10**6)])[0]
    assert "too alike" in panel.sentence
    assert panel.svg
