"""vLLM as a server on a Unix socket: the same numbers, weights in flight, a whole run, and nobody else gets in."""

from __future__ import annotations

import copy
import os
import signal
import socket
import stat
from pathlib import Path

import httpx
import numpy as np
import pytest

from estr.engines.vllm.client import VllmClient, positions
from estr.engines.vllm.engine import VllmSettings
from estr.engines.vllm.server import VllmServer
from estr.errors import RunError
from estr.trajectory import Segment
from loop_helpers import alive, descendants, stored, wait_for
from test_in_process import CANARY, expected, learner
from test_loop import trained
from vllm_models import CONTEXT, TEMPERATURE, VOCABULARY, finish, moved, saved, small_model, tensors


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    path = saved(small_model(True), tmp_path_factory.mktemp("model"))
    settings = VllmSettings(
        path=path, vocabulary=VOCABULARY, max_context=CONTEXT, temperature=TEMPERATURE, slots=8, server=True, topk=4
    )
    server = VllmServer(settings, timeout=850.0)
    client = VllmClient(settings, server)
    yield client, server
    client.close()


def test_weights_reach_a_servers_generations_in_flight(served):
    client, _ = served
    model, models = small_model(True), {}
    for version in range(3):
        models[version] = small_model(True)
        models[version].load_state_dict(moved(model).state_dict())
    client.set_weights(0, tensors(models[0]))
    for key, prompt in {"long": [1, 2, 3, 4], "other": list(range(30, 50))}.items():
        client.start(key, prompt, seed=5, limit=60)
    for version in (1, 2):
        while client.counters.sampled_tokens < 30 * version:
            client.step()
        client.set_weights(version, tensors(models[version]))
        want = learner(copy.deepcopy(models[version]), [_segment(CANARY)])[0]  # the learner changes a model's attention
        assert np.abs(client.canary(CANARY) - want).max() <= 1e-4
    finish(client)
    for key in ("long", "other"):
        row = client.release(key)
        versions = row.version[row.action]
        assert len(versions) == 60
        assert (np.diff(versions) >= 0).all()
        assert len(set(versions.tolist())) >= 2
        for place, want in zip(np.flatnonzero(row.action).tolist(), expected(models, row, "keep"), strict=True):
            assert float(row.logprob[place]) == pytest.approx(float(want[row.tokens[place]]), abs=1e-4)
            assert float(row.entropy[place]) == pytest.approx(float(-(want.exp() * want).sum()), abs=1e-4)
        best = [int(want.argmax()) for want in expected(models, row, "keep")]
        assert row.topk_ids[:, 0].tolist() == best


def _segment(tokens):
    zeros = np.zeros(len(tokens), np.float32)
    return Segment(np.array(tokens, np.int32), np.arange(len(tokens)) > 0, zeros, zeros, zeros.astype(np.int32))


DEVELOPMENT = ["/pause", "/collective_rpc", "/update_weights", "/start_weight_update", "/reset_prefix_cache"]


def test_no_route_can_be_reached_from_another_address(served):
    """No process of the server listens on an address of the network; what would listen there is tried."""
    _, server = served
    listening = _listening([server.pid, *descendants(server.pid)])
    assert {address for address, _ in listening} <= {"127.0.0.1", "::1"}, listening
    for address in {_own_address(), *([] if not listening else ["127.0.0.1"])} - {""}:
        for port in {port for _, port in listening} | {8000}:
            for route in DEVELOPMENT:
                with pytest.raises(httpx.TransportError):
                    httpx.post(f"http://{address}:{port}{route}", timeout=5.0)


def test_only_the_owner_may_reach_the_socket_and_only_with_the_key(served):
    _, server = served
    assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
    assert server.socket.is_socket()
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket)), base_url="http://vllm") as stranger:
        answer = stranger.post("/v1/completions", json={"model": "policy", "prompt": [1], "max_tokens": 1})
    assert answer.status_code == 401
    for pid in [server.pid, *descendants(server.pid)]:
        assert server.key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become somebody else")
def test_another_user_cannot_connect(served, apart):
    _, server = served

    def other() -> str:
        os.setgid(65534)
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(server.socket))
            except OSError as error:
                return type(error).__name__
        return "connected"

    assert apart(other) == "PermissionError"


def test_nothing_of_a_server_outlives_it(served):
    """What happens to a server whose starter was killed: the kernel kills it, and its engine goes with it."""
    client, server = served
    running = [server.pid, *descendants(server.pid)]
    assert len(running) > 1, "an engine process beside the server's own"
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in running), "the server's processes to end", 30.0)
    client.start("late", [1, 2], seed=1, limit=4)
    with pytest.raises(RunError, match="the vLLM server"):
        finish(client)


def _own_address() -> str:
    """An address of this machine that is not loopback; empty where there is none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError:
        return ""
    return next((str(entry[4][0]) for entry in found if not str(entry[4][0]).startswith("127.")), "")


def _listening(pids: list[int]) -> set[tuple[str, int]]:
    """Addresses and ports that these processes listen on."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:
                continue
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pids[0]}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                host, _, port = fields[1].partition(":")
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def test_a_server_that_is_closed_leaves_nothing_behind(tmp_path):
    settings = VllmSettings(path=tmp_path / "nothing", vocabulary=VOCABULARY, max_context=CONTEXT, server=True)
    before = set(Path("/dev/shm").glob("estr-vllm-*"))
    with pytest.raises(RunError, match="ended before it was ready"):
        VllmServer(settings, timeout=850.0)
    assert set(Path("/dev/shm").glob("estr-vllm-*")) == before


def test_a_run_against_a_server(tmp_path, capfd):
    run = trained(tmp_path, run={"steps": 10}, rollout={"vllm_server": True})
    rows = stored(run)
    assert len(rows) == 160
    for row in rows:
        at = row.action
        np.testing.assert_allclose(row.logprob[at], row.learner_logprob[at], atol=1e-4, rtol=0)
        np.testing.assert_allclose(row.entropy[at], row.learner_entropy[at], atol=1e-4, rtol=0)
    others = set(Path("/dev/shm").glob("estr-vllm-*")) - set(Path("/dev/shm").glob(f"estr-vllm-{os.getpid()}-*"))
    assert not others, "the server ended with the run"
    assert "Traceback" not in capfd.readouterr().err


def test_positions_of_the_servers_dict():
    likely = {"token_id:7": -0.5, "token_id:305": 1.25, "token_id:9": -9999.0, "token_id:8": -0.25}
    ids, values = positions(7, -0.5, likely, 300)
    assert ids == [7, 305, 8, 7, 9]
    assert values == [-0.5, 1.25, -0.25, -0.5, -np.inf]
