"""A toy model and toy batches for the training tests."""

import torch

from mtpkit.config import ModelConfig
from mtpkit.data import PackedBatch
from mtpkit.model import build_model

VOCAB = 24

CONFIG = ModelConfig(
    family="nemotron_h",
    vocab_size=VOCAB,
    hidden_size=32,
    pattern="M*-",
    mtp_pattern="*-",
    mtp_num_depths=3,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=48,
    mamba_num_heads=4,
    mamba_head_dim=8,
    mamba_state_dim=8,
    mamba_num_groups=2,
    mamba_chunk_size=8,
    init_std=0.2,
    eos_token_ids=(0,),
)


def toy_model(dtype=torch.float32, **changes):
    return build_model(CONFIG.replace(**changes), dtype=dtype)


def toy_batch(lengths, wanted=0.8, seed=0):
    """One sequence a list of document lengths; tokens are wanted at random."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), sum(lengths[0]))
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    return PackedBatch(
        token_ids=torch.randint(VOCAB, shape, generator=generator),
        loss_mask=torch.rand(shape, generator=generator) < wanted,
        documents=documents,
        positions=torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]),
    )


def cut(batch, row, start, end):
    """Tokens start .. end - 1 of one row, as a batch."""
    place = (slice(row, row + 1), slice(start, end))
    return PackedBatch(batch.token_ids[place], batch.loss_mask[place], batch.documents[place], batch.positions[place])
