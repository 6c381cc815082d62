"""Which elements of a tensor a rank's part of the flat buffer is, as blocks that checkpoints can
hold."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mtpkit.training.config.settings import OptimizerConfig
from mtpkit.training.flat import (
    DECAYED,
    MATRIX,
    PARTIAL_MATRIX,
    PARTIAL_VECTOR,
    VECTOR,
    _block,
    kind_of,
)
from mtpkit.training.optimizer import HeadOptimizer
from tests.training.toy import toy_model


def part_of(shape, prepended=0):
    """A tensor-parallel rank's second half of rows, or its expert 3 of 5."""
    data = torch.arange(math.prod(shape)).view(shape)
    offsets = [(0, 3, 5)] if prepended else [(0, 1, 2)]
    return data, ShardedTensor.from_rank_offsets(
        "x", data, *offsets, prepend_axis_num=prepended, replica_id=(0, 1, 7)
    )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 1), st.data())
def test_blocks_are_the_range_in_its_order(shape, prepended, data):
    values, part = part_of(shape, prepended)
    low = data.draw(st.integers(0, values.numel() - 1))
    high = data.draw(st.integers(low + 1, values.numel()))
    covered = []
    whole = torch.full(part.global_shape, -1)
    whole[
        tuple(
            slice(o, o + s)
            for o, s in zip(part.global_offset, [1] * prepended + shape, strict=True)
        )
    ] = values
    while low < high:
        block = _block(part, low, high, replicated=False)
        place = tuple(
            slice(o, o + s) for o, s in zip(block.global_offset, block.local_shape, strict=True)
        )
        covered += whole[place].flatten().tolist()
        low += math.prod(block.local_shape)
        assert block.replica_id == (0, 1, 0)
    assert covered == list(range(high - len(covered), high))


def test_the_blocks_of_the_docstring():
    _, part = part_of([4, 3])
    low = 2
    found = []
    while low < 10:
        block = _block(part, low, 10, replicated=True)
        found.append((block.global_offset, block.local_shape))
        low += math.prod(block.local_shape)
    assert found == [((4, 2), (1, 1)), ((5, 0), (2, 3)), ((7, 0), (1, 1))]


def test_kinds_of_parameters():
    model = toy_model(mtp_pattern="M*")
    heads = {
        name: kind_of(parameter)
        for name, parameter in model.named_parameters()
        if name.startswith("mtp.")
    }
    assert set(heads.values()) == {DECAYED, MATRIX, VECTOR}
    partial = torch.nn.Parameter(torch.zeros(2, 2))
    partial.sequence_parallel = True
    assert (
        kind_of(partial) == PARTIAL_MATRIX and kind_of(torch.nn.Parameter(torch.zeros(2))) == VECTOR
    )
    vector = torch.nn.Parameter(torch.zeros(2))
    vector.sequence_parallel = True
    assert kind_of(vector) == PARTIAL_VECTOR


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_element_is_updated_once(kind):
    model = toy_model(mtp_pattern="M*-")
    optimizer = HeadOptimizer(model.mtp.parameters(), OptimizerConfig(kind=kind))
    (buffer,) = optimizer.buffers
    regions = [region for region in buffer.regions if len(region.master)]
    places = sorted((region.first, region.first + len(region.master)) for region in regions)
    assert places[0][0] == 0 and places[-1][1] == sum(
        parameter.numel() for parameter in model.mtp.parameters()
    )
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(places))
