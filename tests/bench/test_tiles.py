"""`benchmarks.tiles`: what it would time, and that it leaves the kernels' tables as they were."""

import torch

from benchmarks import tiles
from mtpkit.kernels.quantized import experts, linear


def test_every_matrix_of_a_model_is_a_case(monkeypatch):
    monkeypatch.setattr(tiles, "DEVICE", torch.device("cpu"))
    found = tiles.cases(tiles.Task("nemotron-3-tiny", "int4", 3, 0))
    assert {case.op for case in found} == {"quantized_linear", "quantized_experts"}
    assert all("int4, [3, " in case.shape for case in found)
    choices = [*tiles.choices()]
    assert len(choices) == len({*choices}) == 108


def test_a_choice_holds_for_all_matrices_until_the_end():
    before = [dict(table) for table in (linear.TILES, experts.TILES, experts.FEW)]
    choice = linear.Choice(linear.Tile(64, 64, 3, 8), 2)
    with tiles.chosen(choice):
        assert all({*sizes.values()} == {(choice,)} for sizes in linear.TILES.values())
        assert all({*sizes.values()} == {choice.tile} for sizes in experts.TILES.values())
        assert {*experts.FEW.values()} == {(choice,)} and choice.resident == experts.RESIDENT
    assert experts.RESIDENT == 3
    assert before == [linear.TILES, experts.TILES, experts.FEW]
