"""A model split over ranks: rank 0 serves, and the others end with it."""

import json

import httpx
import pytest

from mtpkit.engine import SamplingParams
from tests.ranks import as_rank, fork, free_port
from tests.server.conftest import Server, command


class SplitServer(Server):
    """A server of two ranks, as torchrun starts them."""

    def _start(self, words: list[str]):
        port = free_port()
        self.ranks = [
            fork(as_rank, rank, 2, port, command, str(self.log), words) for rank in range(2)
        ]
        return self.ranks[0]


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_ranks_serve_what_one_does(model_dir, llm, tmp_path, kind):
    server = SplitServer(
        model_dir, tmp_path / "log", f"--{kind}-parallel-size=2", "--shutdown-timeout=1"
    )
    try:
        prompts = ["the cat", "a", "we re"]
        wants = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        got = server.client().completions.create(
            model="tiny", prompt=prompts, temperature=0, max_tokens=12
        )
        assert [one.text for one in got.choices] == [want.outputs[0].text for want in wants]
        assert server.metrics()["generation_tokens_total"] == 36

        # A stream that is under way when the server ends, and outlasts its patience.
        body = {"prompt": ["a", "the", "x"] * 20, "max_tokens": 500, "ignore_eos": True}
        stream = httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60
        )
        with stream as response:
            for rank in server.ranks:
                rank.terminate()
            events = [line for line in response.iter_lines() if line]
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert error["code"] == 503 and "shut down" in error["message"]
    finally:
        for rank in server.ranks:
            rank.join(60)
    assert [rank.exitcode for rank in server.ranks] == [0, 0], server.log.read_text()
