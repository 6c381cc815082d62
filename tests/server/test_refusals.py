"""What the page about serving says of refused and ignored fields is what the server does."""

import json
import re
from pathlib import Path

import pytest

import mtpkit
from mtpkit.server.refusals import REFUSED, SILENT

PAGE = Path(mtpkit.__file__).parent.parent / "docs" / "serving.md"
ROW = re.compile(r"\| ([a-z, ]+) \| `(\{.*\})` \| (\d+)(?:: (.*))? \|")
ROWS = [found.groups() for line in PAGE.read_text().splitlines() if (found := ROW.fullmatch(line))]
PROMPTS = {
    "completions": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize(("paths", "fields", "status", "begin"), ROWS)
def test_the_table_says_what_the_server_does(server, paths, fields, status, begin):
    for path in paths.split(", "):
        body = {"max_tokens": 3, **PROMPTS[path], **json.loads(fields)}
        place = "/v1/completions" if path == "completions" else "/v1/chat/completions"
        got = server.http.post(place, json=body)
        assert got.status_code == int(status), got.text
        if begin:
            assert got.json()["error"]["message"].startswith(begin)


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
