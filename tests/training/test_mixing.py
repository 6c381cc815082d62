"""The base's hidden states among those that depths hand on."""

import itertools

import pytest
import torch

from mtpkit.data.dataset import PackedBatch
from mtpkit.errors import UserError
from mtpkit.model import SequenceInput, base_forward, build_model, unroll_depths
from mtpkit.model.mtp import shift_states
from mtpkit.training import step
from mtpkit.training.config.reading import load_config
from mtpkit.training.config.settings import LossConfig, OptimizerConfig
from mtpkit.training.depths import HiddenMix, measure_depths, run_depths
from mtpkit.training.heads import freeze_base
from mtpkit.training.optimizer import HeadOptimizer
from tests.ranks import run_ranks
from tests.shared import each
from tests.training.toy import CONFIG, cut, toy_batch, toy_model

BATCH = toy_batch([[20]])
NEEDED = ["model=base", "output=run", "data.train=[a.txt]", "heads.attention=serving"]


def generators(rows):
    return [torch.Generator().manual_seed(7 + row) for row in range(rows)]


def test_sample_takes_whole_states_at_the_share():
    own = torch.randn(50, 40, 3)
    base = torch.randn(50, 40, 3)
    mixed = HiddenMix(0.25, "sample", generators(40))(own, base)
    from_base = (mixed == base).all(-1)
    assert torch.equal(from_base, ~(mixed == own).any(-1))
    assert 0.2 < from_base.float().mean() < 0.3
    assert torch.equal(HiddenMix(0.25, "sample", generators(40))(own, base), mixed)


def test_parts_of_a_sequence_read_their_part_of_the_draws():
    own = torch.randn(50, 4, 3)
    base = torch.randn(50, 4, 3)

    def mixed(own, base, part):
        return HiddenMix(0.5, "sample", generators(4), part)(own, base)

    whole = mixed(own, base, (0, 1))
    parts = [
        mixed(*parts, (number, 2))
        for number, parts in enumerate(zip(own.chunk(2), base.chunk(2), strict=True))
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_draws_follow_from_seed_step_and_sequence():
    """A run thus resumes exactly, however its sequences are spread, and no two sequences draw
    alike."""
    model = toy_model()
    own = torch.randn(50, 1, 3)
    base = torch.randn(50, 1, 3)

    def mixed(seed, number, *sequences):
        settings = load_config(None, [*NEEDED, "loss.hidden_mix=0.5", f"seed={seed}"])
        torch.rand(3)  # whatever else was drawn
        states = (part.expand(-1, len(sequences), -1) for part in (own, base))
        return step._hidden_mix(model, settings, number, range(sequences[0], sequences[-1] + 1))(
            *states
        )

    draws = [mixed(*place) for place in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))]
    assert torch.equal(mixed(0, 1, 0), draws[2])
    assert torch.equal(mixed(0, 0, 0, 1), torch.cat(draws[:2], 1))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(draws, 2))


def test_ends_of_the_share():
    own = torch.randn(5, 4, 3).bfloat16()
    base = torch.randn(5, 4, 3).bfloat16()
    for kind in ("sample", "blend"):
        assert torch.equal(HiddenMix(1.0, kind, generators(4))(own, base), base)
    torch.testing.assert_close(
        HiddenMix(0.25, "blend")(own, base), 0.75 * own + 0.25 * base, rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("attention", ["serving", "per_depth"])
def test_each_depth_gets_the_state_that_its_own_stands_for(attention):
    model = toy_model()
    batch = toy_batch([[9], [9]])
    calls = []

    def mix(own, base):
        calls.append((own, base))
        return base

    with torch.no_grad():
        hidden = base_forward(model, batch.token_ids, SequenceInput())
        states = list(unroll_depths(model, hidden, batch.token_ids, 3, attention, mix=mix))
    assert len(calls) == 2
    for depth, (own, base) in enumerate(calls, start=1):
        assert torch.equal(own, states[depth - 1])
        assert torch.equal(base[:-depth], hidden[depth:]) and not base[-depth:].any()


def test_a_depth_that_reads_the_base_alone_does_what_the_first_does_one_token_later():
    """A repeated head of one MLP layer: nothing of it depends on the depth."""
    model = toy_model(mtp_pattern="-")
    batch = toy_batch([[12]])
    with torch.no_grad():
        hidden = base_forward(model, batch.token_ids, SequenceInput())
        states = list(
            unroll_depths(
                model, hidden, batch.token_ids, 3, "per_depth", mix=HiddenMix(1.0, "blend")
            )
        )
    for depth in (1, 2):
        torch.testing.assert_close(states[depth][: -depth - 1], states[0][depth:-1])


def sequence_parallel_rank(rank):
    experts = CONFIG.replace(pattern="M*E", num_moe_experts=4, moe_ffn_hidden_size=16)
    model = build_model(experts, device="cpu", tensor_parallel=2)
    assert model.config.sequence_parallel
    whole = torch.randn(12, 2, 32, generator=torch.Generator().manual_seed(0))
    for depth in (1, 7, 12, 13):
        moved = torch.cat([whole[depth:], torch.zeros(min(depth, 12), 2, 32)])
        assert torch.equal(shift_states(model, whole.chunk(2)[rank], depth), moved.chunk(2)[rank])


def test_states_move_across_the_ranks_of_a_sequence():
    run_ranks(sequence_parallel_rank)


@pytest.mark.parametrize("attention", ["serving", "per_depth"])
def test_a_document_among_others_is_trained_as_alone(attention):
    model = toy_model()
    batch = toy_batch([[7, 10, 3]])
    mix = HiddenMix(0.5, "blend")
    packed = run_depths(model, batch, 3, attention, LossConfig(), mix)[0]
    alone = sum(
        run_depths(model, cut(batch, 0, start, end), 3, attention, LossConfig(), mix)[0]
        for start, end in ((0, 7), (7, 17), (17, 20))
    )
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)


