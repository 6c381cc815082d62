"""The load benchmark: its requests are the facts page's, every one gets its tokens, and its figures
hang together."""

import itertools
import json
import math
import statistics
from dataclasses import replace

import pytest
import torch

from mtpkit.bench.experts import ExpertDraws
from mtpkit.bench.load import measure_load, workload
from mtpkit.bench.load import run as run_module
from mtpkit.bench.load.requests import (
    LoadRequest,
    draw_prompts,
    draw_requests,
    limit_seconds,
    save_requests,
    token_sums,
)
from mtpkit.bench.load.serving import WallClock
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.settings import LoadConfig, RooflineConfig
from mtpkit.bench.shapes import open_model
from mtpkit.bench.sizes import NEMOTRON_H_8B
from mtpkit.bench.timing import Kernel, Trace
from mtpkit.engine.requests.options import EngineOptions
from mtpkit.engine.steps import verifier
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model.layers.mamba import MambaMixer

H200 = (RooflineConfig().bandwidth * 1e12, RooflineConfig().matrix_rate * 1e12)
SMALL = LoadConfig(
    num_prompts=9,
    prompt_median=20,
    prompt_max=70,
    output_median=16,
    output_max=40,
    repeats=2,
    acceptance=(0.9, 0.5),
    engine={"max_num_seqs": 4, "max_num_batched_tokens": 48},
)


@pytest.fixture(scope="module")
def models():
    return {}


@pytest.fixture
def model(models, device):
    if device not in models:
        models[device] = open_model("nemotron-h-tiny", torch.device(device), "float32")
    return models[device]


def test_the_load_is_that_of_the_published_figures():
    requests = draw_requests(LoadConfig())
    assert token_sums(requests) == {"prompt_tokens": 305_049, "output_tokens": 124_407}
    assert len(requests) == 512
    assert (min(r.prompt_len for r in requests), max(r.prompt_len for r in requests)) == (21, 4000)
    assert statistics.median(r.prompt_len for r in requests) == pytest.approx(400, rel=0.1)
    assert statistics.median(r.max_tokens for r in requests) == pytest.approx(200, rel=0.1)


def test_a_seed_makes_one_load_and_another_seed_another():
    config = LoadConfig(num_prompts=50)
    requests = draw_requests(config)
    others = draw_requests(replace(config, seed=8))
    assert draw_requests(config) == requests and not {*requests} & {*others}
    assert draw_requests(replace(config, num_prompts=20)) == requests[:20]
    prompts = draw_prompts(requests, 500, 3)
    assert [len(prompt) for prompt in prompts] == [request.prompt_len for request in requests]
    assert draw_prompts(requests, 500, 3) == prompts and draw_prompts(requests, 500, 4) != prompts
    tokens = [token for prompt in prompts for token in prompt]
    assert min(tokens) == 0 and max(tokens) == 499


def test_lengths_are_cut():
    config = LoadConfig(
        num_prompts=400, prompt_min=300, prompt_max=500, output_min=200, output_max=200
    )
    requests = draw_requests(config)
    assert {request.max_tokens for request in requests} == {200}
    lengths = {request.prompt_len for request in requests}
    assert min(lengths) == 300 and max(lengths) == 500 and len(lengths) > 50
    assert {r.prompt_len for r in draw_requests(LoadConfig(num_prompts=9, prompt_sigma=0))} <= {
        399,
        400,
    }


def test_arrivals_are_a_poisson_process():
    arrivals = [request.arrival for request in draw_requests(LoadConfig(num_prompts=20_000))]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1, rel=0.05)
    assert sum(gap > 1 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.05)
    # Gaps that follow each other have nothing to do with each other.
    assert abs(statistics.correlation(gaps[:-1], gaps[1:])) < 0.03


@pytest.mark.parametrize(
    ("k", "roofline", "seconds"),
    [
        (0, Roofline(NEMOTRON_H_8B, state_rollback="snapshot"), 15.1),
        (3, Roofline(NEMOTRON_H_8B, ring_entries=8), 10.2),
    ],
)
def test_the_limit_is_that_of_the_published_figures(k, roofline, seconds):
    """Which were computed with a state that is written in every step for K = 0, and once in 8
    tokens for K = 3."""
    config = LoadConfig()
    found = limit_seconds(roofline, draw_requests(config), 128, config.rates(k), *H200)
    assert found == pytest.approx(seconds, rel=0.01)


