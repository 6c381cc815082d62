"""Toy models with every kind of layer."""

import functools

import torch

from mtpkit.model import build_model
from mtpkit.model.state import Committed, States
from tests.toy_config import DELTA, toy_config

VOCAB = 40

MLA = dict(
    q_lora_rank=12,
    kv_lora_rank=20,
    qk_head_dim=6,
    qk_pos_emb_head_dim=4,
    v_head_dim=10,
    rotary_scaling_factor=4,
    original_max_position_embeddings=6,
    mscale=0.8,
    mscale_all_dim=0.5,
)

CONFIG = toy_config(
    vocab_size=VOCAB,
    pattern="M*-E",
    mamba_chunk_size=4,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=16,
    moe_router_topk_scaling_factor=2.5,
    **MLA,
)


@functools.cache
def toy_model(**changes):
    """Read-only: tests share it. Beside heads of latent attention the base has it, too."""
    if "+" in changes.get("mtp_pattern", ""):
        changes = {"pattern": "M+-E", **changes}
    letters = changes.get("pattern", "") + changes.get("mtp_pattern", "")
    changes = DELTA | changes if "G" in letters else changes
    return build_model(CONFIG.replace(**changes), device="cpu", seed=3).requires_grad_(False)


def toy_tokens(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def packed(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents and positions [1, s] of one row."""
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return documents[None], torch.cat([torch.arange(length) for length in lengths])[None]


def move_slot(states: States, committed: Committed, old: int, new: int) -> None:
    """Put all that a slot of `states` and `committed` holds into another one; where it was is NaN
    then."""
    for state in (one for one in states.all() if one.unit == "slot"):
        for tensor in state.tensors.values():
            tensor[new] = tensor[old]
            tensor[old] = torch.nan
    committed.put(slice(new, new + 1), committed.at(slice(old, old + 1)))
