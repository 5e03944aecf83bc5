"""The page as a whole: self-contained, harmless, honest about what is missing, bounded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from estr.errors import RunError, UsageError
from estr.report import write_report
from estr.report.data import read_run
from estr.report.page import json_island
from estr.report.samples import build_samples, pick_samples
from estr.report.summary import dropped_tokens, summary
from report_synthetic import SCHEMA, write_rollouts, write_run

POISON = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">'\"&amp;<!--"


class Reader(HTMLParser):
    """Elements, and the text inside each script and inside token boxes."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._script = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        else:
            self.text.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page(output: Path) -> str:
    return output.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    run = write_run(directory / "calculator-estr", 30, poison=POISON)
    return run, write_report([run], directory / "deep" / "report.html")


def test_nothing_is_fetched_from_anywhere(whole):
    html = page(whole[1])
    assert "http:" not in html
    assert "https:" not in html
    reader = Reader(html)
    assert not [tag for tag, _ in reader.elements if tag in ("link", "img", "iframe", "object", "embed")]
    assert all("src" not in attributes for _, attributes in reader.elements)
    assert re.findall(r"@import|url\((?!#)", html) == []


def test_untrusted_text_stays_text(whole):
    reader = Reader(page(whole[1]))
    executable = [a for a in reader.of("script") if a.get("type") != "application/json"]
    assert len(executable) == 1
    assert all(name[:2] != "on" for _, attributes in reader.elements for name in attributes)
    assert "".join(reader.text).count(POISON) == 5  # in each sample, once


def test_data_islands_are_json_that_cannot_end_their_element(whole):
    reader = Reader(page(whole[1]))
    kinds = [attributes.get("type") for attributes in reader.of("script")]
    islands = [text for kind, text in zip(kinds, reader.scripts, strict=True) if kind == "application/json"]
    assert len(islands) == 6  # five samples and the names of the gates
    assert all(json.loads(text) for text in islands)
    assert json.loads(str(json_island(["</script>\u2028"]))) == ["</script>\u2028"]
    assert "<" not in json_island("</script><!--")


