"""What drafts cost beside verification, in bytes by part and in time, and the comparison of heads
for a base."""

import math
from dataclasses import replace

import pytest
import torch

from mtpkit.bench import decode_run
from mtpkit.bench.decode import draft_parts, measure_decode
from mtpkit.bench.heads import compare_heads
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.settings import DecodeConfig, HeadsConfig, depth_rates
from mtpkit.bench.shapes import get_config, held_weights, open_model
from mtpkit.bench.sizes import SHAPES
from mtpkit.bench.weights import ModelWeights
from mtpkit.errors import UserError
from mtpkit.model.formats.weight import QuantizedWeight
from tests.shared import each

CPU = torch.device("cpu")
DECODE = DecodeConfig(
    num_speculative_tokens=(0, 2), batch_size=(2,), prompt_length=9, max_tokens=40, repeats=1
)


@each("name", SHAPES)
@each("k", [0, 1, 3])
def test_parts_are_all_bytes(name: str, k: int) -> None:
    config = SHAPES[name]
    if not config.mtp.repeated:
        k = min(k, config.mtp.default_drafts)
    cost = Roofline(config).decode(5, [0.8] * k, 700)
    drafts, verify = (cost.parts(drafts=of) for of in (True, False))
    assert sum(drafts.values()) + sum(verify.values()) == pytest.approx(cost.bytes)
    assert bool(drafts) == (k > 0)
    assert ("experts" in verify and verify["experts"] > 0) == ("E" in config.pattern)
    lm_head = 2 * config.vocab_size * config.hidden_size
    assert verify["lm_head"] == lm_head and drafts.get("lm_head", 0) == k * lm_head


def test_lightnings_drafts_read_what_was_counted_by_hand() -> None:
    """A draft at 64k tokens of context, keys and values in fp8."""
    held = held_weights("nemotron-3.5-lightning", torch.bfloat16, weight_format="nemotron-nvfp4")
    roofline = Roofline(
        SHAPES["nemotron-3.5-lightning"],
        state_dtype=torch.float16,
        kv_dtype=torch.float8_e4m3fn,
        held=held,
    )
    for batch, per_draft in ((1, 0.47), (12, 1.84), (20, 2.56)):
        cost = roofline.decode(batch, depth_rates([0.78], 7), 65536)
        draft = sum(work.bytes for work in cost.phases["draft 7"])
        assert draft / 1e9 == pytest.approx(per_draft, rel=0.02)


@each("format_", ["fp8", "fp8-blocks", "int4", "nvfp4"])
def test_heads_have_a_format_of_their_own(format_: str) -> None:
    model = open_model("nemotron-3-tiny", CPU, "float32", "*E", head_format=format_)
    quantized = {
        name for name, each_ in model.named_modules() if isinstance(each_, QuantizedWeight)
    }
    assert quantized and all(name.startswith("mtp.") for name in quantized)
    plain = ModelWeights.in_dtype(model.mtpkit_config, torch.float32)
    found = ModelWeights.of(model)
    assert found.base == plain.base and found.output == plain.output
    assert found.heads[0].layers[1].expert.bytes < plain.heads[0].layers[1].expert.bytes / 3
    assert (
        found.heads
        == held_weights("nemotron-3-tiny", torch.float32, "*E", head_format=format_).heads
    )


def test_a_head_is_compared_as_the_roofline_says() -> None:
    config = HeadsConfig(
        head=("*E", "*-:96"),
        head_format=("nvfp4",),
        draft_vocab_sizes=(0, 64),
        batch_size=(1, 8),
        most_drafts=4,
        acceptance=(0.9, 0.6),
        dtype="float32",
        bandwidth=0.01,
    )
    rows = compare_heads("nemotron-3-tiny", config).rows
    assert len(rows) == 2 * 2 * 2 * 2
    row = next(
        row
        for row in rows
        if (row.pattern, row.format, row.draft_vocab_size, row.batch_size) == ("*E", "nvfp4", 64, 8)
    )
    model = open_model("nemotron-3-tiny", CPU, "float32", "*E", head_format="nvfp4")
    roofline = Roofline(
        get_config("nemotron-3-tiny", "*E").replace(mtp_num_depths=4),
        torch.float32,
        draft_vocab_size=64,
        held=ModelWeights.of(model),
    )
    speeds = [
        roofline.decode(8, [0.9, 0.6, 0.6, 0.6][:k], 512).limit_tokens_per_s(*config.rates)
        for k in range(5)
    ]
    assert row.tokens_per_s == pytest.approx(max(speeds))
    assert speeds.index(max(speeds)) == row.best_drafts
    assert row.gain == pytest.approx(max(speeds) / speeds[0])
    own = [*model.mtp.parameters()]
    assert row.parameters > sum(one.numel() for one in own if one.dim() == 2) / 2

    # A dense FFN has no experts, and whatever is cheaper is not slower.
    by_head = {(one.pattern, one.format, one.draft_vocab_size, one.batch_size): one for one in rows}
    for (head, format_, tokens, batch), one in by_head.items():
        cheaper = by_head[head, format_, 64, batch]
        assert cheaper.draft_bytes <= one.draft_bytes and cheaper.gain >= one.gain
        if format_ == "float32":
            assert by_head[head, "nvfp4", tokens, batch].draft_bytes < one.draft_bytes


