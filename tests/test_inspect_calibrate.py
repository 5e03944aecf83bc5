"""``estr calibrate``: thresholds from the noise floor, in closed form and on a real engine; and who reads them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from estr.cli.main import main
from estr.config.load import load_config
from estr.diagnostics import estr_keep
from estr.errors import RunError, UsageError
from estr.inspect.calibration import calibrate
from inspect_synthetic import World, simulate, write_ours
from test_inspect_analysis import dump_of

MICRO = """
[run]
steps = 2
eval_every = 0
[model]
path = "builtin:micro"
[rollout]
group_size = 4
max_new_tokens = 10
slots = 16
dtype = "int5"
[learner]
prompts_per_step = 4
minibatches = 2
"""


def noise_of(delta, entropy):
    n = len(delta)
    return dump_of([0] * n, logprob=np.full(n, -1.0), learner_logprob=delta - 1.0, entropy=entropy)


def test_eps_is_where_the_line_of_the_noise_meets_zero():
    rng = np.random.default_rng(0)
    entropy = rng.uniform(0, 3, 20_000)
    delta = np.sqrt(0.02 * (entropy + 0.05)) * rng.choice([-1, 1], len(entropy))
    found = calibrate(noise_of(delta, entropy), 0.99)
    assert found.eps == pytest.approx(0.05, rel=0.02)
    assert found.tau == pytest.approx(0.02, rel=0.02)


def test_the_stated_share_is_kept_and_no_more_than_needed():
    rng = np.random.default_rng(1)
    entropy = rng.gamma(1.0, 1.0, 5000)
    delta = rng.normal(0, 0.05, 5000) * np.sqrt(entropy + 0.1)
    for share in (0.9, 0.99, 0.999):
        found = calibrate(noise_of(delta, entropy), share)
        kept = estr_keep(delta, entropy, tau=found.tau * (1 + 1e-9), eps=found.eps).mean()
        assert share <= kept <= share + 2 / 5000


def test_bins_hold_every_token_once_in_order_of_entropy():
    rng = np.random.default_rng(2)
    entropy = rng.uniform(0, 2, 1000)
    found = calibrate(noise_of(rng.normal(0, 0.1, 1000), entropy), 0.99)
    assert sum(one.count for one in found.bins) == 1000
    assert [one.entropy for one in found.bins] == sorted(one.entropy for one in found.bins)
    assert all(one.low <= one.entropy <= one.high for one in found.bins)


def test_the_noise_of_a_simulated_engine_is_found(tmp_path):
    from estr.inspect.read import read_dump

    world = World(noise=0.05, inter=0, switch=0.0, trajectories=120)
    found = calibrate(read_dump(write_ours(simulate(world), tmp_path / "d.parquet")), 0.99)
    assert found.logit_noise == pytest.approx(0.05, rel=0.05)


def test_what_cannot_be_told_is_said():
    rng = np.random.default_rng(3)
    alike = calibrate(noise_of(rng.normal(0, 0.1, 500), np.full(500, 2.0)), 0.99)
    assert (alike.eps, "too alike" in alike.notes[0]) == (0.01, True)
    assert any("more steps" in note for note in alike.notes)
    same = calibrate(noise_of(np.zeros(500), rng.uniform(0, 2, 500)), 0.5)
    assert same.tau == 1e-6
    assert any("agree exactly" in note for note in same.notes)
    with pytest.raises(RunError, match="200 are needed"):
        calibrate(noise_of(np.zeros(50), np.ones(50)), 0.5)


def test_a_configuration_is_calibrated_and_its_file_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "micro.toml").write_text(MICRO)
    assert main(["calibrate", "micro.toml", "--steps", "4", "--share", "0.98", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value == json.loads((tmp_path / "calibration.json").read_text())
    assert (value["engine"], value["learner"], value["share"]) == ("int5", "float32", 0.98)
    assert value["tokens"] >= 200
    assert 0 < value["tau"] < 1
    assert 0.01 < value["logit_noise"] < 1
    assert not list(tmp_path.glob("estr-calibrate-*"))
    (tmp_path / "train.toml").write_text(
        '[objective]\nrecipe = "estr"\ntau = "calibrated"\ncalibration = "calibration.json"\n'
    )
    config, notices = load_config(tmp_path / "train.toml", [])
    assert config.objective.hyperparameters()["tau"] == value["tau"]
    assert config.objective.hyperparameters()["eps"] == value["eps"]
    assert notices == []


def test_exact_engines_show_next_to_no_noise(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "micro.toml").write_text(MICRO)
    assert main(["calibrate", "micro.toml", "--steps", "3", "--json", "--set", 'rollout.dtype="float32"']) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["logit_noise"] < 1e-3
    assert math.isfinite(value["tau"])


def objective(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(f"[objective]\n{text}\n")
    return load_config(path, [])


def test_calibrated_wants_a_file_that_holds_a_calibration(tmp_path):
    with pytest.raises(UsageError, match=r"needs objective\.calibration"):
        objective(tmp_path, 'tau = "calibrated"')
    with pytest.raises(UsageError, match="cannot be read"):
        objective(tmp_path, f'tau = "calibrated"\ncalibration = "{tmp_path}/none.json"')
    (tmp_path / "bad.json").write_text('{"tau": "high"}')
    with pytest.raises(UsageError, match="holds no calibration"):
        objective(tmp_path, f'tau = "calibrated"\ncalibration = "{tmp_path}/bad.json"')
    (tmp_path / "good.json").write_text('{"tau": 0.5, "eps": 0.02}')
    config, notices = objective(tmp_path, f'tau = "calibrated"\neps = 0.3\ncalibration = "{tmp_path}/good.json"')
    assert config.objective.hyperparameters()["eps"] == 0.02
    assert "objective.eps = 0.3 is left out" in notices[0]


def test_recipes_without_tau_do_not_take_the_word(tmp_path):
    with pytest.raises(UsageError, match="tau"):
        objective(tmp_path, 'recipe = "icepop"\ntau = "calibrated"')


@pytest.mark.parametrize(
    ("arguments", "words"), [(["none.toml"], "none.toml"), (["c.toml", "--share", "1.5"], "--share must lie")]
)
def test_usage_errors(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(MICRO)
    assert main(["calibrate", *arguments]) == 2
    assert words in capsys.readouterr().err