def test_the_limit_is_the_sum_of_its_parts():
    config = LoadConfig(num_prompts=5)
    requests = draw_requests(config)
    roofline = Roofline(NEMOTRON_H_8B)
    prefill = limit_seconds(roofline, requests, 4, [], 1e300, 1.0)  # FLOPs
    decode = limit_seconds(roofline, requests, 4, [], 1.0, 1e300)  # bytes
    decoded = sum(request.max_tokens - 1 for request in requests)
    context = (
        sum((r.prompt_len + r.max_tokens / 2) * (r.max_tokens - 1) for r in requests) / decoded
    )
    step = roofline.decode(4, (), context)
    assert decode == pytest.approx(decoded / 4 * step.bytes)
    prompts = sum(r.prompt_len for r in requests)
    weights = 0.0
    layers = roofline.prefill(1, 1)
    output = NEMOTRON_H_8B.vocab_size * NEMOTRON_H_8B.hidden_size
    weights = next(work.flops for work in layers.works if work.name == "matrices") - 2 * output
    assert prefill - decoded / 4 * step.flops == pytest.approx(
        prompts * weights + len(requests) * 2 * output
    )
    longest = [replace(requests[0], max_tokens=1)]
    assert limit_seconds(roofline, longest, 4, [], 1.0, 1.0) == pytest.approx(
        requests[0].prompt_len * weights + 2 * output
    )


def test_every_rate_and_k_is_measured(model, device):
    config = replace(SMALL, request_rate=(math.inf, 200.0), num_speculative_tokens=(0, 2))
    kept = []
    result = measure_load(model, config, None, "tiny", kept.append)
    assert [(row.request_rate, row.k) for row in result.rows] == [
        ("inf", 0),
        ("inf", 2),
        (200.0, 0),
        (200.0, 2),
    ]
    assert [len(part.rows) for part in kept][:4] == [1, 2, 3, 4]
    requests = draw_requests(config)
    sums = token_sums(requests)
    for row in result.rows:
        assert row.tokens_per_s == pytest.approx(sums["output_tokens"] / row.seconds)
        assert [row.first_seconds, row.seconds] == row.run_seconds
        assert row.spread == pytest.approx(max(row.run_seconds) / min(row.run_seconds) - 1)
        assert 0 < row.ttft_p50_ms < row.ttft_p99_ms < 1e3 * row.seconds
        assert 0 < row.itl_p50_ms < row.itl_p99_ms < 1e3 * row.seconds
        assert (
            row.limit_share == pytest.approx(row.limit_seconds / row.seconds)
            and row.limit_share < 1
        )
        assert row.acceptance_length == 1 if row.k == 0 else 1.8 < row.acceptance_length < 2.8
        assert row.start_seconds > 0 and row.preemptions == 0
        assert (row.gpu_idle_share is None) == (device == "cpu" or row.request_rate != "inf")
        assert row.limit_seconds >= (0 if row.request_rate == "inf" else requests[-1].arrival / 200)
    found = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (
        found["settings"]["request_rate"] == ["inf", 200.0]
        and found["settings"].items() >= sums.items()
    )
    assert {"device", "commit", "date", "copy_bandwidth", "matrix_rate"} <= set(found)
    (table,) = result.tables()
    assert (
        "load of 9 requests" in result.title and f"{sums['prompt_tokens']:,} prompt" in result.title
    )
    assert len(table.columns) == 17


def test_the_limit_at_a_rate_that_lasts_is_nearer(model, monkeypatch):
    """Share of the limit with the matrices of the prompts and of the steps at that rate."""
    slow = workload.measure_machine(torch.device("cpu"))
    machines = iter(
        [slow, replace(slow, sustained_rate=slow.matrix_rate), replace(slow, sustained_rate=1e8)]
    )
    monkeypatch.setattr(workload, "measure_machine", lambda device, sustained: next(machines))
    config = replace(SMALL, num_speculative_tokens=(0,), repeats=1, trace=False)
    rows = [measure_load(model, config).rows[0] for _ in range(3)]
    assert rows[0].sustained_share is None and rows[1].sustained_share == rows[1].limit_share
    roofline = Roofline(model.mtpkit_config, torch.float32)
    requests = draw_requests(config)
    limit = limit_seconds(
        roofline, requests, config.engine.max_num_seqs, [], slow.copy_bandwidth, 1e8
    )
    assert rows[2].sustained_share == pytest.approx(limit / rows[2].seconds)
    assert rows[2].sustained_share > rows[2].limit_share


