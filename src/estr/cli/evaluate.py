"""``estr eval``: a model or a run's last checkpoint on held-out problems, with avg@k and pass@k."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from estr.config import Config
from estr.config.load import load_config
from estr.config.validate import validate_config
from estr.errors import UsageError
from estr.models.builtin import resolve_model
from estr.models.load import load_model, merged_state
from estr.runtime.builders import build_task
from estr.runtime.evaluation import Evaluation, Evaluator
from estr.storage.checkpoints import latest_checkpoint
from estr.storage.run_directory import RunDirectory


def evaluate(model: str, sets: list[str], *, samples: int, as_json: bool) -> None:
    """Score ``model`` and print the result."""
    config, path, source = _configured(model, sets)
    validate_config(config, training=False)
    task = build_task(config)
    directory = path or resolve_model(config.model, task)
    loaded = load_model(directory, "float32", config.model.trust_remote_code)
    evaluator = Evaluator(
        config, task, loaded.model, loaded.tokenizer, problems=config.run.eval_prompts, samples=samples
    )
    evaluation = evaluator.evaluate(merged_state(loaded.model))
    result = _result(config, source, evaluation, samples)
    if as_json:
        print(json.dumps(result))
    else:
        _print(result)


def _configured(model: str, sets: list[str]) -> tuple[Config, Path | None, str]:
    """Configuration, model directory (None: as the configuration's model.path resolves) and what is scored."""
    directory = Path(model)
    if (directory / "config.toml").is_file():
        run = RunDirectory.open(directory)
        config, notices = load_config(run.config_path, sets, stored=True)
        latest = latest_checkpoint(run)
        for notice in [*notices, *latest.notices]:
            print(f"note: {notice}", file=sys.stderr)
        if latest.checkpoint is None:
            raise UsageError(
                f"{model} has no {'whole checkpoint' if latest.notices else 'checkpoint yet'}, so there is nothing to "
                "score; train it further"
            )
        return config, latest.checkpoint.path, f"{model}, step {latest.checkpoint.step}"
    config, notices = load_config(None, [f"model.path={json.dumps(model)}", *sets])
    for notice in notices:
        print(f"note: {notice}", file=sys.stderr)
    return config, None, model


def _result(config: Config, source: str, evaluation: Evaluation, samples: int) -> dict[str, Any]:
    powers = sorted({k for k in (1, 2, 4, 8, 16, 32, 64, samples) if k <= samples})
    return {
        "model": source,
        "task": config.task.name,
        "problems": len(evaluation.rewards),
        "samples": samples,
        "temperature": evaluation.temperature,
        f"avg@{samples}": evaluation.mean,
        **{f"pass@{k}": evaluation.pass_at(k) for k in powers},
        "failed": evaluation.failed,
    }


def _print(result: dict[str, Any]) -> None:
    decoding = "greedy" if result["temperature"] == 0 else f"sampled at temperature {result['temperature']:g}"
    print(f"{result['model']} on {result['task']}: {result['problems']} held-out problems, {decoding}")
    for name, value in result.items():
        if "@" in name:
            print(f"{name:>8} {value:.4f}")
    if result["failed"]:
        print(f"{result['failed']} episodes failed and count as 0")
