"""``estr inspect`` as a command: JSON, page, lines, errors; text from files can do nothing on page or terminal."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from estr.cli.main import main
from estr.inspect import inspect_path
from estr.inspect.page import render
from estr.inspect.summary import summary_lines, visible
from inspect_synthetic import World, planted, simulate, write_ours, write_trl

EVIL = "</style><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e{{ 7*7 }}"


class Tags(HTMLParser):
    """Tags that are opened, and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.opened.append(tag)
        self.attributes += attrs


@pytest.fixture(scope="module")
def dump(tmp_path_factory) -> Path:
    world = World(trajectories=60, drift=0.5, inter=8, switch=0.2)
    return write_ours(simulate(world), tmp_path_factory.mktemp("d") / "dump.parquet")


def test_json_is_one_object_on_standard_output(dump, capsys):
    assert main(["inspect", str(dump), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["findings"] == []
    pair = value["disagreements"][0]
    assert {"before", "token", "after", "delta", "entropy", "row", "position"} <= pair["examples"][0].keys()
    assert re.fullmatch(r"⟨\d+⟩", pair["examples"][0]["token"])


def test_without_options_it_prints_a_summary(dump, capsys):
    assert main(["inspect", str(dump)]) == 0
    out = capsys.readouterr().out
    for words in ("Nothing is wrong", "E[δ²] grows as H", "engine noise", "version switches", "ESTR", "keeps"):
        assert words in out


def test_the_page_is_written_beside_json(dump, tmp_path, capsys):
    page = tmp_path / "new" / "page.html"
    assert main(["inspect", str(dump), "--json", "--html", str(page)]) == 0
    json.loads(capsys.readouterr().out)
    html = page.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(html)
    assert tags.opened.count("svg") >= 6
    assert "script" not in tags.opened
    assert not [value for name, value in tags.attributes if name in ("src", "href") and not str(value).startswith("#")]
    assert "prefers-color-scheme: dark" in html
    assert "default-src 'none'" in html
    for words in ("How δ grows with entropy", "Where gates disagree", "nats"):
        assert words in html


def test_a_fault_stands_first(tmp_path, capsys):
    path = write_ours(planted("A15"), tmp_path / "dump.parquet")
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.index("What is wrong") < out.index("A15") < out.index("δ = log π − log μ")
    assert "before temperature 0.6" in out
    assert "A15" in render(inspect_path(path))


def test_what_could_not_be_checked_is_listed(tmp_path, capsys):
    path = write_trl(simulate(World(trajectories=16)), tmp_path / "dump.jsonl")
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "A17  no version, no target_version" in out
    assert "could not be made for want of columns" in render(inspect_path(path))


def test_text_from_files_is_only_text(tmp_path, capsys):
    record = {
        "trajectory_id": EVIL,
        "tokens": [1, 2, 3],
        "action": [0, 1, 1],
        "logprob": [None, -0.1, None],
        "learner_logprob": [None, -4.0, -1.0],
        "entropy": [None, 0.1, 0.1],
        "entropy_kind": EVIL,
        "group_id": EVIL,
    }
    path = tmp_path / "<b>dump.jsonl"
    path.write_text(json.dumps(record) + "\n")
    html = render(inspect_path(path))
    tags = Tags()
    tags.feed(html)
    assert not {"script", "img"} & set(tags.opened)
    assert html.count("<b>") == html.count("</b>") == html.count("<li")
    assert "alert(1)" in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert "{{ 7*7 }}" in html
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out


def test_visible_shows_what_moves_the_cursor():
    assert visible("a\nb\x1b[2Jc\u202e") == "a↵b␛[2Jc‹U+202E›"
    assert visible("12\u00a0%") == "12\u00a0%"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.parquet"], "does not exist"),
        (["{dump}", "--preset", "ver"], "did you mean 'verl'"),
        (["{dump}", "--map", "logprob=nothing"], "has no column 'nothing'"),
        (["{dump}", "--tokenizer", "{dump}"], "tokenizer.json"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(arguments, words, dump, capsys):
    assert main(["inspect", *(word.format(dump=dump) for word in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_a_tokenizer_turns_ids_into_text(dump, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{index} ": index for index in range(48)} | {"?": 48}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    inspection = inspect_path(dump, tokenizer=tmp_path)
    example = inspection.example(inspection.verdicts.disagreements[0].examples[0])
    assert re.fullmatch(r"\s*w\d+\s*", example.token)
    assert any("[" in line and re.search(r"w\d+", line) for line in summary_lines(inspection))
