"""Metrics count what clients got; a client that measures as `vllm bench serve` does finds the same
numbers."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

from mtpkit.engine import SamplingParams

NAMES = """
num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
prefix_cache_hits_total prompt_tokens_total generation_tokens_total num_preemptions_total
time_to_first_token_seconds_count inter_token_latency_seconds_count
request_time_per_output_token_seconds_count e2e_request_latency_seconds_count
request_queue_time_seconds_count request_prefill_time_seconds_count
request_decode_time_seconds_count request_inference_time_seconds_count
request_prompt_tokens_count request_generation_tokens_count spec_decode_num_drafts_total
spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
iteration_tokens_total_count
""".split()  # noqa: SIM905


def ask_as_vllm_bench(
    server, prompt: str, max_tokens: int, chat: bool = False
) -> tuple[float, int, str]:
    """One request of `vllm bench serve`: seconds to the first chunk with choices, output tokens by
    the usage, and the text."""
    asked = {"prompt": prompt, "max_tokens": max_tokens}
    path = "/v1/completions"
    if chat:
        content = [{"type": "text", "text": prompt}]
        asked = {
            "messages": [{"role": "user", "content": content}],
            "max_completion_tokens": max_tokens,
        }
        path = "/v1/chat/completions"
    payload = {
        "model": "tiny",
        **asked,
        "repetition_penalty": 1.0,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    began = time.perf_counter()
    first = tokens = None
    text = ""
    with server.http.stream("POST", path, json=payload) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line or line.startswith(":") or line == "data: [DONE]":
                continue
            data = json.loads(line.removeprefix("data: "))
            if choices := data.get("choices"):
                first = first or time.perf_counter() - began
                delta = choices[0].get("delta", {})
                # The template opens the reasoning.
                text += choices[0].get("text") or delta.get("reasoning_content") or ""
            elif usage := data.get("usage"):
                tokens = usage["completion_tokens"]
    return first, tokens, text


def test_counts_are_those_of_the_requests(server, llm):
    before = server.wait_until_idle()
    prompts = [f"the cat {index}" for index in range(12)]
    lengths = [4 + index for index in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask_as_vllm_bench, [server] * 12, prompts, lengths))
    assert [tokens for _, tokens, _ in found] == lengths
    assert all(first > 0 for first, _, _ in found)
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths
    ]
    wants = llm.generate(prompts, params, use_tqdm=False)
    assert [text for _, _, text in found] == [want.outputs[0].text for want in wants]

    after = server.wait_until_idle()
    assert set(NAMES) <= after.keys()
    grown = {name: after[name] - before[name] for name in after}
    prompt_tokens = sum(len(want.prompt_token_ids) for want in wants)
    assert grown["generation_tokens_total"] == sum(lengths)
    assert grown["prompt_tokens_total"] == grown["prefix_cache_queries_total"] == prompt_tokens
    assert grown["request_prompt_tokens_sum"] == prompt_tokens
    computed = prompt_tokens - grown["prefix_cache_hits_total"]
    assert grown["iteration_tokens_total_sum"] == computed + sum(lengths)
    assert 0 < grown["iteration_tokens_total_count"] <= sum(lengths) + 12
    assert grown["request_generation_tokens_sum"] == sum(lengths)
    assert grown['request_success_total{finished_reason="length"}'] == 12
    counted = ("e2e_request_latency", "time_to_first_token", "request_queue_time")
    assert all(grown[f"{name}_seconds_count"] == 12 for name in counted)
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    whole = grown["e2e_request_latency_seconds_sum"]
    assert 0 < sum(grown[f"{name}_seconds_sum"] for name in parts) <= whole
    per_depth = [
        grown[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{depth}"}}']
        for depth in range(2)
    ]
    assert sum(per_depth) == grown["spec_decode_num_accepted_tokens_total"]
    assert grown["spec_decode_num_draft_tokens_total"] == 2 * grown["spec_decode_num_drafts_total"]
    stats = [want.stats for want in wants]
    assert per_depth == [sum(one.accepted_per_depth[depth] for one in stats) for depth in range(2)]


def test_chats_are_measured_as_completions_are(server, llm):
    first, tokens, text = ask_as_vllm_bench(server, "the cat", 9, chat=True)
    messages = [{"role": "user", "content": "the cat"}]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    (want,) = llm.chat(messages, params, use_tqdm=False)
    assert first > 0 and tokens == 9 and text == want.outputs[0].text


def test_a_request_without_drafts_is_not_counted_among_drafts(server):
    before = server.wait_until_idle()
    body = {"prompt": "the cat", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    alone = server.http.post("/v1/completions", json=body | {"speculate": False}).json()
    between = server.wait_until_idle()
    drafted = server.http.post("/v1/completions", json=body).json()
    after = server.wait_until_idle()
    assert alone["choices"][0]["text"] == drafted["choices"][0]["text"]
    names = [name for name in after if name.startswith("spec_decode")]
    assert [between[name] for name in names] == [before[name] for name in names]
    assert after["spec_decode_num_drafts_total"] > between["spec_decode_num_drafts_total"]
    assert between["generation_tokens_total"] == before["generation_tokens_total"] + 20


def test_gauges_say_what_runs(server):
    server.wait_until_idle()
    body = {"prompt": ["a"] * 12, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # the stream is closed with it
        next(lines)
        # On a slow machine the first prompt runs before the others have come.
        for _ in range(100):
            found = server.metrics()
            if found["num_requests_running"] == 8:
                break
        assert found["num_requests_running"] == 8 and found["num_requests_waiting"] == 4
        assert 0 < found["kv_cache_usage_perc"] <= 1
    server.wait_until_idle()


def test_cached_tokens_are_in_the_usage(server):
    body = {"prompt": "the cat sat on the mat " * 8, "max_tokens": 2}
    used = [server.http.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
    cached = [one["prompt_tokens_details"]["cached_tokens"] for one in used]
    assert cached[0] < cached[1] <= used[1]["prompt_tokens"]
    assert used[0]["total_tokens"] == used[0]["prompt_tokens"] + 2
