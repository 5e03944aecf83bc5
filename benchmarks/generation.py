"""The local engine against transformers' generate and vLLM on the CPU: sampled tokens a second, log-probabilities on.

    python -m benchmarks.generation [--repeats 5] [--threads 1] [--short] [--json PATH]

Same weights (random, d128), same prompts, turns cut short at random (8 of 512 ids end one) or at the limit. ``turns``
runs conversations of three turns whose tools answer after an exponential delay. generate takes one batch of slots after
the other, and between turns waits for the slowest tool of its batch; engine and vLLM keep their slots filled. vLLM
takes part where ``make bench-peers`` has installed it. The cost of the exact entropy is measured by two engines that
take the same steps in turn, one of them without it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import results
from benchmarks.common.peer import Peer
from benchmarks.common.profiling import shares
from benchmarks.common.timing import Spread, alternate, ratio
from benchmarks.common.turns import Script, run
from benchmarks.common.workload import ENDS, new_model, prompts, save_model
from estr.engines import local
from estr.engines.local import EngineSettings, LocalEngine
from estr.engines.sampler import Sampled, invert

ENVIRONMENT = ".venv-vllm"
CONTEXT = 256
PARTS = {
    "matrix products": ("nn.linear", "head.py:_logits", "built-in method torch.mm"),
    "attention": ("scaled_dot_product",),
    "norms": ("rms_norm",),
    "rotary, activation, residual": ("roll", "addcmul", "silu", "mul_", "add_"),
    "keys and values written and moved": ("cache.py",),
    "sampling, log μ, H": ("log_softmax", "'exp'", "cumsum", "searchsorted", "vecdot", "gather", "sampler.py"),
    "rows filed": ("rows.py", "seats.py", "prompts.py"),
}


class Local:
    """Conversations on the local engine."""

    def __init__(self, model: torch.nn.Module, slots: int) -> None:
        settings = EngineSettings(slots=slots, parked=3 * slots, max_context=CONTEXT, end_ids=tuple(range(ENDS)))
        self.engine = LocalEngine(model, settings)
        self.engine.set_weights(0, {name: p.detach() for name, p in model.named_parameters()})
        self._known: set[str] = set()
        self.read = 0  # cached positions that attention had to read, over all sampled tokens

    def begin(self, key: str, tokens: list[int], fresh: int, seed: int, limit: int) -> None:
        if key in self._known:
            assert self.engine.extend(key, tokens[-fresh:], seed=seed, limit=limit)
        else:
            self._known.add(key)
            self.engine.start(key, tokens, seed=seed, limit=limit)

    def step(self) -> list[tuple[str, list[int]]]:
        return [(turn.key, turn.tokens) for turn in self.engine.step()]

    def end(self, key: str) -> None:
        self._known.remove(key)
        segment = self.engine.release(key)
        self.read += int(segment.action.nonzero()[0].sum())

    @property
    def busy(self) -> bool:
        return self.engine.busy


def generate_batches(model: Any, script: Script, slots: int) -> tuple[int, float]:
    """What a script around transformers' generate does, batch after batch."""
    sampled, start = 0, time.perf_counter()
    torch.manual_seed(script.seed)
    for first in range(0, len(script.prompts), slots):
        histories = [list(prompt) for prompt in script.prompts[first : first + slots]]
        for turn in range(1, script.turns + 1):
            for history, tokens in zip(histories, _generate(model, histories, script.limit), strict=True):
                history += tokens
                sampled += len(tokens)
            if turn < script.turns:
                numbers = range(first, first + len(histories))
                time.sleep(max(script.delay(number, turn) for number in numbers))
                for number, history in zip(numbers, histories, strict=True):
                    history += script.answer(number, turn)
    return sampled, time.perf_counter() - start


def _generate(model: Any, histories: list[list[int]], limit: int) -> list[list[int]]:
    width = max(map(len, histories))
    ids = torch.tensor([[0] * (width - len(h)) + h for h in histories])
    mask = torch.tensor([[0] * (width - len(h)) + [1] * len(h) for h in histories])
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=limit,
            eos_token_id=list(range(ENDS)),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[:, width:]
        logprob = torch.stack(output.logits, 1).log_softmax(-1).gather(-1, tokens[..., None])
    assert logprob.shape[:2] == tokens.shape
    return [_until_end(row) for row in tokens.tolist()]


def _until_end(tokens: list[int]) -> list[int]:
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token < ENDS), tokens)


def _rates(contestants: dict[str, Any], script: dict[str, Any], repeats: int) -> dict[str, Spread]:
    """Tokens a second, every contestant in turn; each round has seeds of its own."""
    rounds = dict.fromkeys(contestants, 0)

    def measure(name: str) -> float:
        rounds[name] += 1
        tokens, seconds = contestants[name](Script(**script, seed=rounds[name]))
        return float(tokens / seconds)

    return alternate({name: lambda name=name: measure(name) for name in contestants}, repeats)  # type: ignore[misc]


