"""The live page shows the numbers of `/metrics`, in a real browser, and says when they are old."""

import json
import re
import threading

import httpx
import numpy as np
import pytest

from mtpkit.engine import SamplingParams
from tests.server.browser import CHROMIUM, Browser

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
KEY = {"Authorization": "Bearer secret"}
PROMPTS = ["the cat sat on the mat " * 4, "a cat", "we re", "don t", "the cat sat on the mat " * 4]
FAKE = "globalThis.fetch = async (path, how) => path == {path!r} ? {answer} : asked(path, how)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(browser, server):
    """The page of the server that tests share, opened after a request. `FAKE` changes what its
    script hears."""
    body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    page = browser.open(server.url)
    page.evaluate("globalThis.asked = fetch")
    return page


def rows(page, table: str) -> dict[str, list[str]]:
    """The rows of a table by their names."""
    cells = f"[...document.querySelectorAll('#{table} tbody tr')].map(row => row.innerText)"
    return {name: values for name, *values in (row.split("\t") for row in page.evaluate(cells))}


def seconds(text: str) -> float:
    """A duration of the page."""
    number, unit = text.split()
    return float(number) * {"ms": 0.001, "s": 1}[unit]


def test_it_is_one_file_for_everybody(server):
    found = server.http.get("/")
    assert found.status_code == 200
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in found.headers["content-security-policy"]
    assert set(re.findall(r"(?:src|href)=(\S+?)>", found.text)) == {'"data:,"'}
    assert not re.search(r"//\w+\.|@import|url\(", found.text)


@needs_browser
def test_it_shows_what_clients_got_until_the_server_has_gone(browser, start, llm):
    """The server has a key, which the browser does not have."""
    server = start("--api-key=secret")
    http = server.http
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    wants = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in PROMPTS]
    body = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    used = []
    for prompt in PROMPTS:
        done = http.post("/v1/completions", headers=KEY, json=body | {"prompt": prompt})
        used.append(done.json()["usage"])
    streamed = body | {"prompt": "x", "stream": True}
    assert http.post("/v1/completions", headers=KEY, json=streamed).status_code == 200
    wants += llm.generate(["x"], params, use_tqdm=False)

    page = browser.open(server.url)
    asked = sum(len(want.prompt_token_ids) for want in wants)
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in used)
    page.wait_for("document.getElementById('requests').innerText.includes('Ended: length\\t6')")
    assert page.text("state") == "serving"
    assert page.text("model") == "tiny" and page.evaluate("document.title") == "tiny · mtpkit"
    assert rows(page, "tokens") == {
        "Output tokens": ["180"],
        "Prompt tokens": [str(asked)],
        "Share found in the prefix cache": [f"{100 * cached / asked:.0f}%"],
    }
    assert 20 < 100 * cached / asked < 90
    ended = {"stop": 0, "length": 6, "abort": 0, "error": 0}
    ended = {f"Ended: {reason}": [str(count)] for reason, count in ended.items()}
    assert rows(page, "requests") == ended | {"Preemptions": ["0"]}
    assert [page.text(one) for one in ("running", "waiting")] == ["0", "0"]

    stats = [want.stats for want in wants]
    steps = sum(one.reached_per_depth[0] for one in stats)
    accepted = [sum(one.accepted_per_depth[depth] for one in stats) for depth in range(2)]
    depths = page.text("depths").split()
    assert depths[::2] == ["1", "2"]
    for share, count in zip(depths[1::2], accepted, strict=True):
        assert float(share.removesuffix("%")) == pytest.approx(100 * count / steps, abs=0.51)
    length, shown_steps = re.findall(r"\d[\d.]*", page.text("acceptance"))
    assert float(length) == pytest.approx(1 + sum(accepted) / steps, abs=0.006)
    assert int(shown_steps) == steps
    check_percentiles(page, http.get("/metrics").text)

    page.wait_for("performance.getEntriesByType('resource').length >= 6")
    asked_for = page.evaluate("performance.getEntriesByType('resource').map(one => one.name)")
    assert set(asked_for) == {f"{server.url}/health", f"{server.url}/metrics"}
    server.ask_to_end()
    page.wait_for("document.body.dataset.state == 'gone'")
    told = "The server has not answered since [\\d:]+.*: the numbers are from then"
    assert re.fullmatch(told, page.text("state"))
    assert rows(page, "tokens")["Output tokens"] == ["180"]
    assert server.exit_code() == 0


