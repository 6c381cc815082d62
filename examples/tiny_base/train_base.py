"""Train the tiny base that the demo and the tests use, in minutes on one GPU.

    python examples/tiny_base/corpus.py CORPUS_DIR
    python examples/tiny_base/make_tokenizer.py CORPUS_DIR MODEL_DIR
    python examples/tiny_base/train_base.py --corpus CORPUS_DIR --model MODEL_DIR [--steps N]

The result is a Nemotron-H model in the Hugging Face layout without MTP heads. Its held-out loss is
printed last.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from mtpkit.checkpoint import save_hf_model
from mtpkit.config import ModelConfig
from mtpkit.model import SequenceInput, base_forward, build_model, compute_logits
from mtpkit.platform import default_device

CONFIG = ModelConfig.of(
    family="nemotron_h",
    vocab_size=4096,
    hidden_size=192,
    pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M*-",
    max_position_embeddings=4096,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=64,
    ffn_hidden_size=512,
    mamba_num_heads=6,
    mamba_head_dim=64,
    mamba_state_dim=64,
    mamba_num_groups=2,
    mamba_chunk_size=64,
    bos_token_id=0,
    eos_token_ids=(0,),
    pad_token_id=0,
)


def tokenize(path: Path, tokenizer) -> np.ndarray:
    """Tokens of all documents of a jsonl file as one array; each document ends with the
    end-of-sequence token."""
    with path.open() as lines:
        texts = [json.loads(line)["text"] for line in lines]
    parts = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    return np.concatenate([np.asarray(part, dtype=np.uint16) for part in parts])


def batch_of(tokens: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Windows [b, length + 1] of the tokens that begin at `starts`, and the document index of each
    token."""
    ids = tokens[starts[:, None] + torch.arange(length + 1, device=tokens.device)]
    documents = (ids == 0).cumsum(1) - (ids == 0).int()
    return ids, documents


def loss_of(model, ids: Tensor, documents: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, without predictions across the end of a document."""
    hidden = base_forward(model, ids[:, :-1], SequenceInput(documents=documents[:, :-1]))
    logits = compute_logits(model, hidden.transpose(0, 1)).float()
    same = documents[:, 1:] == documents[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return (losses * same.flatten()).sum() / same.sum()


@torch.no_grad()
def evaluate(model, tokens: Tensor, length: int, batch: int = 32) -> float:
    """Held-out loss over consecutive windows."""
    starts = torch.arange(0, len(tokens) - length - 1, length, device=tokens.device)
    return float(
        np.mean(
            [loss_of(model, *batch_of(tokens, part, length)).item() for part in starts.split(batch)]
        )
    )


def train(model, data: dict[str, Tensor], args: argparse.Namespace) -> None:
    """Train with AdamW, warm-up and a cosine schedule on random windows."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=args.lr, betas=(0.9, 0.95), fused=torch.cuda.is_available()
    )
    tokens = data["train"]
    generator = torch.Generator(tokens.device).manual_seed(args.seed)
    started = time.time()
    for step in range(args.steps):
        progress = max(0.0, (step - args.warmup) / max(1, args.steps - args.warmup))
        rate = (
            args.lr
            * min(1.0, (step + 1) / args.warmup)
            * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(
            len(tokens) - args.length - 1, (args.batch,), device=tokens.device, generator=generator
        )
        loss = loss_of(model, *batch_of(tokens, starts, args.length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0 or step == args.steps - 1:
            held_out = evaluate(model, data["heldout"], args.length)
            rate = (step + 1) * args.batch * args.length / (time.time() - started)
            print(
                f"step {step} loss {loss.item():.4f} heldout {held_out:.4f} tokens/s {rate:.0f}",
                flush=True,
            )


def main() -> None:
    """Parse the arguments, train, and save the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="directory that holds the tokenizer and gets the weights",
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = default_device()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if len(tokenizer) != CONFIG.vocab_size:
        sys.exit(
            f"{args.model}: tokenizer has {len(tokenizer)} tokens, the model {CONFIG.vocab_size}"
        )
    data = {
        name: (
            torch.from_numpy(
                tokenize(args.corpus / f"{name}.jsonl", tokenizer).astype(np.int64)
            ).to(device)
        )
        for name in ("train", "heldout")
    }
    model = build_model(CONFIG, device=device, seed=args.seed).train()
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(data['train']):,}"
        " training tokens"
    )
    train(model, data, args)
    rounded = model.to(torch.bfloat16).eval()
    save_hf_model(rounded, args.model)
    print(
        json.dumps(
            {
                "heldout_loss": evaluate(rounded.float(), data["heldout"], args.length),
                "steps": args.steps,
            }
        )
    )


if __name__ == "__main__":
    main()
