"""Distribute the layers of the base over pipeline stages.

The frozen base only runs forward, one micro-batch after another (see `mtpkit.training.parallel`).
The last stage also trains the heads: with as many layers as the other stages, it would hold and
compute the most, and the slowest stage sets the pace. Layers are therefore distributed by memory,
by time or by decoding cost, and the last stage gets fewer.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Literal, get_args

from megatron.core.models.hybrid.hybrid_model import HybridModel

from mtpkit.config import Balance, ModelConfig
from mtpkit.errors import UserError, listed
from mtpkit.model.flops import FORWARD, FROZEN, TRAINED, head_matrices
from mtpkit.model.kinds import KINDS


@dataclass(frozen=True)
class Decoding:
    """Balance by the bytes of weights and recurrent states that a decode step reads."""

    drafts: int
    """Drafts per step; each one reads a head and the lm_head once more, on the last stage."""
    requests: int
    """Requests per step, which form one batch."""

    @classmethod
    def of(
        cls, config: ModelConfig, k: int | Literal["auto"], requests: int, stages: int
    ) -> "Decoding":
        """Return the balance for `k` drafts (`auto`: the default of the heads) and for `requests`
        requests, split into one batch per stage."""
        return cls(config.mtp.default_drafts if k == "auto" else k, -(-requests // stages))


StageBalance = Balance | Decoding
"""Balance of stages: for training, or for decoding."""

_TRAINED_BYTES = 18  # per weight of a head: bf16 weight; fp32 master, gradient and two moments
# in decoding: bf16, fp32
_WEIGHT_BYTES = 2
_STATE_BYTES = 4


def first_layer(model: HybridModel) -> int:
    """Return the index in the whole base of this stage's first layer."""
    return sum(map(len, model.stage_patterns[: model.pg_collection.pp.rank()]))


def stage_patterns(config: ModelConfig, stages: int, balance: StageBalance = "memory") -> list[str]:
    """Assign neighbouring layers to pipeline stages so that the costliest stage costs as little as
    possible.

    Memory counts the bf16 weights, including all experts and the embeddings of the first and last
    stage, and what AdamW keeps for the heads on one data-parallel rank. Time counts 2 FLOPs per
    weight of the base that a token uses, 6 per weight of the heads and depth, 4 per weight of
    lm_head and depth, and 2 per weight of lm_head for the base's own logits. Both leave out
    activations, attention scores, and the effects of recomputation and fp8. With `Decoding`, the
    cost is the bytes that a step reads: the weights of the layers (of experts, those that at least
    one token is expected to choose), the fp32 recurrent states of its requests, the lm_head on the
    last stage, and there for each draft a head and the lm_head once more. Keys and values are left
    out.

    Raises:
        UserError: fewer layers than stages, or an unknown balance.
    """
    pattern = config.pattern
    if stages > len(pattern):
        raise UserError(
            f"the base has {len(pattern)} layers, too few for {stages} pipeline stages; use fewer"
            " stages"
        )
    if not isinstance(balance, Decoding) and balance not in get_args(Balance):
        raise UserError(f"balance is {balance!r}, must be one of {listed(get_args(Balance))}")
    embedding = config.vocab_size * config.hidden_size
    depths = config.mtp.num_depths
    layers = [KINDS[letter].matrices(config) for letter in pattern]
    costs = list[float]()
    first = 0
    last = 0
    if balance == "time":
        costs = [FORWARD * layer.used for layer in layers]
        last = (TRAINED * head_matrices(config) + FROZEN * embedding) * depths + FORWARD * embedding
    elif isinstance(balance, Decoding):
        states = _STATE_BYTES * balance.requests
        # A request feeds its newest token and its drafts.
        tokens = balance.requests * (1 + balance.drafts)
        costs = [
            _WEIGHT_BYTES * layer.read(tokens) + states * KINDS[letter].memory(config).state
            for letter, layer in zip(pattern, layers, strict=True)
        ]
        drafted = (
            (head_matrices(config, all_experts=True) + embedding) * balance.drafts
            if balance.drafts
            else 0
        )
        last = _WEIGHT_BYTES * (embedding + drafted)
    else:
        costs = [2 * layer.held for layer in layers]
        # lm_head, and an embedding for the heads
        outside = 1 if config.tie_word_embeddings or not depths else 2
        trained = _TRAINED_BYTES * head_matrices(config, all_experts=True) * config.mtp.num_layers
        first = 2 * embedding
        last = 2 * embedding * outside + trained
    sums = list(itertools.accumulate(costs, initial=0))

    @functools.cache
    def best(stage: int, end: int) -> tuple[float, float, tuple[int, ...]]:
        """Split layers 0 .. end - 1 over stages 0 .. stage: largest cost, sum of squares, first
        layer of each stage."""
        more = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        if stage == 0:
            return sums[end] + more, (sums[end] + more) ** 2, (0,)
        found = []
        for start in range(stage, end):
            largest, squares, starts = best(stage - 1, start)
            cost = sums[end] - sums[start] + more
            found.append((max(largest, cost), squares + cost**2, (*starts, start)))
        # Of splits whose largest costs are equal, the sum of squares prefers the more even one.
        return min(found)

    starts = best(stages - 1, len(pattern))[2]
    return [pattern[start:end] for start, end in itertools.pairwise((*starts, len(pattern)))]
