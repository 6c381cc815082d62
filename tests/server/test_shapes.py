"""Published sizes with random weights behind a server, for load tests."""

import json
from pathlib import Path

import pytest
import torch

from mtpkit.bench.shapes import open_model
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine import LLM, SamplingParams
from tests.server.conftest import SMALL, Server
from tests.server.test_ranks import SplitServer

SHAPE = Path("nemotron-h-tiny")
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPTS = ["the cat", "a", "we re", "don t", "ve"]


@pytest.fixture(scope="module")
def drawn(model_dir) -> LLM:
    """The same shape by what the benches make of it."""
    model = open_model(str(SHAPE), torch.device("cpu"))
    return LLM(model, tokenizer=model_dir, **SMALL, warm_up=False)


@pytest.fixture(scope="module")
def shape_server(model_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("shape") / "server.log"
    server = Server(SHAPE, log, f"--tokenizer={model_dir}", "--data-parallel-size=2")
    yield server
    server.process.kill()
    server.process.join()


def test_every_process_draws_the_weights_of_the_benches(shape_server, drawn):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    wants = drawn.generate(PROMPTS, params, use_tqdm=False)
    body = GREEDY | {"prompt": PROMPTS, "max_tokens": 20}
    choices = shape_server.http.post("/v1/completions", json=body).json()["choices"]
    assert [one["token_ids"] for one in choices] == [want.outputs[0].token_ids for want in wants]
    assert [one["text"] for one in choices] == [want.outputs[0].text for want in wants]
    assert shape_server.http.get("/v1/models").json()["data"][0]["root"] == str(SHAPE)


def test_tokens_that_the_tokenizer_lacks_have_no_text(shape_server, model_dir):
    tokenizer = load_tokenizer(model_dir)
    body = {"prompt": "the cat", "max_tokens": 200, "ignore_eos": True, "seed": 1}
    body |= {"return_token_ids": True, "logprobs": 2, "skip_special_tokens": False}
    found = shape_server.http.post("/v1/completions", json=body).json()["choices"][0]
    tokens = found["token_ids"]
    known = [token for token in tokens if token < len(tokenizer)]
    assert len(tokens) == 200 and 20 < len(known) < 180
    assert found["text"] == tokenizer.decode(known)
    without = [
        text
        for token, text in zip(tokens, found["logprobs"]["tokens"], strict=True)
        if token >= len(tokenizer)
    ]
    assert set(without) == {""}

    response = shape_server.http.post("/v1/completions", json=body | {"stream": True})
    *events, done = [line for line in response.text.splitlines() if line]
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in events]
    assert "".join(pieces) == found["text"] and done == "data: [DONE]"


def test_conversations_constraints_and_lone_tokens_are_answered(shape_server):
    asked = {
        "messages": [{"role": "user", "content": "the cat"}],
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 20,
        "response_format": {"type": "json_object"},
    }
    post = shape_server.http.post
    assert post("/v1/chat/completions", json=asked).status_code == 200
    assert post("/detokenize", json={"tokens": [97, 511]}).json() == {"prompt": "a"}
    lone = post("/v1/completions", json={"prompt": [511], "max_tokens": 2, "echo": True})
    assert lone.status_code == 200
    beyond = post("/v1/completions", json={"prompt": [512], "max_tokens": 2})
    assert beyond.status_code == 400


def test_ranks_draw_their_parts(model_dir, tmp_path):
    server = SplitServer(
        SHAPE, tmp_path / "log", f"--tokenizer={model_dir}", "--tensor-parallel-size=2"
    )
    try:
        body = GREEDY | {"prompt": "the cat", "max_tokens": 12}
        (found,) = server.http.post("/v1/completions", json=body).json()["choices"]
        assert len(found["token_ids"]) == 12
    finally:
        server.ask_to_end()
        for rank in server.ranks:
            rank.join(60)
    assert [rank.exitcode for rank in server.ranks] == [0, 0], server.log.read_text()
