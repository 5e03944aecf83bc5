"""A vLLM server as an engine: turns are streamed completions, ids in and ids out; weights go through a file in memory.

The server goes on by itself while we look elsewhere, so that tokens can still be on their way when new weights are in
place. Which version sampled a token is therefore never guessed here: the stamp that comes with it says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from estr.engines.vllm.engine import VllmSettings
from estr.engines.vllm.rows import RequestEngine, Row, SampledToken
from estr.engines.vllm.server import VllmServer, connection
from estr.errors import RunError
from estr.models.stops import StopTexts

_LOOK = 0.02  # seconds that a step waits for the first token
_LEAST = -9999.0  # what the server writes for -inf
_ID = "token_id:"


class VllmClient(RequestEngine):
    """See the module's head; the interface is :class:`estr.engines.interface.Engine`. Owns the server."""

    def __init__(self, settings: VllmSettings, server: VllmServer, stops: StopTexts | None = None) -> None:
        super().__init__(slots=settings.slots, max_context=settings.max_context, end_ids=settings.end_ids, stops=stops)
        self.settings, self._server, self._reading = settings, server, settings.reading
        self._version = -1
        self._arrived: queue.SimpleQueue[tuple[str, list[SampledToken] | str]] = queue.SimpleQueue()
        self._tasks: dict[str, Future[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()
        self._client: httpx.AsyncClient = self._wait(self._connect())

    async def _connect(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=str(self._server.socket), limits=httpx.Limits(max_connections=None))
        return httpx.AsyncClient(transport=transport, **connection(self._server))

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ------------------------------------------------------------------ weights

    @property
    def version(self) -> int:
        return self._version

    def set_weights(self, version: int, tensors: Mapping[str, Tensor], *, own: bool = False) -> None:
        """Pause, update, resume; running generations go on under the new weights with their next token."""
        file = self._server.directory / f"{version}.safetensors"
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
        try:
            self._wait(self._update(version, str(file)))
        finally:
            file.unlink()
        self._version = version
        self.counters.syncs += 1
        self._send_again()

    async def _update(self, version: int, path: str) -> None:
        # By default vLLM computes the keys and values of running requests anew, in this mode, too.
        await self._post("/pause?mode=keep&clear_cache=false")
        try:
            await self._post("/start_weight_update")
            await self._post("/update_weights", update_info={"version": version, "path": path})
            await self._post("/finish_weight_update", weight_version=str(version))
            if self.settings.kv == "recompute":
                await self._post("/reset_prefix_cache?reset_running_requests=true")
        finally:
            await self._post("/resume")

    async def _post(self, route: str, **content: Any) -> Any:
        try:
            response = await self._client.post(route, json=content or None)
        except httpx.TransportError as error:
            raise RunError(f"the vLLM server does not answer {route}: {self._server.last_words()}") from error
        if response.status_code != 200:
            raise RunError(f"the vLLM server answered {route} with {response.status_code}: {response.text[:200]}")
        return response.json() if response.content else None

    # ------------------------------------------------------------------ requests

    def _send(self, row: Row) -> None:
        settings = self.settings
        content = self._content(
            row.tokens,
            max_tokens=self._room(row),
            stop_token_ids=list(settings.end_ids),
            logprobs=self._reading.logprobs,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=row.seed,
            stream=True,
            vllm_xargs={"estr": "entropy"},
        )
        self._tasks[row.request] = asyncio.run_coroutine_threadsafe(self._stream(row.request, content), self._loop)

    def _content(self, tokens: Sequence[int], **sampling: Any) -> dict[str, Any]:
        return {
            "model": "policy",
            "prompt": list(tokens),
            "cache_salt": str(self._version),
            "temperature": self.settings.temperature,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "add_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **sampling,
        }

    async def _stream(self, request: str, content: dict[str, Any]) -> None:
        try:
            async with self._client.stream("POST", "/v1/completions", json=content) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    self._arrived.put((request, f"{response.status_code}: {text[:200]}"))
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(request, json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as error:
            self._arrived.put((request, f"{type(error).__name__}: {error}"))

    def _take(self, request: str, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self._arrived.put((request, str(chunk["error"])))
            return
        choice = chunk["choices"][0]
        tokens, logprobs = choice.get("token_ids") or [], choice.get("logprobs")
        if tokens and logprobs:
            rows = zip(tokens, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
            self._arrived.put((request, [self._read(*row) for row in rows]))

    def _read(self, token: int, logprob: float, likely: dict[str, float]) -> SampledToken:
        ids, values = positions(token, logprob, likely, self.settings.vocabulary)
        return self._reading.read(ids, values, self._version)

    def _abort(self, request: str) -> None:
        task = self._tasks.pop(request, None)
        if task is not None:
            task.cancel()  # the server forgets a request whose connection is closed

    def _collect(self) -> list[tuple[str, list[SampledToken]]]:
        found: list[tuple[str, list[SampledToken]]] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._checked(*self._arrived.get(timeout=_LOOK)))
            while True:
                found.append(self._checked(*self._arrived.get_nowait()))
        self.counters.decode_steps += bool(found)
        if not found and not self._server.alive:
            raise RunError(f"the vLLM server ended: {self._server.last_words()}")
        return found

    def _checked(self, request: str, came: list[SampledToken] | str) -> tuple[str, list[SampledToken]]:
        if isinstance(came, str):
            if request not in self._requests:
                return request, []
            raise RunError(f"the vLLM server refused a request: {came}")
        return request, came

    # ------------------------------------------------------------------ canary

    def canary(self, tokens: Sequence[int]) -> np.ndarray:
        """log μ of ``tokens[1:]`` under the active weights, float32 [len - 1], read where tokens are sampled."""
        return np.array(self._wait(self._canary([int(token) for token in tokens])), np.float32)

    async def _canary(self, tokens: list[int]) -> list[float]:
        def ask(place: int) -> Coroutine[Any, Any, Any]:
            wanted = {"estr": tokens[place]}
            content = self._content(tokens[:place], max_tokens=1, logprobs=1, seed=place, vllm_xargs=wanted)
            return self._post("/v1/completions", **content)

        answers = await asyncio.gather(*map(ask, range(1, len(tokens))))
        likely = [answer["choices"][0]["logprobs"]["top_logprobs"][0] for answer in answers]
        return [float(found[f"{_ID}{token}"]) for found, token in zip(likely, tokens[1:], strict=True)]

    def close(self) -> None:
        """End the server."""
        for request in list(self._tasks):
            self._abort(request)
        with contextlib.suppress(Exception):
            self._wait(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._server.close()


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio says of failed callbacks, but for reads from the socket that were cancelled while data came: the
    HTTP client's library gives them a result nevertheless."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


def positions(
    token: int, logprob: float, likely: Mapping[str, float], vocabulary: int
) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities in the order of :meth:`estr.engines.vllm.reading.Reading.read`, from the server's dict
    by token, in which the sampled token and the same one among the most likely are a single entry."""
    found = {int(name.removeprefix(_ID)): value for name, value in likely.items()}
    stamp = [(i, value) for i, value in found.items() if i >= vocabulary]
    others = sorted(((i, value) for i, value in found.items() if i < vocabulary), key=lambda pair: -pair[1])
    pairs = [(token, logprob), *stamp, *((i, -np.inf if value <= _LEAST else value) for i, value in others)]
    return [i for i, _ in pairs], [float(value) for _, value in pairs]
