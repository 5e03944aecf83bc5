import dataclasses
import math
import subprocess
import sys

import pytest
import torch

from estr.config.sections import ModelConfig
from estr.environments.calculator import CalculatorTask
from estr.errors import UsageError
from estr.models import builtin, warmup
from estr.models.builtin import new_model, resolve_model
from estr.models.load import load_model
from estr.models.tokenizer import builtin_tokenizer
from estr.models.warmup import Row, WarmupConfig, demonstration_rows, rate_share, row_loss, warm_up

TOKENIZER = builtin_tokenizer()
SHORT = WarmupConfig(steps=6, tokens=400)


class Finite(CalculatorTask):
    """A task whose demonstrations end: three, counted from the seed."""

    name = "finite"

    def demonstrations(self, seed):
        yield from (
            [{"role": "user", "content": f"{seed}"}, {"role": "assistant", "content": f"{n}"}] for n in range(3)
        )


class Silent(CalculatorTask):
    name = "silent"

    def demonstrations(self, seed):
        return iter(())


def quiet(step, steps, loss):
    pass


def micro():
    return new_model("builtin:micro", TOKENIZER)


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_only_what_the_policy_would_sample_is_an_action():
    messages = [
        {"role": "user", "content": "4+4?"},
        {"role": "assistant", "content": "<calc>4+4</calc>"},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": "#### 8"},
    ]
    (row,) = demonstration_rows(TOKENIZER, messages, ("</calc>",))
    pieces = [(TOKENIZER.decode([token]), flag) for token, flag in zip(row.tokens, row.action, strict=True)]
    assert "".join(piece for piece, flag in pieces if flag) == "<calc>4+4</calc>#### 8<|end|>"
    assert "".join(piece for piece, _ in pieces) == (
        "<|user|>4+4?<|end|><|assistant|><calc>4+4</calc><|end|><|tool|>8<|end|><|assistant|>#### 8<|end|>"
    )


def test_a_forked_history_becomes_two_rows():
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content']", "(message['content'] if loop.last else message['content'].split('!')[-1])"
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "thought!b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    rows = demonstration_rows(tokenizer, messages, ())
    assert [tokenizer.decode(row.tokens) for row in rows] == [
        "<|user|>a<|end|><|assistant|>thought!b<|end|>",
        "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|>",
    ]


def test_loss_is_the_mean_over_actions_of_plain_cross_entropy():
    model = micro().eval()
    rows = [Row([3, 9, 70, 71, 1], [False, False, True, True, True]), Row([3, 80, 4], [False, True, False])]
    warmup.prepare_model(model)
    expected = []
    for row in rows:
        with torch.no_grad():
            logprob = model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0].log_softmax(-1)
        expected += [-logprob[i - 1, row.tokens[i]] for i in range(len(row.tokens)) if row.action[i]]
    torch.testing.assert_close(row_loss(model, rows), torch.stack(expected).mean(), rtol=1e-5, atol=1e-5)


def test_learning_rate_by_hand():
    config = WarmupConfig(steps=110, warmup=1 / 11, floor=0.1)
    rates = [rate_share(config, step) for step in (0, 9, 10, 60, 110)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.1 + 0.9 / 2, 0.1])


def test_it_learns_and_is_deterministic(tmp_path):
    one, two, losses = micro(), micro(), []
    warm_up(one, TOKENIZER, CalculatorTask(), SHORT, tmp_path / "a", lambda step, steps, loss: losses.append(loss))
    warm_up(two, TOKENIZER, CalculatorTask(), SHORT, tmp_path / "b", quiet)
    assert same(one, two)
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 1
    assert not same(one, micro())


def test_interrupted_and_resumed_gives_the_same_weights(tmp_path):
    whole, partial, resumed = micro(), micro(), micro()
    warm_up(whole, TOKENIZER, CalculatorTask(), SHORT, tmp_path / "a", quiet)

    def interrupt(step, steps, loss):
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_up(partial, TOKENIZER, CalculatorTask(), SHORT, tmp_path / "b", interrupt, checkpoint_seconds=0)
    steps = []
    final = warm_up(resumed, TOKENIZER, CalculatorTask(), SHORT, tmp_path / "b", lambda s, n, loss: steps.append(s))
    assert steps == [4, 5, 6]
    assert same(whole, resumed)
    assert math.isfinite(final)


