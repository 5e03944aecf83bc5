"""TRL's GRPOTrainer on the CPU as a contestant; runs in its own environment and is asked through pipes."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch

from benchmarks.common.peer import serve


class Clock:
    """When each optimizer step began."""

    def __init__(self) -> None:
        from transformers import TrainerCallback

        outer = self
        self.times: list[float] = []

        class Callback(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                outer.times.append(time.perf_counter())

            def on_train_end(self, *args: Any, **kwargs: Any) -> None:
                outer.times.append(time.perf_counter())

        self.callback = Callback()


_lengths: list[int] = []  # tokens of every completion


def reward(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of even digits; the benchmark's own task has the same."""
    _lengths.extend(map(len, completion_ids))
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [sum(ch in "02468" for ch in text) / (1 + len(text)) for text in texts]


class Trl:
    def _trainer(self, path: str, prompts: list[Any], settings: dict[str, Any], clock: Clock | None = None) -> Any:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        torch.set_num_threads(settings.pop("threads"))
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            beta=0.0,
            temperature=1.0,
            top_k=0,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            **settings,
        )
        return GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=AutoTokenizer.from_pretrained(path),
            callbacks=[clock.callback] if clock else None,
        )

    def load(self, path: str, threads: int, batch: int, group_size: int) -> dict[str, Any]:
        """A trainer whose inputs are given, for :meth:`learn`."""
        import trl

        settings = {"per_device_train_batch_size": batch, "num_generations": group_size, "threads": threads}
        self.trainer = self._trainer(path, ["t9"] * batch, settings)
        self.trainer.create_optimizer_and_scheduler(1000)
        self.trainer._prepare_inputs = lambda inputs: inputs
        self.trainer.current_gradient_accumulation_steps = 1
        return {"version": trl.__version__}

    def learn(self, rollouts: list[tuple[list[int], list[int], float]]) -> dict[str, Any]:
        """Seconds of one full step: loss, backward, clipping, optimizer."""
        start = time.perf_counter()
        inputs = self._inputs(rollouts)
        model = self.trainer.model
        model.train()
        self.trainer.training_step(model, inputs, None)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.trainer.optimizer.step()
        model.zero_grad()
        return {"seconds": time.perf_counter() - start}

    def _inputs(self, rollouts: list[tuple[list[int], list[int], float]]) -> dict[str, torch.Tensor]:
        left = max(len(prompt) for prompt, _, _ in rollouts)
        right = max(len(completion) for _, completion, _ in rollouts)

        def row(tokens: list[int], width: int, before: bool) -> list[int]:
            padding = [0] * (width - len(tokens))
            return padding + tokens if before else tokens + padding

        prompt = torch.tensor([row(p, left, True) for p, _, _ in rollouts])
        completion = torch.tensor([row(c, right, False) for _, c, _ in rollouts])
        mask = torch.tensor([row([1] * len(c), right, False) for _, c, _ in rollouts])
        return {
            "prompt_ids": prompt,
            "prompt_mask": torch.tensor([row([1] * len(p), left, True) for p, _, _ in rollouts]),
            "completion_ids": completion,
            "completion_mask": mask,
            "advantages": torch.tensor([a for _, _, a in rollouts]),
            "num_items_in_batch": mask.sum(),
        }

    def train(self, path: str, prompts: list[Any], steps: int, threads: int, **settings: Any) -> dict[str, Any]:
        """A whole run; seconds of each optimizer step, generation and all, and the mean completion length."""
        clock = Clock()
        _lengths.clear()
        trainer = self._trainer(path, prompts, {"threads": threads, "max_steps": steps, **settings}, clock)
        trainer.train()
        return {
            "seconds": [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)],
            "mean_length": sum(_lengths) / max(1, len(_lengths)),
        }


if __name__ == "__main__":
    peer = Trl()
    serve({"load": peer.load, "learn": peer.learn, "train": peer.train})