def test_products_in_fp8_take_less_of_the_limit():
    """In prompts and in steps; at an endless bandwidth."""
    model = open_model("nemotron-h-tiny", torch.device("cpu"), weight_format="fp8-blocks")
    roofline = Roofline.of(model, EngineOptions())
    requests = [LoadRequest(prompt_len=20, max_tokens=11, arrival=0.0)] * 4
    at_once, apart = (
        limit_seconds(roofline, requests, 4, [], 1e300, 1e3, rate) for rate in (4e3, None)
    )
    prompts = sum(work.fp8_flops for work in roofline.prefill(4, 20).works)
    steps = 10 * sum(work.fp8_flops for work in roofline.decode(4).works)
    assert steps > 0 and prompts > 0
    assert apart - at_once == pytest.approx((prompts + steps) * (1e-3 - 1 / 4e3))


def test_each_run_is_counted_by_itself(model):
    config = replace(SMALL, num_speculative_tokens=(2,))
    engine = run_module.LoadEngine(model, config, 2, WallClock(), ExpertDraws(model, False))
    for _ in range(2):
        run = engine.run(math.inf)
        tokens = [len(stream.tokens) for stream in run.streams]
        assert tokens == [request.max_tokens for request in draw_requests(config)]
        assert run.stats.generated_tokens == sum(tokens)
        assert run.seconds == max(stream.times[-1] for stream in run.streams)


def test_the_first_run_is_apart(model):
    config = replace(SMALL, num_speculative_tokens=(0,), repeats=1)
    (row,) = measure_load(model, config).rows
    assert row.run_seconds == [row.first_seconds] == [row.seconds] and row.spread == 0
    (table,) = measure_load(model, config).tables()
    shown = {column.header: list(column.cells) for column in table.columns}
    assert shown["later s"] == shown["spread"] == ["-"]


def test_runs_have_tokens_of_their_own_and_the_first_ones_are_saved(model, tmp_path, monkeypatch):
    served = []
    serve = run_module.serve

    def record(engine, streams, clock):
        served.append([stream.prompt for stream in streams])
        return serve(engine, streams, clock)

    monkeypatch.setattr(run_module, "serve", record)
    config = replace(SMALL, num_speculative_tokens=(0,), request_rate=(1000.0,), trace=False)
    measure_load(model, config)
    first, second = served
    assert [len(prompt) for prompt in first] == [
        len(prompt) for prompt in second
    ] and first != second
    line = save_requests(tmp_path / "requests.json", config, model.mtpkit_config.vocab_size)
    saved = json.loads((tmp_path / "requests.json").read_text())
    assert [request["prompt_token_ids"] for request in saved["requests"]] == first
    requests = draw_requests(config)
    assert [one["max_tokens"] for one in saved["requests"]] == [
        request.max_tokens for request in requests
    ]
    assert [one["arrival"] for one in saved["requests"]] == [
        request.arrival for request in requests
    ]
    assert (saved["max_num_seqs"], saved["max_num_batched_tokens"]) == (4, 48)
    assert f"9 requests, {saved['prompt_tokens']:,} prompt" in line


def test_preempted_requests_get_their_tokens_and_are_counted(model):
    # The first three prompts fill a step and then grow to four blocks each, whatever a step takes.
    alike = dict(
        prompt_median=12, prompt_sigma=0.0, output_median=50, output_sigma=0.0, output_max=50
    )
    few = replace(SMALL.engine, num_blocks=9)
    config = replace(SMALL, num_speculative_tokens=(2,), trace=False, engine=few, **alike)
    (row,) = measure_load(model, config).rows
    assert row.preemptions >= 1


def test_k_as_the_engine_chooses(model):
    (row,) = measure_load(model, replace(SMALL, num_speculative_tokens=("auto",), repeats=1)).rows
    assert row.k == "auto" and 0 < row.limit_share < 1


def test_outputs_of_another_length_are_refused(model, monkeypatch):
    params = run_module.Stream.params.fget
    shorter = property(lambda self: replace(params(self), max_tokens=self.max_tokens - 1))
    monkeypatch.setattr(run_module.Stream, "params", shorter)
    with pytest.raises(
        MtpkitError, match=r"9 of 9 outputs have another length .* one of them \d+ tokens where \d+"
    ):
        measure_load(model, replace(SMALL, num_speculative_tokens=(0,), repeats=1))