def test_a_checkpoint_of_another_warm_up_or_a_broken_one_is_not_used(tmp_path):
    warm_up(micro(), TOKENIZER, CalculatorTask(), SHORT, tmp_path, quiet, checkpoint_seconds=0)
    other = dataclasses.replace(SHORT, steps=1)
    steps = []
    warm_up(micro(), TOKENIZER, CalculatorTask(), other, tmp_path, lambda s, n, loss: steps.append(s), 0)
    assert steps == [1]
    (tmp_path / "state.safetensors").write_bytes(b"rubbish")
    warm_up(micro(), TOKENIZER, CalculatorTask(), other, tmp_path, quiet)


def test_a_finite_stream_goes_round_under_other_seeds(tmp_path):
    stream = warmup.demonstrations(Finite(), 7)
    prompts = [next(stream)[0]["content"] for _ in range(7)]
    assert prompts[:3] == ["7"] * 3
    assert len(set(prompts)) == 3
    with pytest.raises(UsageError, match="no demonstrations"):
        warm_up(micro(), TOKENIZER, Silent(), SHORT, tmp_path, quiet)


def test_plain_lines_off_a_terminal(tmp_path, capsys):
    warm_up(micro(), TOKENIZER, CalculatorTask(), dataclasses.replace(SHORT, steps=1), tmp_path)
    assert "warm-up: step 1 of 1, loss" in capsys.readouterr().err


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ESTR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_resolve_is_cached_by_what_determines_the_model(cache):
    config = ModelConfig(path="builtin:micro", warmup_steps=2)
    calls = []
    first = resolve_model(config, CalculatorTask(), progress=lambda *a: calls.append(a))
    again = resolve_model(config, CalculatorTask(seed=5), progress=lambda *a: calls.append(a))
    assert first == again
    assert first.parent == cache
    assert len(calls) == 2
    others = {
        resolve_model(ModelConfig(path="builtin:micro", warmup_steps=1), CalculatorTask(), progress=quiet),
        resolve_model(config, CalculatorTask(no_call=0.0), progress=quiet),
        resolve_model(config, Finite(), progress=quiet),
        resolve_model(ModelConfig(path="builtin:micro"), CalculatorTask(), progress=quiet),
    }
    assert len(others | {first}) == 5
    assert {path.name for path in cache.iterdir() if path.is_dir()} == {path.name for path in others | {first}}


def test_micro_is_random_with_a_fixed_seed_for_every_task(cache):
    path = resolve_model(ModelConfig(path="builtin:micro"), CalculatorTask())
    assert path == resolve_model(ModelConfig(path="builtin:micro"), Silent())
    assert same(load_model(path, "float32").model, micro())


def test_a_task_without_demonstrations_starts_from_random_weights(cache, caplog):
    path = resolve_model(ModelConfig(path="builtin:tiny"), Silent())
    assert "random weights" in caplog.text
    assert same(load_model(path, "float32").model, new_model("builtin:tiny", TOKENIZER))


def test_the_cache_directory(monkeypatch):
    monkeypatch.delenv("ESTR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(builtin.cache_directory()) == "/somewhere/estr"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(builtin.cache_directory()).endswith("/.cache/estr")


def test_a_killed_process_goes_on(tmp_path):
    program = f"""
import time
from pathlib import Path
from estr.environments.calculator import CalculatorTask
from estr.models.builtin import new_model
from estr.models.tokenizer import builtin_tokenizer
from estr.models.warmup import WarmupConfig, warm_up

def report(step, steps, loss):
    if step == 4:
        print("fourth", flush=True)
        time.sleep(600)

tokenizer = builtin_tokenizer()
config = WarmupConfig(steps={SHORT.steps}, tokens={SHORT.tokens})
warm_up(new_model("builtin:micro", tokenizer), tokenizer, CalculatorTask(), config, Path({str(tmp_path)!r}), report, 0)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "fourth\n"
        process.kill()
    steps, resumed, whole = [], micro(), micro()
    warm_up(resumed, TOKENIZER, CalculatorTask(), SHORT, tmp_path, lambda step, *rest: steps.append(step))
    assert steps == [4, 5, 6]
    warm_up(whole, TOKENIZER, CalculatorTask(), SHORT, tmp_path / "other", quiet)
    assert same(whole, resumed)