def check_percentiles(page, text: str) -> None:
    """Compare the page's with those of the histograms in the text of `/metrics`."""
    shown = rows(page, "latencies")
    metrics = {
        "First token": "time_to_first_token",
        "Between outputs": "inter_token_latency",
        "Per output token": "request_time_per_output_token",
        "In the queue": "request_queue_time",
        "Whole request": "e2e_request_latency",
    }
    assert shown.keys() == metrics.keys()
    for name, metric in metrics.items():
        buckets = re.findall(rf'vllm:{metric}_seconds_bucket{{le="(\S+?)".*}} (\S+)', text)
        bounds = np.array([0, *(float(bound) for bound, _ in buckets[:-1])])
        counts = np.array([0, *(float(count) for _, count in buckets[:-1])])
        # Nothing lies in the open bucket at the end.
        assert counts[-1] == float(buckets[-1][1])
        if not counts[-1]:
            assert shown[name] == ["–"] * 3  # outputs of the one stream, all joined
            continue
        places = counts[-1] * np.array([0.5, 0.9, 0.99])
        ends = np.searchsorted(counts, places)
        parts = (places - counts[ends - 1]) / (counts[ends] - counts[ends - 1])
        wants = bounds[ends - 1] + parts * (bounds[ends] - bounds[ends - 1])
        got = [seconds(value) for value in shown[name]]
        assert got == pytest.approx(list(wants), rel=0.02, abs=6e-4), name


@needs_browser
def test_it_follows_what_runs(page, server):
    body = {"prompt": ["a"] * 60, "max_tokens": 500, "ignore_eos": True, "stream": True}
    gone = threading.Event()

    def ask() -> None:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=60
        ) as response:
            for _ in response.iter_lines():
                if gone.is_set():
                    return

    client = threading.Thread(target=ask)
    client.start()
    number = "Number(document.getElementById({!r}).value)"
    parts = " && ".join(
        f"{number.format(one)} > 0" for one in ("running", "waiting", "output-rate")
    )
    try:
        page.wait_for(parts)
        assert page.text("cache-use") != "0.0%"
        assert page.evaluate("document.getElementById('curve').getAttribute('d')").startswith("M")
    finally:
        gone.set()
        client.join()
    page.wait_for("document.getElementById('running').value == '0'")
    page.wait_for("document.getElementById('waiting').value == '0'")
    assert rows(page, "requests")["Ended: abort"][0] != "0"

    # What came before the page was opened counts since the start alone.
    every = totals(page)
    page.evaluate("document.querySelector('[value=recent]').click()")
    recent = totals(page)
    page.evaluate("document.querySelector('[value=all]').click()")
    assert all(0 <= one < other for one, other in zip(recent, every, strict=True))
    assert recent[0] > 0


def totals(page) -> tuple[int, int]:
    """Output tokens, and requests that have ended by their length."""
    found = rows(page, "tokens")["Output tokens"] + rows(page, "requests")["Ended: length"]
    tokens, requests = (int(number.replace(",", "")) for number in found)
    return tokens, requests


@needs_browser
def test_it_fits_a_phone_and_has_two_colour_schemes(page):
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=400, height=800, deviceScaleFactor=1, mobile=True,
    )  # fmt: skip
    assert page.evaluate("innerWidth") == 400
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    colours = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.call("Emulation.setEmulatedMedia", features=features)
        colours.append(
            page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
        )
    brightness = [
        [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in pair] for pair in colours
    ]
    (light_text, light_ground), (dark_text, dark_ground) = brightness
    assert light_text < 200 < 600 < light_ground and dark_ground < 200 < 600 < dark_text


@needs_browser
def test_it_says_that_the_engine_has_died(page):
    dead = "new Response('', {status: 503})"
    page.evaluate(FAKE.format(path="health", answer=dead))
    page.wait_for("document.getElementById('state').innerText.startsWith('The engine has died')")
    page.evaluate("globalThis.fetch = asked")
    page.wait_for("document.getElementById('state').innerText == 'serving'")


@needs_browser
def test_it_begins_anew_with_a_server_that_was_started_again(page):
    """Whose name is no HTML, and long."""
    name = '<b>&"\\\n' + "x" * 200
    label = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = [
        f'vllm:num_requests_running{{model_name="{label}"}} 3.0',
        f'vllm:generation_tokens_total{{model_name="{label}"}} 5.0',
    ]
    answer = f"new Response({json.dumps(chr(10).join(lines))})"
    page.evaluate(FAKE.format(path="metrics", answer=answer))
    page.wait_for("document.getElementById('running').value == '3'")
    assert page.evaluate("document.getElementById('model').textContent") == name
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert rows(page, "tokens")["Output tokens"] == ["5"]
    assert page.text("acceptance") == "No step had drafts."
    # Neither a rate below zero nor a curve out of the chart.
    assert not page.text("output-rate").startswith("-")
    page.evaluate("globalThis.fetch = asked")
    page.wait_for("document.getElementById('model').innerText == 'tiny'")
