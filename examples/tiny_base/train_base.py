"""Train the tiny base that the demo and the tests use, in minutes on one GPU, or its twin with
experts.

    python examples/tiny_base/corpus.py CORPUS_DIR
    python examples/tiny_base/make_tokenizer.py CORPUS_DIR MODEL_DIR
    python examples/tiny_base/train_base.py --corpus CORPUS_DIR --model MODEL_DIR [--steps N]
    python examples/tiny_base/train_base.py --corpus CORPUS_DIR --model MODEL_DIR --mixture

The result is a Nemotron-H model in the Hugging Face layout without MTP heads. Its held-out loss is
printed last. With --mixture some of its layers are mixtures of experts. It has as many weights and
the dense base's tokenizer, whose files MODEL_DIR must hold: copy them from
examples/tiny_base/model. It begins with weights of the dense base and learns from its predictions
too, see mixture.py.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from mixture import balance_experts, mixture_of, start_from
from torch import Tensor
from transformers import AutoTokenizer

from mtpkit.checkpoint import load_model, save_hf_model
from mtpkit.config import ModelConfig
from mtpkit.model import SequenceInput, base_forward, build_model, compute_logits
from mtpkit.platform import default_device

DENSE = Path(__file__).parent / "model"
"""The dense tiny base, from which a mixture begins."""

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


def loss_of(model, ids: Tensor, documents: Tensor, teacher=None) -> Tensor:
    """Mean cross-entropy of the next token, without predictions across the end of a document. With
    a teacher, the mean of it and of the KL divergence from the teacher's predictions."""
    same = (documents[:, 1:] == documents[:, :-1]).flatten()
    logits = _logits(model, ids, documents)
    losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    if teacher is not None:
        with torch.no_grad():
            target = _logits(teacher, ids, documents).log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), target, reduction="none", log_target=True)
        losses = (losses + divergence.sum(-1)) / 2
    return (losses * same).sum() / same.sum()


def _logits(model, ids: Tensor, documents: Tensor) -> Tensor:
    """Logits [b * length, vocabulary] of all tokens but the last one of each window."""
    hidden = base_forward(model, ids[:, :-1], SequenceInput(documents=documents[:, :-1]))
    return compute_logits(model, hidden.transpose(0, 1)).float().flatten(0, 1)


@torch.no_grad()
def evaluate(model, tokens: Tensor, length: int, batch: int = 32) -> float:
    """Held-out loss over consecutive windows."""
    starts = torch.arange(0, len(tokens) - length - 1, length, device=tokens.device)
    return float(
        np.mean(
            [loss_of(model, *batch_of(tokens, part, length)).item() for part in starts.split(batch)]
        )
    )


def train(model, data: dict[str, Tensor], args: argparse.Namespace, teacher=None) -> None:
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
        loss = loss_of(model, *batch_of(tokens, starts, args.length), teacher)
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
    parser.add_argument("--mixture", action="store_true", help="train the twin with experts")
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
    config = mixture_of(CONFIG) if args.mixture else CONFIG
    model = build_model(config, device=device, seed=args.seed).train()
    teacher = None
    if args.mixture:
        teacher = load_model(DENSE, torch.float32, device).eval()
        start_from(teacher, model)
        balance_experts(model)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(data['train']):,}"
        " training tokens"
    )
    train(model, data, args, teacher)
    # A model of its own, since `to` would round the biases of experts too, which stay in fp32.
    rounded = build_model(config, torch.bfloat16, device)
    rounded.load_state_dict(model.state_dict())
    save_hf_model(rounded, args.model)
    saved = load_model(args.model, torch.float32, device)
    print(
        json.dumps(
            {
                "heldout_loss": evaluate(saved, data["heldout"], args.length),
                "steps": args.steps,
            }
        )
    )


if __name__ == "__main__":
    main()
