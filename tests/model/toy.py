"""Toy models with every kind of layer."""

import functools

import torch

from mtpkit.model import build_model
from tests.toy_config import toy_config

VOCAB = 40

CONFIG = toy_config(
    vocab_size=VOCAB,
    pattern="M*-E",
    mamba_chunk_size=4,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=16,
    moe_router_topk_scaling_factor=2.5,
)


@functools.cache
def toy_model(**changes):
    """Read-only: tests share it."""
    return build_model(CONFIG.replace(**changes), device="cpu", seed=3).requires_grad_(False)


def toy_tokens(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def packed(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents and positions [1, s] of one row."""
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return documents[None], torch.cat([torch.arange(length) for length in lengths])[None]
