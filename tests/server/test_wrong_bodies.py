"""Bodies that are wrong in ways that a schema does not show: each is answered with an error, and
the server goes on."""

import json

import pytest

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"Content-Type": "application/json"}
DEEP = "[" * 100_000 + "]" * 100_000

REFUSED = {
    "no JSON": (TEXT, b"{prompt}"),
    "no UTF-8": (TEXT, b'{"prompt": "\xff"}'),
    "no object": (TEXT, b"[1]"),
    "nothing": (TEXT, b""),
    "deep": (TEXT, b'{"prompt": "a", "x": ' + DEEP.encode() + b"}"),
    "deep messages": (CHAT, b'{"messages": ' + DEEP.encode() + b"}"),
    "huge number": (TEXT, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"),
    "large seed": (TEXT, {"prompt": "a", "seed": 2**80}),
    "lone surrogate": (TEXT, {"prompt": "\ud800"}),
    "lone surrogate in a message": (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}),
    "lone surrogate in a role": (CHAT, {"messages": [{"role": "\ud800", "content": "a"}]}),
    "lone surrogate in a stop": (TEXT, {"prompt": "a", "stop": ["\ud800"]}),
    "lone surrogate in a variable": (
        CHAT,
        {"messages": HI, "chat_template_kwargs": {"\ud800": "\ud800", "enable_thinking": "\ud800"}},
    ),
    "lone surrogate in an unknown field": (TEXT, b'{"prompt": 3, "\\ud800": 1}'),
    "NaN": (TEXT, {"prompt": "a", "temperature": float("nan")}),
    "infinite": (TEXT, {"prompt": "a", "top_p": float("inf")}),
    "NaN bias": (TEXT, {"prompt": "a", "logit_bias": {"5": float("nan")}}),
    "bias of a word": (TEXT, {"prompt": "a", "logit_bias": {"the": 1}}),
    "empty prompt": (TEXT, {"prompt": ""}),
    "no prompts": (TEXT, {"prompt": []}),
    "no tokens": (TEXT, {"prompt": [[]]}),
    "foreign tokens": (TEXT, {"prompt": [400]}),
    "negative tokens": (TEXT, {"prompt": [[1], [-1]]}),
    "huge token": (TEXT, {"prompt": [10**30]}),
    "texts and tokens": (TEXT, {"prompt": ["a", [1]]}),
    "too long": (TEXT, {"prompt": [1] * 600}),
    "one of several too long": (TEXT, {"prompt": ["a", "a" * 700], "stream": True}),
    "no tokens to make": (TEXT, {"prompt": "a", "max_tokens": 0}),
    "too many stop tokens": (TEXT, {"prompt": "a", "stop": ""}),
    **{
        f"constraint {number}": (TEXT, {"prompt": "a", "max_tokens": 4, "structured_outputs": one})
        for number, one in enumerate(
            [
                {"regex": "\ud800"},
                {"choice": ["\ud800"]},
                {"choice": []},
                {"choice": "abc"},
                {"grammar": "\ud800"},
                {"grammar": "start: x"},
                # Only the tokenizer shows that there are no such tokens.
                {"grammar": "start: <nope>"},
                {"grammar": "start: <[9999]>"},
                {"json": "{"},
                {"json": {"$ref": "http://127.0.0.1:1/x"}},
                {"json": {"\ud800": "\ud800", "enum": ["\ud800"]}},
                {"json": 3},
                {"regex": "a", "json_object": True},
                {"regex": "a", "start_after": "\ud800"},
                {"regex": "(?<=a)b"},
                {"regex": 7},
            ]
        )
    },
    "format without a schema": (TEXT, {"prompt": "a", "response_format": {"type": "json_schema"}}),
    "more outputs than run at once": (TEXT, {"prompt": "a", "n": 9}),
    "no outputs": (TEXT, {"prompt": "a", "n": 0}),
    "no truncated tokens": (TEXT, {"prompt": "a", "truncate_prompt_tokens": 0}),
    "no messages": (CHAT, {"messages": []}),
    "no role": (CHAT, {"messages": [{"content": "a"}]}),
    "role that is a number": (CHAT, {"messages": [{"role": 3, "content": "a"}]}),
    "content that is a number": (CHAT, {"messages": [{"role": "user", "content": 3}]}),
    "image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ),
    "calls that are none": (
        CHAT,
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [3]}, *HI]},
    ),
    "template arguments": (CHAT, {"messages": HI, "chat_template_kwargs": {"tokenize": True}}),
    "a tool that is none": (CHAT, {"messages": HI, "tools": [3]}),
    "two ends": (CHAT, {"messages": HI, "continue_final_message": True}),
    "continue nothing": (
        CHAT,
        {"messages": [], "continue_final_message": True, "add_generation_prompt": False},
    ),
    "stream options alone": (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}),
    "chat that is too long": (CHAT, {"messages": [{"role": "user", "content": "a" * 700}]}),
    "chat without tokens to make": (CHAT, {"messages": HI, "max_completion_tokens": 0}),
    "text that is none": ("/tokenize", {"prompt": "\ud800"}),
    "tokens that are none": ("/detokenize", {"tokens": [-1]}),
    "huge tokens": ("/detokenize", {"tokens": [2**40]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_bodies_are_refused(server, name):
    path, body = REFUSED[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    got = server.http.post(path, content=content, headers=JSON)
    error = got.json()["error"]
    assert got.status_code == 400 == error["code"], got.text
    assert error["message"] and "\n" not in error["message"]
    assert error["type"] == "BadRequestError"


def test_other_paths_and_methods_have_errors_of_the_same_form(server):
    odd = server.http.post(
        TEXT, content=json.dumps({"prompt": "a", "model": "\ud800"}), headers=JSON
    )
    assert odd.status_code == 404 and r"'\ud800'" in odd.json()["error"]["message"]
    missing = server.http.get("/v2")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "NotFoundError"
    wrong = server.http.get(TEXT)
    assert wrong.status_code == 405 and wrong.json()["error"]["code"] == 405


def test_the_server_has_neither_failed_nor_kept_anything(server):
    server.wait_until_idle()
    assert server.http.post(TEXT, json={"prompt": "a", "max_tokens": 2}).status_code == 200
    assert "Traceback" not in server.log.read_text()
