"""vLLM on the CPU as a contestant; runs in its own environment and is asked through pipes."""

from __future__ import annotations

from typing import Any

from benchmarks.common.peer import serve
from benchmarks.common.turns import Script, run

BLOCK = 32  # tokens; a prefix is shared in whole blocks, and prompts here are shorter than the 128 of its default


class Vllm:
    """Turns on vLLM's engine, in this process: log-probabilities on, prefixes cached, no seeds (they end it)."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._names: dict[str, str] = {}
        self._count = 0

    def load(self, path: str, slots: int, context: int, ends: int) -> dict[str, Any]:
        import vllm

        self._vllm, self._ends = vllm, list(range(ends))
        model = vllm.LLM(
            model=path,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            block_size=BLOCK,
            max_model_len=context,
            max_num_seqs=slots,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
        )
        self._engine = model.llm_engine
        return {"version": vllm.__version__}

    def measure(self, **script: Any) -> dict[str, Any]:
        tokens, seconds = run(self, Script(**script))
        return {"tokens": tokens, "seconds": seconds}

    def begin(self, key: str, tokens: list[int], fresh: int, seed: int, limit: int) -> None:
        params = self._vllm.SamplingParams(
            temperature=1.0, max_tokens=limit, logprobs=0, stop_token_ids=self._ends, detokenize=False
        )
        self._count += 1
        self._names[str(self._count)] = key
        self._engine.add_request(str(self._count), {"prompt_token_ids": tokens}, params)

    def step(self) -> list[tuple[str, list[int]]]:
        ended = [output for output in self._engine.step() if output.finished]
        for output in ended:
            assert output.outputs[0].logprobs is not None
        return [(self._names.pop(o.request_id.split("-")[0]), list(o.outputs[0].token_ids)) for o in ended]

    def end(self, key: str) -> None:
        pass

    @property
    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())


if __name__ == "__main__":
    peer = Vllm()
    serve({"load": peer.load, "measure": peer.measure})
