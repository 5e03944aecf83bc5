"""``estr config``: every key with type, default, allowed values and meaning."""

import json
import tomllib

import pytest

from estr.cli.keys import keys, toml_value
from estr.config import Config
from loop_helpers import estr


def test_every_key_of_every_section_is_told():
    told = {key.path for key in keys()}
    assert told == {
        f"{name}.{key}" for name, field in Config.model_fields.items() for key in field.annotation.model_fields
    }
    for key in keys():
        assert key.description.endswith("."), key.path
        assert key.type, key.path


def test_defaults_are_toml_and_the_configurations_own():
    lines = [f"[{key.section}]\n{key.name} = {toml_value(key.default)}" for key in keys()]
    for key, line in zip(keys(), lines, strict=True):
        assert tomllib.loads(line)[key.section][key.name] == key.default
    assert Config(**_sections()) == Config()


def _sections():
    sections = {}
    for key in keys():
        sections.setdefault(key.section, {})[key.name] = key.default
    return sections


def test_one_key(capsys):
    out = estr(capsys, "config", "rollout.kv").out
    assert 'kv = "keep"' in out
    assert '"keep" | "recompute"' in out
    assert "weight update" in out
    assert out.count("\n") == 3
    assert estr(capsys, "config", "kv").out == out


def test_a_section_and_what_stands_beside_its_keys(capsys):
    out = estr(capsys, "config", "objective").out
    assert "[objective]" in out
    assert "[rollout]" not in out
    assert "estr recipes NAME" in out
    assert '"grpo"' in out
    assert '"stare"' in out
    assert "module:name" in out


def test_bounds_and_types_are_said(capsys):
    told = {line["key"]: line for line in json.loads(estr(capsys, "config", "--json").out)}
    assert told["rollout.top_p"]["allowed"] == "greater than 0 and at most 1"
    assert told["rollout.top_p"]["type"] == "number"
    assert told["learner.controllers"]["type"] == "list of texts"
    assert '"vcpo"' in told["learner.controllers"]["allowed"]
    assert told["run.trackers"]["allowed"] == '"tensorboard" | "wandb" | "trackio"'
    assert '"int4"' in told["rollout.dtype"]["allowed"]
    assert '"calculator"' in told["task.name"]["allowed"]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("rollout.kvv", ["no key 'rollout.kvv'", "did you mean 'kv'?"]),
        ("rolout", ["no section or key 'rolout'", "did you mean 'rollout'?"]),
        ("objective.tau", ["no key 'objective.tau'", "estr recipes NAME"]),
        ("xyzzy", ["no section or key 'xyzzy'; known are learner, model"]),
    ],
)
def test_what_there_is_not(wanted, words, capsys):
    outcome = estr(capsys, "config", wanted)
    assert outcome.status == 2
    for word in words:
        assert word in outcome.complaint