def test_a_window_bounds_what_a_draft_reads() -> None:
    config = HeadsConfig(
        head=("*",), attention_windows=(0, 64), context_length=4096, batch_size=(2,), bandwidth=0.01
    )
    for head, cheaper in (("*", True), ("*E", True)):
        rows = compare_heads("nemotron-3-tiny", replace(config, head=(head,))).rows
        assert [row.attention_window for row in rows] == [0, 64]
        whole, part = (row.draft_bytes for row in rows)
        attention = get_config("nemotron-3-tiny").attention
        entry = 2 * attention.num_query_groups * attention.kv_channels * 2  # bytes in bfloat16
        assert (whole - part == pytest.approx(2 * entry * (4096 - 64))) == cheaper


@each(
    ("model", "head", "message"),
    [
        ("nemotron-3-tiny", "*-:many", r"head '\*-:many': 'many' is no width of a dense FFN"),
        ("nemotron-h-tiny", "*-:96", "the base has dense FFNs of its own"),
        ("nemotron-3-tiny", "X", "pattern 'X' does not fit"),
        ("nemotron-3-tiny", "*E:96", r"head '\*E:96' has no dense FFN: leave the width out"),
        ("nemotron-3-tiny", "*-:", "'' is no width of a dense FFN"),
        ("nemotron-3-tiny", "*-", r"a width may follow it, as in '\*-:4096'"),
        ("nemotron-3-tiny", ":96", "has no layers: give some by --head"),
    ],
)
def test_heads_that_cannot_be(model: str, head: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare_heads(model, HeadsConfig(head=(head,)))


def test_drafts_are_timed_by_leaving_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter is back afterwards, and no head runs in the steps without drafts."""
    model = open_model("nemotron-3-tiny", CPU, "float32", "*E")
    seen: list[bool] = []
    alone = decode_run.Contender.without_drafting

    def without(self: decode_run.Contender) -> decode_run.Window:
        executor = self.llm.engine.executor
        drafter = executor.drafter
        drafted: list[int] = []
        monkeypatch.setattr(type(drafter), "draft", lambda *_: drafted.append(1))
        try:
            window = alone(self)
        finally:
            monkeypatch.undo()
            monkeypatch.setattr(decode_run.Contender, "without_drafting", without)
        seen.append(not drafted and executor.drafter is drafter and window.steps > 0)
        return window

    monkeypatch.setattr(decode_run.Contender, "without_drafting", without)
    result = measure_decode(model, replace(DECODE, draft_cost=True, trace=False))
    plain, drafted = result.rows
    assert seen == [True]
    assert plain.draft_byte_share is plain.draft_time_share is None and not plain.draft_bytes
    assert drafted.draft_byte_share == pytest.approx(
        sum(drafted.draft_bytes.values()) / sum(drafted.verify_bytes.values())
    )
    # Two runs on whatever else the machine does: their quotient is checked with times of our own.
    assert math.isfinite(drafted.draft_time_share)

    table = draft_parts(result)
    assert {row.part for row in table.rows} == {*drafted.verify_bytes, *drafted.draft_bytes}
    assert sum(row.share for row in table.rows) == pytest.approx(drafted.draft_byte_share)


def test_the_share_in_time_is_what_drafts_add(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = iter([(0.6, 4), (0.3, 3)])

    def window(self: decode_run.Contender) -> decode_run.Window:
        seconds, steps = next(windows)
        return decode_run.Window(seconds, steps, [steps * 6, steps * 2, 10, 9, 10, 9])

    monkeypatch.setattr(decode_run.Contender, "run", window)
    monkeypatch.setattr(decode_run.Contender, "check", lambda *_: None)
    model = open_model("nemotron-3-tiny", CPU, "float32", "*E")
    config = replace(DECODE, num_speculative_tokens=(2,), draft_cost=True, trace=False)
    (row,) = measure_decode(model, config).rows
    assert row.draft_time_share == pytest.approx(0.15 / 0.1 - 1)


def test_what_has_no_cost_of_drafts_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = open_model("nemotron-3-tiny", CPU, "float32", "*E")
    engine = replace(DECODE.engine, speculative_token_tree="[2, 1]")
    (row,) = measure_decode(
        model,
        replace(DECODE, num_speculative_tokens=(2,), draft_cost=True, trace=False, engine=engine),
    ).rows
    assert row.draft_time_share is None and row.draft_byte_share is None
    assert [record.getMessage() for record in caplog.records if "draft_cost" in record.msg] == [
        "draft_cost has no effect for batch 2, K = 2: it is for chains of a fixed number of drafts"
        " on one pipeline stage"
    ]


def test_nothing_is_timed_unless_asked_for() -> None:
    model = open_model("nemotron-3-tiny", CPU, "float32", "*E")
    (_, row) = measure_decode(model, replace(DECODE, trace=False)).rows
    assert row.draft_byte_share > 0 and row.draft_time_share is None
