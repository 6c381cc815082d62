"""Serve a model to clients that ask rightly and wrongly, leave early and come back, and check every
answer.

    python -m benchmarks.soak                            # 20 minutes on the tiny base
    python -m benchmarks.soak --model DIR --seconds 60   # a model with heads

Whole answers must be those of `LLM`, whatever else the server does at the time: completions and
chats, streamed or not, greedy or drawn, several outputs, log-probabilities, constraints, stop
strings, prompts of a few tokens and of hundreds. Wrong requests must be answered with an error of
theirs. When all clients have gone, no request may run or wait, no block may be in use, every slot
and nearly every block must be there for others, and memory must be what it was.
"""

import argparse
import asyncio
import base64
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from mtpkit.cli.errors import run
from mtpkit.engine import LLM, RequestOutput
from mtpkit.errors import MtpkitError
from mtpkit.server.protocol.chat import ChatRequest
from mtpkit.server.protocol.completions import CompletionRequest

_BASE = Path("examples/tiny_base/model")
_LONGEST = 1024
"""Most tokens of a prompt and its output."""
_OPTIONS = {"max_model_len": _LONGEST, "max_num_seqs": 8, "block_size": 16, "num_blocks": 68}
"""Options of the engines. A request of the greatest length takes nearly all blocks, so that
requests are preempted."""
_QUEUE = 40
"""Prompts that may wait; those beyond are turned away."""
_CLIENTS = 12
_MOST_SECONDS = 120.0
"""Time that any answer may take."""
_TOLERANCE = 1e-3
"""Most difference of two log-probabilities: sums depend on what else is computed in a step."""
_MOST_GROWTH = 0.1
"""Most growth of a process's memory, as a share, from the time when all kinds of requests have come
until the end."""
_TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)
_TEXTS = (
    "import os\n",
    "def main():\n    return ",
    "class Parser:\n    def __init__(self",
    "for index in range(",
    "x",
    "# é€😀 and more\n",
    "try:\n    import json\nexcept ImportError:\n",
)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_FIELDS: Sequence[dict[str, Any]] = (
    {"temperature": 0},
    {"temperature": 0, "stop": ["\n\n", "return"]},
    {"temperature": 0, "stop": [":"], "include_stop_str_in_output": True},
    {"temperature": 0.9, "seed": 1, "top_p": 0.9},
    {"temperature": 1, "seed": 2, "n": 3},
    {"temperature": 0, "n": 2, "frequency_penalty": 0.5},
    {"temperature": 0.7, "seed": 3, "presence_penalty": 0.3, "min_tokens": 4},
    {"temperature": 0, "structured_outputs": {"regex": "[a-z]{3,9} = [0-9]{1,4}"}},
    {"temperature": 0, "structured_outputs": {"choice": ["yes", "no", "neither"]}},
    {
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}},
    },
)
"""Fields of requests besides the prompt."""
_WRONG: Sequence[tuple[str, bytes]] = tuple(
    (f"/v1/{path}", body if isinstance(body, bytes) else json.dumps(body).encode())
    for path, body in (
        ("completions", b"{"),
        ("completions", b"\xff\xfe"),
        ("completions", []),
        ("completions", {}),
        ("completions", {"prompt": []}),
        ("completions", {"prompt": "a", "n": 99}),
        ("completions", {"prompt": "a", "temperature": -1}),
        ("completions", {"prompt": "a", "max_tokens": "many"}),
        ("completions", {"prompt": "a", "model": "another"}),
        ("completions", {"prompt": "a", "stream": True, "logprobs": 99}),
        ("completions", {"prompt": "a", "structured_outputs": {"regex": "("}}),
        ("completions", {"prompt": [1] * (2 * _LONGEST), "stream": True}),
        ("completions", {"prompt": [10**9]}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": [{"content": "a"}], "stream": True}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}),
        ("nothing", {}),
    )
)


@dataclass(frozen=True)
class Part:
    """One output."""

    text: str
    reason: str | None
    log_probs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Case:
    """A request and its answer, which is always the same."""

    path: str
    body: dict[str, Any]
    want: list[Part]


@dataclass
class Report:
    """What happened."""

    events: Counter[str] = field(default_factory=Counter)
    """What clients did, and how often."""
    memory: dict[str, list[float]] = field(default_factory=dict)
    """MB of each process over time."""

    @property
    def growth(self) -> dict[str, float]:
        """Growth of each process, as a share, from the second quarter of the time to the last."""
        found = {}
        for name, values in self.memory.items():
            quarter = max(1, len(values) // 4)
            early = sorted(values[quarter : 2 * quarter] or values)
            late = sorted(values[-quarter:])
            found[name] = late[len(late) // 2] / early[len(early) // 2] - 1
        return found


def soak(model: Path, seconds: float, directory: Path, seed: int = 0) -> Report:
    """Serve a model for a time, its start included.

    Args:
        directory: an empty directory for the server's log.

    Raises:
        MtpkitError: an answer that is wrong, something that is left at the end, memory that has
            grown, or a server that did not start or end in order.
    """
    deadline = time.monotonic() + seconds
    template = directory / "template.jinja"
    template.write_text(_TEMPLATE)
    log = directory / "server.log"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in _OPTIONS.items()]
    words = ["serve", str(model), "--port=0", "--served-model-name=soak", f"--max-queue={_QUEUE}"]
    with log.open("w") as output:
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "mtpkit.cli.main",
                *words,
                f"--chat-template={template}",
                *flags,
            ],
            stdout=output,
            stderr=output,
        )
    try:
        # While the server starts.
        cases = _answered(model, _requests(random.Random(seed)))
        url = _url(server, log)
        clients = _Clients(url, cases, server.pid, seed)
        asyncio.run(clients.behave(deadline))
        server.terminate()
        code = server.wait(_MOST_SECONDS)
    finally:
        server.kill()
        server.wait()
    said = log.read_text()
    if code or "Traceback" in said:
        raise MtpkitError(f"the server ended with exit code {code}: {said[-2000:]}")
    grown = {name: share for name, share in clients.report.growth.items() if share > _MOST_GROWTH}
    if grown:
        raise MtpkitError(f"memory has grown: {grown}, MB {clients.report.memory}")
    return clients.report


