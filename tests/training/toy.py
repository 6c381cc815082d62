"""A toy model and toy batches for the training tests."""

import torch

from mtpkit.data.build import build_dataset
from mtpkit.data.dataset import PackedBatch
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.model import SequenceInput, base_forward, build_model, compute_logits
from tests.toy_config import toy_config

VOCAB = 24

CONFIG = toy_config(vocab_size=VOCAB, mamba_chunk_size=8, eos_token_ids=(0,))


def toy_model(dtype=torch.float32, **changes):
    return build_model(CONFIG.replace(**changes), dtype=dtype, device="cpu")


def teach(model, text, tokenizer):
    """Train a base until it knows a text file."""
    data = build_dataset([text], load_tokenizer(tokenizer), 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        batch = data.batch([(step * 4 + row) % len(data) for row in range(4)])
        inputs = SequenceInput(batch.documents, batch.positions)
        hidden = base_forward(model, batch.token_ids, inputs)
        logits = compute_logits(model, hidden).transpose(0, 1)[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.token_ids[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


def toy_batch(lengths, wanted=0.8, seed=0):
    """One sequence a list of document lengths; tokens are wanted at random."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), sum(lengths[0]))
    documents = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    )
    return PackedBatch(
        token_ids=torch.randint(VOCAB, shape, generator=generator),
        loss_mask=torch.rand(shape, generator=generator) < wanted,
        documents=documents,
        positions=torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]),
    )


def cut(batch, row, start, end):
    """Tokens start .. end - 1 of one row, as a batch."""
    place = (slice(row, row + 1), slice(start, end))
    return PackedBatch(
        batch.token_ids[place],
        batch.loss_mask[place],
        batch.documents[place],
        batch.positions[place],
    )


def answer_batch(prompts, answers):
    """One sequence per prompt, padded behind its answer."""
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    place = torch.arange(max(lengths)).expand(len(lengths), -1)
    start, end = torch.tensor([list(map(len, prompts)), lengths])[..., None]
    token_ids = torch.zeros_like(place)
    for row, text in enumerate(zip(prompts, answers, strict=True)):
        token_ids[row, : lengths[row]] = torch.tensor([*text[0], *text[1]])
    padding = place >= end
    return PackedBatch(token_ids, (place >= start) & ~padding, padding.int(), place - padding * end)