def test_the_policy_lets_only_the_pages_own_script_run(whole):
    html = page(whole[1])
    policy = next(a["content"] for a in Reader(html).of("meta") if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "'unsafe-inline'" not in policy.split("script-src")[1]


def test_tokens_carry_their_details(whole):
    run = read_run(whole[0], "r", 10**7)
    samples = build_samples(run)
    assert [sample.why for sample in samples] == ["best", "worst", "median", "most stale", "most dropped"]
    assert len({sample.name for sample in samples}) == 5
    for sample in samples:
        for row in sample.rows:
            actions = [piece for piece in row.pieces if piece.kind == "action"]
            assert [piece.index for piece in actions] == list(range(len(actions)))
            assert {len(column) for column in row.details.values()} == {len(actions)}
            assert row.pieces[0].kind == "prompt"
            assert [piece.kind for piece in row.pieces].count("tool") == 1


def test_kept_and_dropped_follow_the_definition(whole):
    run = read_run(whole[0], "r", 10**7)
    row = build_samples(run)[-1].rows[0]
    dropped = [piece.dropped for piece in row.pieces if piece.kind == "action"]
    mu, pi, h = (np.array(row.details[key], float) for key in ("mu", "pi", "h"))
    np.testing.assert_array_equal(dropped, (pi - mu) ** 2 / (h + 0.01) > 1.0)
    assert any(dropped)


def test_samples_are_what_they_are_called(whole):
    run = read_run(whole[0], "r", 10**7)
    picks = dict(pick_samples(run))
    reward = run.rollouts.columns["reward"]
    assert reward[picks["best"]] == reward.max()
    assert reward[picks["worst"]] == reward.min()


def test_the_summary_counts_what_the_metrics_say(whole):
    run = read_run(whole[0], "r", 10**7)
    tokens, share = run.metrics["tokens/action"], run.metrics["gate/masked_fraction"]
    assert dropped_tokens(run) == (pytest.approx((tokens * share).sum()), tokens.sum())
    facts = {fact.name: fact.values[0] for fact in summary([run])}
    assert facts["task"] == "calculator"
    assert facts["optimizer steps"] == "30"
    assert facts["tokens trained"] == f"{int(tokens.sum()):,}"
    assert facts["held-out reward, final"] == f"{run.metrics.last('eval/reward'):.3f} at step 30"


def test_the_same_run_gives_the_same_page(whole, tmp_path):
    assert page(write_report([whole[0]], tmp_path / "again.html")) == page(whole[1])


def test_several_runs_stand_side_by_side(whole, tmp_path):
    other = write_run(tmp_path / "a<b>&", 8, seed=1, recipe="grpo", mode="sync", planned=20)
    html = page(write_report([whole[0], other], tmp_path / "two.html"))
    assert "a&lt;b&gt;&amp;" in html
    assert "<b>&" not in html
    assert "8 of 20 (unfinished)" in html
    assert html.count("Log-ratio against entropy") >= 2


def make_bare(run: Path) -> Path:
    run.mkdir()
    (run / "config.toml").write_text("[run]\nsteps = 50\n")
    return run


def test_a_run_that_has_only_begun(tmp_path):
    html = page(write_report([make_bare(tmp_path / "run")], tmp_path / "report.html"))
    for reason in (
        "No reward has been logged yet",
        "metrics.jsonl has no policy/entropy",
        "rollouts/ has no stored trajectory yet",
        "no trained trajectory with versions is stored",
        "no timeline.jsonl with spans yet",
        "No trajectory to show",
        "Not all steps have been taken",
    ):
        assert reason in html, reason


def test_a_single_step(tmp_path):
    html = page(write_report([write_run(tmp_path / "run", 1)], tmp_path / "report.html"))
    assert "No reward" not in html
    assert html.count("<svg") >= 14


@pytest.mark.parametrize("gone", ["config.toml", "metrics.jsonl", "timeline.jsonl", "rollouts", "checkpoints"])
def test_any_one_piece_may_be_missing(tmp_path, gone):
    run = write_run(tmp_path / "run", 4)
    path = run / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    html = page(write_report([run], tmp_path / "report.html"))
    assert "Sample trajectories" in html
    if gone == "checkpoints":
        assert "shown by their ids" in html
        assert "⟨" in html


def test_no_evaluation_and_a_torn_line(tmp_path):
    run = write_run(tmp_path / "run", 6)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("eval/reward", None)
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 7, "reward/me')
    html = page(write_report([run], tmp_path / "report.html"))
    assert "there was no held-out evaluation" in html
    assert "no evaluation" in html


def test_trajectories_that_were_never_trained(tmp_path):
    run = write_run(tmp_path / "run", 3)
    for path in (run / "rollouts").glob("*.parquet"):
        rows = pq.read_table(path, schema=SCHEMA).to_pylist()
        untrained = {"state": "finished", "learner_logprob": None, "trained_step": None, "target_version": None}
        write_rollouts(path, [row | untrained for row in rows])
    html = page(write_report([run], tmp_path / "report.html"))
    assert "no stored token has both its entropy and the learner" in html
    assert "no trained trajectory with versions" in html
    assert "<b>state</b> finished" in html


def test_rows_without_any_action(tmp_path):
    run = write_run(tmp_path / "run", 2)
    for path in (run / "rollouts").glob("*.parquet"):
        rows = pq.read_table(path, schema=SCHEMA).to_pylist()
        write_rollouts(path, [row | {"action": [False] * len(row["action"])} for row in rows])
    html = page(write_report([run], tmp_path / "report.html"))
    assert "have no action tokens" in html
    assert "No trajectory to show" in html


def test_a_recipe_without_a_gate_says_so(tmp_path):
    html = page(write_report([write_run(tmp_path / "run", 3, recipe="tis")], tmp_path / "report.html"))
    assert "not of this run’s recipe" in html


def test_a_long_run_makes_a_small_page(tmp_path):
    run = write_run(tmp_path / "run", 10_000, rollouts_every=500, per_step=16)
    output = write_report([run], tmp_path / "report.html")
    assert output.stat().st_size < 2_000_000


def test_a_path_that_is_no_run(tmp_path):
    with pytest.raises(UsageError, match="no run directory"):
        write_report([tmp_path], tmp_path / "report.html")


def test_a_place_that_cannot_be_written(whole, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write the report"):
        write_report([whole[0]], tmp_path / "file" / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_a_real_browser_runs_the_page_and_nothing_else(whole, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no headless browser is installed")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path}", "--dump-dom", f"{whole[1].resolve().as_uri()}#theme=dark&color=kept"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert 'data-theme="dark"' in dom
    assert 'data-color="kept"' in dom
    assert "<title>calculator-estr · estr report</title>" in dom
