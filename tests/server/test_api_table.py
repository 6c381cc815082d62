"""The tables of vLLM's API in the page about serving have the names that there are."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from starlette.routing import Match

import mtpkit
from mtpkit import LLM, SamplingParams
from mtpkit.engine import AsyncLLM
from mtpkit.engine.requests import absent
from mtpkit.server.app import make_app
from mtpkit.server.protocol.chat import ChatRequest
from mtpkit.server.protocol.completions import CompletionRequest
from mtpkit.server.refusals import REFUSED

PAGE = Path(mtpkit.__file__).parent.parent / "docs" / "serving.md"
ROW = re.compile(r"\| (same|other|only here|missing|ignored) \| (.*?) \| (.*) \|")
KINDS = ("same", "other", "only here", "missing", "ignored")


def table(title: str) -> dict[str, list[str]]:
    """The names of a table, by what they are here."""
    section = PAGE.read_text().partition(f"### {title}\n")[2].partition("\n### ")[0]
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for line in section.splitlines():
        if row := ROW.fullmatch(line):
            found[row[1]] += re.findall(r"`([^`]+)`", row[2])
            # What differs is said.
            assert row[3] or row[1] != "other", line
    return found


def arguments(function) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def public(cls) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def is_served(app: FastAPI, path: str) -> bool:
    """Whether a path has a route, also one that the schema does not show."""
    scope = {"type": "http", "path": path, "method": "GET", "root_path": "", "path_params": {}}
    return any(route.matches(dict(scope))[0] is not Match.NONE for route in app.routes)


TABLES = {
    "LLM: arguments": (lambda: arguments(LLM), absent.LLM_ARGUMENTS),
    "LLM: methods": (lambda: public(LLM), absent.LLM_METHODS),
    "LLM.generate": (lambda: arguments(LLM.generate), absent.GENERATE_ARGUMENTS),
    "LLM.chat": (lambda: arguments(LLM.chat), absent.CHAT_ARGUMENTS),
    "AsyncLLM": (lambda: public(AsyncLLM), None),
    "SamplingParams": (lambda: arguments(SamplingParams), absent.SAMPLING_ARGUMENTS),
    "Fields of completions": (lambda: set(CompletionRequest.model_fields), None),
    "Fields of chats": (lambda: set(ChatRequest.model_fields), None),
}


@pytest.mark.parametrize("title", TABLES)
def test_names_are_those_that_there_are(title):
    present, missing = TABLES[title]
    found = table(title)
    every = [name for names in found.values() for name in names]
    assert len(every) == len(set(every))
    here = {*found["same"], *found["other"], *found["only here"]}
    assert here == present()
    assert not present() & {*found["missing"], *found["ignored"]}
    if missing is not None:
        assert set(found["missing"]) == missing.keys()


def test_paths_are_those_that_there_are():
    app = make_app(SimpleNamespace())
    found = table("Paths of the server")
    here = {*found["same"], *found["other"], *found["only here"]}
    assert [path for path in here if not is_served(app, path)] == []
    assert [path for path in found["missing"] if is_served(app, path)] == []
    assert app.openapi()["paths"].keys() <= here


def test_missing_fields_are_those_that_are_refused():
    tables = [table(title) for title in ("Fields of completions", "Fields of chats")]
    missing = {name for found in tables for name in found["missing"]}
    assert missing == REFUSED.keys()
    assert not REFUSED.keys() & {name for found in tables for name in found["ignored"]}