def _without_entropy(logits: torch.Tensor, temperature: float, uniform: torch.Tensor) -> Sampled:
    logprob = torch.log_softmax(logits.float() / temperature, dim=-1)
    token = invert(logprob.exp(), uniform)
    return Sampled(token, logprob.gather(-1, token[:, None])[:, 0], torch.zeros(len(token)))


def entropy_cost(model: torch.nn.Module, script: Script, slots: int) -> float:
    """Seconds with the exact entropy over seconds without, two engines taking the same steps in turn."""
    engines = {True: Local(model, slots), False: Local(model, slots)}
    with_entropy, seconds = local.sample, {True: 0.0, False: 0.0}
    for engine in engines.values():
        for number, tokens in enumerate(script.prompts):
            engine.begin(str(number), tokens, len(tokens), number, script.limit)
    try:
        turn = 0
        while engines[True].busy:
            turn += 1
            for exact in (True, False) if turn % 2 else (False, True):
                local.sample = with_entropy if exact else _without_entropy
                start = time.perf_counter()
                ended = engines[exact].step()
                seconds[exact] += time.perf_counter() - start
                for key, _ in ended:
                    engines[exact].end(key)
    finally:
        local.sample = with_entropy
    return seconds[True] / seconds[False]


def limit_seconds(model: Any, engine: Local, script: Script, machine: dict[str, Any]) -> tuple[float, float]:
    """Seconds the run takes, and those its multiplications and cache reads alone would take at the machine's rates."""
    engine.engine.counters.prefilled_tokens = engine.read = 0
    sampled, seconds = run(engine, script)
    config = model.config
    tokens = sampled + engine.engine.counters.prefilled_tokens
    body = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    head = config.vocab_size * config.hidden_size
    flops = 2 * (body * tokens + head * sampled)
    cache = engine.read * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    return seconds, flops / machine["gemm_float32_gflops"] / 1e9 + cache / machine["memory_gb_per_s"] / 1e9


def main() -> None:
    options = results.parser(__doc__)
    options.add_argument("--slots", type=int, default=64)
    arguments = options.parse_args()
    slots, groups = arguments.slots, 32
    if arguments.short:
        slots, groups, arguments.repeats = 8, 2, 1
    result = results.begin("generation", arguments, slots=slots, prompts=8 * groups, model="d128, 4 layers, V 512")
    with ExitStack() as stack:
        _measure(result, arguments, slots, groups, stack)
    results.finish(result, arguments.json)


def _measure(result: results.Result, arguments: argparse.Namespace, slots: int, groups: int, stack: ExitStack) -> None:
    torch.set_num_threads(arguments.threads)
    repeats, model, library = arguments.repeats, new_model(), new_model()
    engine = Local(model, slots)
    contestants: dict[str, Any] = {
        "estr": lambda script: run(engine, script),
        "generate": lambda script: generate_batches(library, script, slots),
    }
    if Peer.installed(ENVIRONMENT) and not arguments.short:
        contestants["vllm"] = _vllm(result, stack, slots, arguments.threads)
    else:
        result.notes.append("vLLM did not take part: not installed (make bench-peers), or the short form")
    plain = {"prompts": prompts(groups, 8), "limit": 96}
    tools = {"prompts": prompts(groups, 8, seed=1), "limit": 32, "turns": 3, "wait": 0.1}
    if arguments.short:
        plain["limit"], tools["limit"] = 12, 6
    for title, script in (("one turn", plain), ("three turns, tools of 0.1 s", tools)):
        rates = _rates(contestants, script, repeats if script is plain else max(1, repeats - 2))
        for name, rate in rates.items():
            result.measured(f"{title}: {name}", rate, "sampled tokens/s")
        result.ratio(f"{title}: estr / generate", ratio(rates["estr"], rates["generate"]), aim=2.0)
        if "vllm" in rates:
            result.ratio(f"{title}: estr / vLLM", ratio(rates["estr"], rates["vllm"]), aim=1.5)
    costs = Spread(tuple(entropy_cost(model, Script(**plain), slots) for _ in range(repeats)))
    result.ratio("time with exact entropy / without", costs, aim=1.03, higher=False)
    spans = [limit_seconds(model, engine, Script(**plain, seed=50 + i), result.machine) for i in range(repeats)]
    result.ratio("machine's limit / engine's time", Spread(tuple(least / took for took, least in spans)))
    result.profile["decode loop"] = shares(lambda: run(engine, Script(**plain, seed=99)), PARTS)


def _vllm(result: results.Result, stack: ExitStack, slots: int, threads: int) -> Any:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    save_model(directory)
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    peer = stack.enter_context(Peer(ENVIRONMENT, "benchmarks.peers.vllm_peer", threads, **variables))
    loaded = peer.ask(do="load", path=str(directory), slots=slots, context=CONTEXT, ends=ENDS)
    result.settings["vllm"] = loaded["version"]

    def measure(script: Script) -> tuple[int, float]:
        answer = peer.ask(do="measure", **vars(script))
        return answer["tokens"], answer["seconds"]

    return measure


if __name__ == "__main__":
    main()
