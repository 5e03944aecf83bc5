"""What the plugin costs inside vLLM, in its own environment: ``.venv-vllm/bin/python -m benchmarks.vllm_entropy``.

One engine in this process decodes batches of one size again and again, in three ways that take turns: vLLM as it is
(the plugin's changes taken out), with the plugin and nobody asking, and with every request asking for its entropy.
Counted are seconds of the processor, so that others on the machine do not matter much; told are medians of the ratios
of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from estr.engines.vllm.engine import VllmEngine, VllmSettings, prepare_environment

prepare_environment()

import torch  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

ROWS, PROMPT, FRESH = 64, 16, 48


def model(vocabulary: int, directory: Path) -> Any:
    """A Qwen3 of width 128 and four layers with random weights."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    made = Qwen3ForCausalLM(config).float()
    made.save_pretrained(directory)
    return made


def decode(engine: VllmEngine, asking: bool, seed: int) -> float:
    """Seconds of the processor for one batch; log μ of the sampled token is always returned."""
    for row in range(ROWS):
        tokens = [(seed * 31 + row * 17 + i) % 300 for i in range(PROMPT)]
        extra = {"estr": "entropy"} if asking else None
        engine._add(f"{seed}-{row}", tokens, max_tokens=FRESH, logprobs=int(asking), extra_args=extra)
    start = time.process_time()
    while engine._engine.has_unfinished_requests():
        engine._engine.step()
    return time.process_time() - start


@contextmanager
def untouched(engine: VllmEngine, originals: tuple[Any, Any]) -> Iterator[None]:
    """vLLM without the plugin."""
    from vllm.v1.sample.sampler import Sampler

    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    processors = runner.input_batch.logitsprocs.argmax_invariant
    ours = [p for p in processors if type(p).__module__.startswith("estr.")]
    patched = Sampler.forward, Sampler.gather_logprobs
    Sampler.forward, Sampler.gather_logprobs = originals
    for processor in ours:
        processors.remove(processor)
    try:
        yield
    finally:
        Sampler.forward, Sampler.gather_logprobs = patched
        processors.extend(ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    from vllm.v1.sample.sampler import Sampler

    originals = Sampler.forward, staticmethod(Sampler.gather_logprobs)
    with tempfile.TemporaryDirectory() as directory:
        weights = model(arguments.vocabulary, Path(directory))
        settings = VllmSettings(directory, arguments.vocabulary, max_context=256, slots=ROWS)
        engine = VllmEngine(settings)
        engine.set_weights(0, dict(weights.named_parameters()))
        seconds: dict[str, list[float]] = {"without": [], "not asking": [], "asking": []}
        for number in range(arguments.rounds + 1):
            with untouched(engine, originals):
                times = [decode(engine, False, 3 * number)]
            times += [decode(engine, asking, 3 * number + 1 + asking) for asking in (False, True)]
            if number:  # the first round warms up
                for name, spent in zip(seconds, times, strict=True):
                    seconds[name].append(spent)
    for name, spent in seconds.items():
        ratios = [one / other for one, other in zip(spent, seconds["without"], strict=True)]
        rate = ROWS * FRESH / statistics.median(spent)
        print(f"{name}: {rate:,.0f} tokens per processor second, {statistics.median(ratios):.3f} of the time without")
    engine.close()


if __name__ == "__main__":
    main()
