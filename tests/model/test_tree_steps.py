"""Steps that feed trees compute along every path what whole sequences do, and go on from the
accepted one."""

import pytest
import torch

from mtpkit.kernels.ancestors import ancestor_masks
from mtpkit.model import SequenceInput, StepInput, base_forward, state_specs
from mtpkit.model.inputs import TreeInput
from mtpkit.model.state import Committed, StateLayout, StateSizes
from tests.kernels.recurrence import relative
from tests.kernels.test_trees import path
from tests.model.toy import VOCAB, toy_model

TREES = [[-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 0, 2, 3, 3]]
TOKENS = 7
DEPTH = 3
BLOCK_SIZE = 4
TOLERANCE = 1e-5
MASKS, DEPTHS = ancestor_masks(torch.tensor(TREES), DEPTH)
SLOTS = torch.tensor([2, 0])
TABLES = torch.randperm(40, generator=torch.Generator().manual_seed(3)).view(2, 20)
PATTERNS = {
    "mamba": dict(pattern="MM*"),
    "delta": dict(pattern="G*G"),
    "latent": dict(
        pattern="+M+", mtp_pattern="+", qk_layernorm=True, layernorm_zero_centered_gamma=True
    ),
    "attention": dict(pattern="*-*", position_embedding_type="rope", rotary_percent=0.5),
}


class Decoder:
    """Two requests: a prompt of each, then trees. `forget`: paths are not kept."""

    def __init__(self, model, rollback: str, forget: bool = False) -> None:
        self.model = model
        self.forget = forget
        layout = StateLayout(
            state_specs(model), StateSizes(BLOCK_SIZE, TOKENS, rollback, torch.float32)
        )
        self.states = layout.allocate(40, 3, torch.device("cpu"))
        for state in self.states.all():
            for tensor in state.tensors.values():
                tensor.fill_(torch.nan)
        self.committed = Committed.none(layout.counters, 3, torch.device("cpu"))
        self.tokens: list[list[int]] = [[], []]

    def inputs(
        self, lens: list[int], decoding: bool, tree: TreeInput | None, depths: torch.Tensor
    ) -> StepInput:
        contexts = torch.tensor([len(tokens) for tokens in self.tokens])
        places = torch.cat(
            [context + torch.arange(count) for context, count in zip(contexts, lens, strict=True)]
        )
        rows = torch.arange(2).repeat_interleave(torch.tensor(lens))
        return StepInput(
            positions=contexts[rows] + depths,
            query_start=torch.tensor([0, *lens]).cumsum(0),
            context_lens=contexts,
            block_tables=TABLES,
            kv_slots=TABLES[rows, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE,
            state_slots=SLOTS,
            committed=self.committed.at(SLOTS),
            num_decode_rows=2 * decoding,
            decode_width=TOKENS * decoding,
            states=self.states,
            tree=tree,
        )

    def prefill(self, prompts: list[list[int]]) -> None:
        lens = [len(prompt) for prompt in prompts]
        depths = torch.cat([torch.arange(count) for count in lens])
        inputs = self.inputs(lens, False, None, depths)
        base_forward(
            self.model, torch.tensor([[token for prompt in prompts for token in prompt]]), inputs
        )
        self.committed.put(SLOTS, inputs.committed_after(torch.tensor(lens)))
        self.tokens = [list(prompt) for prompt in prompts]

    def step(self, token_ids: torch.Tensor, paths: list[list[int]]) -> torch.Tensor:
        """Feed trees [2, T] and accept a path of each; returns hidden states [2, T, h]."""
        contexts = torch.tensor([len(tokens) for tokens in self.tokens])
        tree = TreeInput(MASKS, contexts, torch.tensor(TREES))
        inputs = self.inputs([TOKENS] * 2, True, tree, DEPTHS.flatten())
        hidden = base_forward(self.model, token_ids.flatten()[None], inputs)
        accepted = torch.tensor([len(one) - 1 for one in paths])
        if not self.forget:
            inputs.keep_path(
                torch.tensor([one + [TOKENS + 9] * (1 + DEPTH - len(one)) for one in paths]),
                accepted,
            )
        self.committed.put(SLOTS, inputs.committed_after(accepted + 1))
        for row, one in enumerate(paths):
            self.tokens[row] += token_ids[row, one].tolist()
        return hidden.view(2, TOKENS, -1)


def run(model, rollback: str, forget: bool = False, steps: int = 12) -> float:
    """The worst relative error of hidden states over all paths of all steps."""
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    decoder = Decoder(model, rollback, forget)
    with torch.inference_mode():
        decoder.prefill([[1, 2, 3, 4, 5], [6]])
        for step in range(steps):
            drawn = torch.randint(0, VOCAB, (2, TOKENS), generator=generator)
            ends = torch.randint(0, TOKENS, (2,), generator=generator).tolist()
            before = [list(tokens) for tokens in decoder.tokens]
            hidden = decoder.step(
                drawn, [path(tree, end) for tree, end in zip(TREES, ends, strict=True)]
            )
            for row, tree in enumerate(TREES):
                for token in range(TOKENS) if step in (0, 1, steps - 1) else (6,):
                    whole = torch.tensor([before[row] + drawn[row, path(tree, token)].tolist()])
                    want = base_forward(model, whole, SequenceInput())[-1, 0]
                    if not hidden[row, token].isfinite().all():
                        return torch.inf
                    worst = max(worst, relative(hidden[row, token], want.double()))
    return worst


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("name", PATTERNS)
def test_paths_of_trees(name, rollback):
    """Over a dozen steps the rings wrap and are folded, and blocks end inside trees."""
    assert run(toy_model(**PATTERNS[name]), rollback) < TOLERANCE


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_path_that_is_not_kept_would_be_seen(name, rollback):
    assert run(toy_model(**PATTERNS[name]), rollback, forget=True, steps=3) > 100 * TOLERANCE