def test_acceptance_that_was_not_asked_for_is_refused(model, monkeypatch):
    monkeypatch.setattr(LoadConfig, "rates", lambda self, k: [0.3, 0.5][:k])
    make = workload.LLM
    monkeypatch.setattr(
        workload,
        "LLM",
        lambda *args, **more: make(*args, **more | {"synthetic_acceptance": [1, 1]}),
    )
    with pytest.raises(
        MtpkitError,
        match=r"K = 2: draft 1 was accepted at a rate of 1\.000 over \d+ steps, but 0\.3",
    ):
        measure_load(model, replace(SMALL, num_speculative_tokens=(2,), repeats=1))


@pytest.mark.parametrize("k", [0, 2])
def test_tokens_of_a_broken_engine_are_refused(k, model, monkeypatch):
    own_tokens = verifier.own_tokens
    monkeypatch.setattr(verifier, "own_tokens", lambda *args: (own_tokens(*args) + 1) % 512)
    with pytest.raises(
        MtpkitError, match=rf"K = {k}: \d+ of \d+ tokens are not those of a plain forward pass"
    ):
        measure_load(model, replace(SMALL, num_speculative_tokens=(k,), repeats=1))


@pytest.mark.parametrize("k", [0, 2])
def test_a_state_that_is_lost_between_chunks_is_refused(k, model, monkeypatch):
    prefill = MambaMixer._prefill

    def forget(self, conv_in, dt, step, window, recurrent):
        y = prefill(self, conv_in, dt, step, window, recurrent)
        # A plain 0 would be copied from the host, which a capture forbids.
        recurrent.folded[step.state_slots[step.num_decode_rows :]] = recurrent.folded.new_zeros(())
        return y

    monkeypatch.setattr(MambaMixer, "_prefill", forget)
    with pytest.raises(
        MtpkitError, match=rf"K = {k}: .* tokens are not those of a plain forward pass"
    ):
        measure_load(model, replace(SMALL, num_speculative_tokens=(k,), repeats=1))


def test_steps_in_the_middle_of_a_run_are_traced_when_all_is_timed(model, monkeypatch):
    order = []

    def trace(function, device):
        function()
        order.append("trace")
        return Trace([Kernel("gemm", 0, 0.3, 1), Kernel("scan", 0.4, 1, 2)])

    run = run_module.LoadEngine.run
    take = run_module.take
    monkeypatch.setattr(
        run_module.LoadEngine, "run", lambda self, rate: order.append("run") or run(self, rate)
    )
    monkeypatch.setattr(run_module, "take", lambda *args: order.append("step") or take(*args))
    monkeypatch.setattr(run_module, "trace_kernels", trace)
    monkeypatch.setattr(run_module, "_TRACED_STEPS", 3)
    monkeypatch.setattr("mtpkit.bench.load.can_trace", lambda device: True)
    config = replace(SMALL, request_rate=(math.inf, 1000.0), num_speculative_tokens=(1,), repeats=1)
    idle = [row.gpu_idle_share for row in measure_load(model, config).rows]
    assert idle == [pytest.approx(0.1), None]
    assert order[:2] == ["run", "run"] and order[-6:] == [
        "step",
        "trace",
        "step",
        "step",
        "step",
        "trace",
    ]
    assert order[2:-6].count("step") == len(order) - 8 > 5  # a third of the requests have ended
    order.clear()
    row, _ = measure_load(model, replace(config, trace=False)).rows
    assert order == ["run", "run"] and row.gpu_idle_share is None
    monkeypatch.setattr(run_module, "trace_kernels", lambda *_: Trace([]))
    row, _ = measure_load(model, config).rows
    assert row.gpu_idle_share is None  # not 0: nothing ran


def test_settings_that_cannot_be_measured_are_all_named():
    with pytest.raises(
        UserError,
        match=r"request_rate is \(0\.0,\), must be positive; acceptance is \(\), must be a list",
    ):
        LoadConfig(request_rate=(0.0,), acceptance=())
    with pytest.raises(
        UserError,
        match=r"prompt_min is 9, must be at most prompt_max, 8; output_min is 5, must be at most",
    ):
        LoadConfig(prompt_min=9, prompt_max=8, output_min=5, output_max=4)
    with pytest.raises(
        UserError, match=r"tokens in all, must be at most .*: lower prompt_max or num_prompts"
    ):
        LoadConfig(num_prompts=1 << 30)
    for rate in (math.nan, -math.inf):
        with pytest.raises(UserError, match="request_rate is"):
            LoadConfig(request_rate=(rate,))
