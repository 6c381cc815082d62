"""A tiny model with a tokenizer and a chat template, and a server of it in processes of its own."""

import atexit
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from transformers import AddedToken

from mtpkit.checkpoint import save_hf_model
from mtpkit.cli import run
from mtpkit.cli.serve import app
from mtpkit.engine import LLM
from mtpkit.model import build_model
from tests.data.chat_families import QWEN35, SPECIAL, TOKENS
from tests.engine.tiny import tiny_config
from tests.engine.tokenizers import byte_level
from tests.ranks import fork, preload

SMALL = {"num_blocks": 400, "block_size": 8, "max_num_seqs": 8, "num_speculative_tokens": 2}
"""Settings of the engines that are compared."""
LONGEST = 600


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a model whose outputs are bytes at random, many of them parts of characters."""
    directory = tmp_path_factory.mktemp("served")
    tokenizer = byte_level()
    for tokens, special in ((SPECIAL, True), (TOKENS, False)):
        tokenizer.add_tokens(
            [AddedToken(token, special=special, normalized=False) for token in tokens]
        )
    tokenizer.chat_template = QWEN35
    tokenizer.save_pretrained(directory)
    config = tiny_config().replace(vocab_size=400, max_position_embeddings=LONGEST)
    save_hf_model(build_model(config, device="cpu", seed=1), directory)
    return directory


@pytest.fixture(scope="session")
def llm(model_dir: Path) -> LLM:
    """What the server's outputs are compared with."""
    return LLM(model_dir, **SMALL, warm_up=False)


class Server:
    """A server in a process of its own."""

    def __init__(self, model: Path, log: Path, *options: object) -> None:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
        words = [str(model), "--port=0", "--served-model-name=tiny", "--no-warm-up", *flags]
        self.log = log
        self.log.touch()
        preload("mtpkit.engine.processes")
        self.process = self._start([*words, *map(str, options)])
        self.url = self._wait_for_url()
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _start(self, words: list[str]) -> ForkServerProcess:
        return fork(command, str(self.log), words)

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.is_alive():
            if found := re.search(r"serving tiny on (http://\S+)", self.log.read_text()):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"the server did not start: {self.log.read_text()}")

    def client(self, key: str = "none") -> OpenAI:
        """The official client."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def metrics(self) -> dict[str, float]:
        """The metrics without histograms' buckets, by name without prefix."""
        lines = self.http.get("/metrics").text.splitlines()
        samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        label = re.compile(r',?model_name="tiny"|vllm:')
        short = [(label.sub("", name), float(value)) for name, _, value in samples]
        found = {name.replace("{,", "{").replace("{}", ""): value for name, value in short}
        return {name: value for name, value in found.items() if "_bucket" not in name}

    def wait_until_idle(self) -> dict[str, float]:
        """Wait until the engine holds nothing; returns the metrics."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        for _ in range(400):
            found = self.metrics()
            if not any(found[name] for name in names):
                return found
            time.sleep(0.05)
        raise AssertionError(f"the engine still holds something: {found}")

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        self.process.terminate()

    def exit_code(self) -> int | None:
        """Wait until the server has ended."""
        self.process.join(60)
        return self.process.exitcode


def command(log: str, words: list[str]) -> None:
    """`mtpkit serve`, whose output goes to a file."""
    with writing_to(log):
        run(app, words)


@contextmanager
def writing_to(log: str) -> Iterator[None]:
    """Send the output of this process, which ends then, to a file."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    try:
        yield
    finally:
        # Processes of multiprocessing end without exit handlers.
        atexit._run_exitfuncs()


@pytest.fixture(scope="session")
def start(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Starts servers with options, which end with the session."""
    servers: list[Server] = []

    def start(*options: object) -> Server:
        log = tmp_path_factory.mktemp("log") / "server.log"
        servers.append(Server(model_dir, log, *options))
        return servers[-1]

    yield start
    for one in servers:
        if one.process.is_alive():
            one.process.kill()
        one.process.join()


@pytest.fixture(scope="session")
def server(start: Callable[..., Server]) -> Server:
    """A server that tests share, which leave it as it was."""
    return start()
