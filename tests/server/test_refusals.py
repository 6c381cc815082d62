"""What the page about serving says of refused and ignored fields is what the server does."""

import json
import re
import shutil
from pathlib import Path

import pytest

import mtpkit
from mtpkit.server.refusals import REFUSED, SILENT
from tests.server.conftest import LONGEST, Server

PAGE = Path(mtpkit.__file__).parent.parent / "docs" / "serving.md"
ROW = re.compile(r"\| ([a-z, ]+) \| `(\{.*\})` \| (\d+)(?:: (.*))? \|")
ROWS = [found.groups() for line in PAGE.read_text().splitlines() if (found := ROW.fullmatch(line))]
PROMPTS = {
    "completions": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}]},
}

OTHERS = re.findall(r"^\| ([^|]+) \| (\d+): ([^|]*) ?\|$", PAGE.read_text(), re.MULTILINE)
"""Requests in words, and how the answers begin."""


@pytest.mark.parametrize(("paths", "fields", "status", "begin"), ROWS)
def test_the_table_says_what_the_server_does(server, paths, fields, status, begin):
    for path in paths.split(", "):
        body = {"max_tokens": 3, **PROMPTS[path], **json.loads(fields)}
        place = "/v1/completions" if path == "completions" else "/v1/chat/completions"
        got = server.http.post(place, json=body)
        assert got.status_code == int(status), got.text
        if begin:
            assert got.json()["error"]["message"].startswith(begin)


@pytest.fixture(scope="module")
def bare_server(model_dir, tmp_path_factory):
    """Takes in two prompts at once, and has no chat template."""
    directory = tmp_path_factory.mktemp("bare")
    shutil.copytree(model_dir, directory / "model")
    (directory / "model" / "chat_template.jinja").unlink()
    log = directory / "server.log"
    server = Server(directory / "model", log, "--max-num-seqs=1", "--max-queue=1")
    yield server
    server.process.kill()
    server.process.join()


@pytest.mark.parametrize(("request_", "status", "begin"), OTHERS)
def test_what_depends_on_the_server_is_refused_as_the_page_says(
    bare_server, request_, status, begin
):
    http = bare_server.http
    (fields,) = (body for words, body in DEPENDING.items() if words in request_)
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    long = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=long) as running:
        lines = running.iter_lines()
        next(lines)
        got = [http.post(path, json=fields)]
        if "messages" in fields:
            got.append(http.post(path, json=fields | {"stream": True}))
            got.append(http.post("/tokenize", json=fields))
    for answer in got:
        assert answer.status_code == int(status), answer.text
        assert answer.json()["error"]["message"].startswith(begin.strip())
        assert ("retry-after" in answer.headers) is (status == "429")


DEPENDING = {
    "no chat template": PROMPTS["chat"],
    "leaves no room": {"prompt": [65] * LONGEST},
    "ever takes in": {"prompt": ["a"] * 3},
    "prompts beyond": {"prompt": ["a"] * 2},
}


def test_the_table_has_all_refused_fields():
    refused = {
        name for _, fields, status, _ in ROWS if status == "400" for name in json.loads(fields)
    }
    assert len(ROWS) > 30 and REFUSED.keys() <= refused


def test_unknown_fields_are_warned_of_once(server):
    odd = {"prompt": "a", "max_tokens": 1, "never_heard_of": [1], **dict.fromkeys(SILENT, "x")}
    for _ in range(3):
        assert server.http.post("/v1/completions", json=odd).status_code == 200
    log = server.log.read_text()
    assert log.count("unknown field 'never_heard_of', which is ignored") == 1
    assert not any(name in log for name in SILENT)
