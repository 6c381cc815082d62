"""Clients that come and go, engines that die, and servers that end."""

import asyncio
import json
import os
import random
import runpy
import signal
import socket
import sys
import threading
import time
from multiprocessing.context import ForkServerProcess

import httpx
import openai
import psutil
import pytest

from mtpkit.cli.demo import ROOT
from tests.ranks import fork
from tests.server.conftest import SMALL, Server, writing_to

LONG = {"prompt": "the cat", "max_tokens": 500, "ignore_eos": True, "stream": True}


def events(response: httpx.Response) -> list:
    """What the events of a stream hold."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    found = [line.removeprefix("data: ") for line in lines]
    assert found[-1] == "[DONE]"
    return [json.loads(one) for one in found[:-1]]


def test_streams_that_are_dropped_leave_nothing(server):
    """1,000 of them: before their first event, after some, or in a queue; plain requests, too."""
    before = server.wait_until_idle()
    rng = random.Random(1)

    async def drop(client: httpx.AsyncClient, gate: asyncio.Semaphore, index: int) -> None:
        body = LONG | {"stream": index % 5 > 0, "prompt": f"the cat {index % 50}"}
        # Half of the streams leave once they have begun, however long that takes.
        patience = None if index % 5 > 2 else rng.choice((0.001, 0.02, 0.1))
        async with gate:
            try:
                async with asyncio.timeout(patience):
                    async with client.stream("POST", "/v1/completions", json=body) as response:
                        async for _ in response.aiter_lines():
                            if rng.random() < 0.3:
                                return
            except TimeoutError:
                pass

    async def drop_all() -> None:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:
            gate = asyncio.Semaphore(40)
            await asyncio.gather(*(drop(client, gate, index) for index in range(1000)))

    aborted = 'request_success_total{finished_reason="abort"}'
    asyncio.run(drop_all())
    after = server.wait_until_idle()
    assert after[aborted] - before[aborted] >= 300

    # All slots can be had, and the prefix cache keeps checkpoints.
    slots = SMALL["max_num_seqs"]
    with server.http.stream("POST", "/v1/completions", json=LONG | {"prompt": ["a"] * slots}):
        while server.metrics()["num_requests_running"] < slots:
            time.sleep(0.01)
    server.wait_until_idle()
    body = {"prompt": "dropped by nobody " * 8, "max_tokens": 2}
    usages = [server.http.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0 and cached[1] > 0


def test_a_slow_reader_gets_everything(server):
    """Its connection takes in little, and the server waits for it without holding others up."""
    body = LONG | {"return_token_ids": True, "temperature": 0, "max_tokens": 200}
    want = server.http.post("/v1/completions", json=body | {"stream": False}).json()
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        slow.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        time.sleep(0.5)
        quick = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert quick.status_code == 200
        read = b""
        while not read.endswith(b"0\r\n\r\n"):
            read += slow.recv(1024)
            time.sleep(0.0005)
    # An event is a chunk of its own.
    lines = [line for line in read.split(b"\r\n") if line.startswith(b"data: {")]
    choices = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]
    assert "".join(one["text"] for one in choices) == want["choices"][0]["text"]
    tokens = [token for one in choices for token in one["token_ids"]]
    assert tokens == want["choices"][0]["token_ids"] and len(tokens) == 200


def test_a_server_with_a_key_and_a_queue_drains(start):
    server = start("--api-key=secret", "--max-queue=2", "--max-num-seqs=2")
    for path in ("/v1/models", "/openapi.json"):
        assert server.http.get(path).status_code == 401
    for given in ("", "Bearer", "Bearer secre", "secret", "Basic secret", "Bearer sécret"):
        refused = server.http.post(
            "/v1/completions", headers={"Authorization": given.encode()}, json={"prompt": "a"}
        )
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "AuthenticationError"
        assert refused.headers["x-request-id"]
    for path in ("/health", "/ping", "/metrics", "/version"):
        assert server.http.get(path).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()
    client = server.client("secret")
    assert client.models.list().data[0].id == "tiny"

    # Two run and two wait: there is no room for a fifth, and never for five at once.
    long = {"model": "tiny", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    streams = [client.completions.create(prompt="a", stream=True, **long) for _ in range(2)]
    for stream in streams:
        next(stream)
    waiting: list = []

    def wait_in_line() -> None:
        waiting.append(client.completions.create(prompt=["a", "the"], **long))

    thread = threading.Thread(target=wait_in_line)
    thread.start()
    while server.metrics()["num_requests_waiting"] < 2:
        time.sleep(0.01)
    with pytest.raises(openai.RateLimitError, match="try again later") as refused:
        client.completions.create(prompt="a", model="tiny")
    assert refused.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.BadRequestError, match="5 prompts at once, but"):
        client.completions.create(prompt=["a"] * 5, model="tiny")

    # All that is under way ends as ever, and nobody else comes in.
    server.ask_to_end()
    time.sleep(0.3)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    for stream in streams:
        assert list(stream)[-1].choices[0].finish_reason == "length"
    thread.join()
    assert waiting[0].usage.completion_tokens == 400
    assert server.exit_code() == 0


class Group(Server):
    """A server whose processes are a group of their own."""

    def _start(self, words: list[str]) -> ForkServerProcess:
        return fork(in_own_group, str(self.log), words)


def in_own_group(log: str, words: list[str]) -> None:
    """`python infer/serve.py` as leader of a group."""
    os.setpgid(0, 0)
    with writing_to(log):
        sys.argv[1:] = words
        runpy.run_path(str(ROOT / "infer/serve.py"), run_name="__main__")


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_signal_to_all_processes_lets_requests_end(model_dir, tmp_path, replicas):
    """As systemd sends it to a service, and `timeout` to what it runs."""
    server = Group(model_dir, tmp_path / "log", f"--data-parallel-size={replicas}")
    processes = psutil.Process(server.process.pid).children(recursive=True)
    with server.http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        os.killpg(server.process.pid, signal.SIGTERM)
        *_, last, done = [line for line in lines if line]
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert done == "data: [DONE]"
    assert server.exit_code() == 0
    _, alive = psutil.wait_procs(processes, 20)
    assert not alive


def test_a_server_whose_engine_is_killed_says_so_and_ends(start):
    server = start()
    children = psutil.Process(server.process.pid).children()
    (engine,) = (fork for child in children for fork in child.children())
    body = LONG | {"prompt": ["the cat", "a", "b", "c"] * 20}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        engine.kill()
        *_, last = events(response)
    assert last["error"]["code"] == 503 and "has died by signal 9" in last["error"]["message"]
    health = server.http.get("/health")
    assert health.status_code == 503 and health.json()["error"]["code"] == 503
    refused = server.http.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert server.http.get("/metrics").status_code == 200
    assert server.exit_code() == 1
    assert "mtpkit: error: the engine (process" in server.log.read_text()