def _requests(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of right requests."""
    source = Path(base64.__file__).read_text()
    found: list[tuple[str, dict[str, Any]]] = []
    for index, fields in enumerate((*_FIELDS, *_FIELDS)):
        start = rng.randrange(len(source) // 2)
        # Of hundreds of tokens, of which others may share the first.
        long = source[: 400 * (1 + index % 4)] + source[start : start + 200]
        text = long if index % 4 == 3 else rng.choice(_TEXTS)
        more = {**fields, "max_tokens": rng.randint(4, 48)}
        logs = index % 3 == 0
        if index % 2:
            messages = [{"role": "user", "content": text}]
            if logs:
                more |= {"logprobs": True, "top_logprobs": 2}
            found.append(("/v1/chat/completions", {"messages": messages, **more}))
        else:
            prompt = [text, *_TEXTS[:2]] if index % 8 == 6 else text
            if logs:
                more |= {"logprobs": 2}
            found.append(("/v1/completions", {"prompt": prompt, **more}))
    return found


def _answered(model: Path, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Case]:
    """The requests with the answers of an `LLM`."""
    prompts: list[Any] = []
    params = []
    counts = []
    for _, body in requests:
        fields: ChatRequest | CompletionRequest
        if "messages" in body:
            fields = ChatRequest.model_validate(body)
            own: list[Any] = [{"messages": body["messages"], "chat_template": _TEMPLATE}]
            log_probs = fields.top_logprobs
        else:
            fields = CompletionRequest.model_validate(body)
            own = list(fields.prompts)
            log_probs = fields.logprobs
        prompts += own
        params += [fields.sampling_params(max_tokens=fields.max_tokens, logprobs=log_probs)] * len(
            own
        )
        counts.append(len(own))
    with LLM(model, warm_up=False, **_OPTIONS) as llm:
        outputs = iter(llm.generate(prompts, params, use_tqdm=False))
    return [
        Case(path, body, _parts_of(list(itertools.islice(outputs, count))))
        for (path, body), count in zip(requests, counts, strict=True)
    ]


def _parts_of(outputs: Sequence[RequestOutput]) -> list[Part]:
    parts = []
    for output in outputs:
        for one in output.outputs:
            log_probs = ()
            if one.logprobs is not None:
                pairs = zip(one.token_ids, one.logprobs, strict=True)
                log_probs = tuple(tokens[token].logprob for token, tokens in pairs)
            parts.append(Part(one.text, one.finish_reason, log_probs))
    return parts


def _url(server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until a server listens; where."""
    while server.poll() is None:
        if found := re.search(r"serving soak on (http://\S+)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise MtpkitError(f"the server did not start: {log.read_text()}")


class _Clients:
    """Clients of one server."""

    def __init__(self, url: str, cases: list[Case], server: int, seed: int) -> None:
        self.report = Report()
        self._url = url
        self._cases = cases
        self._seed = seed
        process = psutil.Process(server)
        # The engine's process, and that from which it was forked, which does nothing any more.
        self._processes = {"server": [process], "engine": process.children(recursive=True)}

    async def behave(self, deadline: float) -> None:
        """Let all clients behave until a time, and check what they leave."""
        async with self._connected() as http:
            await asyncio.gather(*(self._ask(http, case, stream=False) for case in self._cases))
        left = deadline - time.monotonic()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch(max(0.1, left / 200)))
            clients = [
                group.create_task(self._client(random.Random(f"{self._seed} {index}"), deadline))
                for index in range(_CLIENTS)
            ]
            await asyncio.wait(clients)
            watching.cancel()
        async with self._connected() as http:
            await self._check_end(http)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=self._url, timeout=_MOST_SECONDS) as http:
            yield http

    async def _watch(self, interval: float) -> None:
        """Note the memory of the processes, again and again."""
        while True:
            for name, processes in self._processes.items():
                values = self.report.memory.setdefault(name, [])
                used = sum(one.memory_info().rss for one in processes)
                values.append(round(used / 2**20, 1))
            await asyncio.sleep(interval)

    async def _client(self, rng: random.Random, deadline: float) -> None:
        """One client, which begins anew now and then."""
        while time.monotonic() < deadline:
            async with self._connected() as http:
                for _ in range(rng.randint(1, 12)):
                    if time.monotonic() > deadline:
                        return
                    await self._act(http, rng)
                await self._break_off(http, rng)
            self.report.events["client restarted"] += 1

    async def _act(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        case = rng.choice(self._cases)
        acts: tuple[tuple[int, Callable[[], Awaitable[None]]], ...] = (
            (6, lambda: self._ask(http, case, stream=True)),
            (3, lambda: self._ask(http, case, stream=False)),
            (3, lambda: self._drop(http, case, rng)),
            (2, lambda: self._ask_wrongly(http, rng)),
            (1, lambda: self._look(http, rng)),
        )
        (act,) = rng.choices([act for _, act in acts], [weight for weight, _ in acts])
        await act()

    async def _ask(self, http: httpx.AsyncClient, case: Case, stream: bool) -> None:
        """Ask, and compare the answer."""
        try:
            status, got = await self._answer(http, case, stream)
        except httpx.HTTPError as error:
            async with self._connected() as other:
                said = (await other.get("/metrics")).text
            gauges = re.findall(r"^vllm:(?:num_requests|kv_cache).*$", said, re.MULTILINE)
            raise MtpkitError(f"{case.path} {case.body}: {error!r}, while {gauges}") from error
        if status == 429:
            self.report.events["turned away"] += 1
            return
        if status != 200 or any("error" in one for one in got):
            raise MtpkitError(f"{case.path} {case.body} was answered with {status}: {got}")
        compare(case, joined(got, len(case.want)))
        self.report.events["answer equal"] += 1

    async def _answer(
        self, http: httpx.AsyncClient, case: Case, stream: bool
    ) -> tuple[int, list[dict[str, Any]]]:
        """The status and the bodies of an answer: one, or those of a stream's events."""
        if stream:
            body = {**case.body, "stream": True}
            async with http.stream("POST", case.path, json=body) as response:
                status = response.status_code
                lines = [line async for line in response.aiter_lines()]
            # An error that comes before the stream is no event.
            events = [line.removeprefix("data: ") for line in lines if line != "data: [DONE]"]
            return status, [json.loads(one) for one in events if one]
        response = await http.post(case.path, json=case.body)
        return response.status_code, [response.json()]

    async def _drop(self, http: httpx.AsyncClient, case: Case, rng: random.Random) -> None:
        """Ask, and leave before the end, or at it."""
        body = {**case.body, "stream": rng.random() < 0.7}
        try:
            async with asyncio.timeout(rng.choice((0.005, 0.05, 0.2, 1.0))):
                async with http.stream("POST", case.path, json=body) as response:
                    async for _ in response.aiter_lines():
                        if rng.random() < 0.2:
                            break
        except TimeoutError:
            pass
        self.report.events["dropped"] += 1

    async def _break_off(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Leave several requests at once, in whatever state they are."""
        cases = rng.sample(self._cases, 3)
        asking = [asyncio.ensure_future(self._ask(http, case, stream=True)) for case in cases]
        await asyncio.sleep(rng.choice((0.0, 0.05, 0.3)))
        for one in asking:
            one.cancel()
        for result in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(result, MtpkitError):
                raise result

    async def _ask_wrongly(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        path, body = rng.choice(_WRONG)
        response = await http.post(path, content=body, headers={"Content-Type": "application/json"})
        if not 400 <= response.status_code < 500 or "message" not in response.json()["error"]:
            raise MtpkitError(f"{path} {body!r} was answered with {response.status_code}")
        self.report.events["refused"] += 1

    async def _look(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Ask for what needs no decoding."""
        path = rng.choice(("/health", "/metrics", "/v1/models", "/version"))
        response = await http.get(path)
        if response.status_code != 200:
            raise MtpkitError(f"{path} was answered with {response.status_code}")
        text = rng.choice(_TEXTS)
        tokens = (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
        back = (await http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
        if back != text:
            raise MtpkitError(f"{text!r} came back from its tokens as {back!r}")
        self.report.events["looked"] += 1

    async def _check_end(self, http: httpx.AsyncClient) -> None:
        """Check that nothing is left, and that all slots and blocks can be had."""
        await self._wait_for(http, running=0)
        slots = _OPTIONS["max_num_seqs"]
        body = {"prompt": ["x"] * slots, "max_tokens": 300, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body):
            await self._wait_for(http, running=slots)
        await self._wait_for(http, running=0)
        # It waits forever where a few blocks are missing.
        body = {"prompt": [7, 8, 9] * (_LONGEST // 3), "max_tokens": 1}
        cached = []
        for _ in range(2):
            usage = (await http.post("/v1/completions", json=body)).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        # A checkpoint was kept for the second time.
        if not cached[1]:
            raise MtpkitError("the prefix cache keeps no checkpoint any more")
        await self._wait_for(http, running=0)
        (drafts,) = await self._metrics(http, "spec_decode_num_draft_tokens_total")
        self.report.events["draft verified"] = int(drafts)

    async def _metrics(self, http: httpx.AsyncClient, *names: str) -> list[float]:
        text = (await http.get("/metrics")).text
        patterns = (rf"^vllm:{name}{{.*}} (.*)$" for name in names)
        return [float(re.findall(one, text, re.MULTILINE)[0]) for one in patterns]

    async def _wait_for(self, http: httpx.AsyncClient, running: int) -> None:
        """Wait until so many requests run, and none waits; with none, no block may be in use."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        deadline = time.monotonic() + _MOST_SECONDS
        while True:
            found = await self._metrics(http, *names)
            if found[:2] == [running, 0] and bool(found[2]) is bool(running):
                return
            if time.monotonic() > deadline:
                raise MtpkitError(f"waited for {running} running: {names} are {found}")
            await asyncio.sleep(0.02)


def joined(bodies: list[dict[str, Any]], count: int) -> list[Part]:
    """The outputs of an answer, or of the chunks of a stream."""
    texts = [""] * count
    reasons: list[str | None] = [None] * count
    log_probs: list[list[float]] = [[] for _ in range(count)]
    for choice in (choice for body in bodies for choice in body["choices"]):
        place = choice["index"]
        told = choice.get("delta") or choice.get("message") or choice
        texts[place] += told.get("content") or told.get("text") or ""
        reasons[place] = choice["finish_reason"] or reasons[place]
        found = choice.get("logprobs") or {}
        log_probs[place] += found.get("token_logprobs") or ()
        log_probs[place] += [one["logprob"] for one in found.get("content") or ()]
    parts = zip(texts, reasons, log_probs, strict=True)
    return [Part(text, reason, tuple(values)) for text, reason, values in parts]


def compare(case: Case, got: list[Part]) -> None:
    for want, one in zip(case.want, got, strict=True):
        pairs = list(zip(want.log_probs, one.log_probs, strict=False))
        near = all(abs(first - second) < _TOLERANCE for first, second in pairs)
        lengths = len(want.log_probs) == len(one.log_probs)
        if (want.text, want.reason) != (one.text, one.reason) or not (near and lengths):
            raise MtpkitError(f"{case.path} {case.body}: {one} is not what LLM says, {want}")


def main() -> None:
    """Run it and print what happened."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=_BASE, help="a model directory")
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = soak(options.model, options.seconds, Path(directory), options.seed)
    for name, values in report.memory.items():
        quarters = [values[len(values) * part // 4] for part in range(4)]
        print(f"{name}: MB after each quarter {[*quarters, values[-1]]}")
    growth = {name: round(share, 4) for name, share in report.growth.items()}
    print(json.dumps({"seconds": options.seconds, **report.events, "growth": growth}))


if __name__ == "__main__":
    run(main)