def gradients(*overrides, batches=(BATCH,)):
    model = toy_model()
    optimizer = HeadOptimizer(freeze_base(model).values(), OptimizerConfig())
    found = []
    optimizer.step = lambda lr: (
        found.extend(grad.clone() for grad in optimizer.buffers[0].grads) or 0.0
    )
    step.train_step(model, batches, optimizer, load_config(None, [*NEEDED, *overrides]), 0.0)
    return torch.cat([grad.flatten() for grad in found])


def test_the_settings_reach_the_depths():
    plain, sampled, blended, cut_off = (
        [gradients(*overrides) for _ in range(2)]
        for overrides in (
            [],
            ["loss.hidden_mix=0.5"],
            ["loss.hidden_mix=0.5", "loss.hidden_mix_kind=blend"],
            ["loss.top_k=2"],
        )
    )
    assert all(torch.equal(*pair) for pair in (plain, sampled, blended, cut_off))
    assert len({tuple(pair[0].tolist()) for pair in (plain, sampled, blended, cut_off)}) == 4


def test_micro_batches_draw_what_their_sequences_draw_together():
    batch = toy_batch([[20], [7, 13], [20], [20]])
    halves = [
        PackedBatch(*(part[rows] for part in fields(batch))) for rows in (slice(0, 2), slice(2, 4))
    ]
    for overrides in (["loss.hidden_mix=0.5"], ["loss.hidden_mix=0.5", "heads.recompute=true"]):
        whole = gradients(*overrides, batches=[batch])
        torch.testing.assert_close(
            gradients(*overrides, batches=halves), whole, rtol=1e-4, atol=1e-6
        )
    assert not torch.allclose(
        gradients("loss.hidden_mix=0.5", batches=halves[::-1]), whole, rtol=1e-2
    )


def fields(batch):
    return batch.token_ids, batch.loss_mask, batch.documents, batch.positions


def test_evaluation_reads_what_decoding_does():
    model = toy_model()
    batch = toy_batch([[20]])
    sums = [
        measure_depths(model, batch, 3, "serving", config.loss)[0].values
        for config in (load_config(None, [*NEEDED, f"loss.hidden_mix={share}"]) for share in (0, 1))
    ]
    assert torch.equal(*sums)


@each(
    ("overrides", "message"),
    [
        (["loss.hidden_mix=1.5"], r"loss\.hidden_mix is 1\.5, must be from 0 to 1"),
        (
            ["loss.hidden_mix=0.5", "heads.num_depths=1"],
            r"loss\.hidden_mix has no effect on one depth",
        ),
        (["loss.top_k=5", "loss.kind=ce"], r"loss\.top_k has no effect on loss\.kind=ce"),
        (["loss.top_k=-1"], r"loss\.top_k is -1, must be from 0 to"),
        (["loss.hidden_mix_kind=often"], r"hidden_mix_kind"),
    ],
)
def test_settings_that_clash(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(None, [*NEEDED, *overrides])
