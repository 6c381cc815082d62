"""An MTP depth of Qwen3-Next and Qwen3.5 in fp64, straight from the tensors of a directory, written
from what is published about them: names, norms of 1 + w, gates per head, half-style rotary
embedding of the first channels."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint.qwen_models import text_config


class Head:
    """Depths of the head in a directory; hidden states and token ids are [s, ...] of one row."""

    def __init__(self, directory: Path) -> None:
        self.weights = {
            name: t.double() for name, t in load_file(directory / "model.safetensors").items()
        }
        self.config = text_config(directory)

    def norm(self, name: str, x: Tensor) -> Tensor:
        rms = torch.sqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x / rms * (1 + self.weights[f"mtp.{name}.weight"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"mtp.{name}.weight"].t()

    def depth(self, previous: Tensor, tokens: Tensor) -> Tensor:
        """g^k at each position from g^(k-1) there and the token k places on."""
        (table,) = (t for name, t in self.weights.items() if name.endswith("embed_tokens.weight"))
        both = [
            self.norm("pre_fc_norm_embedding", table[tokens]),
            self.norm("pre_fc_norm_hidden", previous),
        ]
        x = self.linear("fc", torch.cat(both, -1))
        x = x + self.attention(self.norm("layers.0.input_layernorm", x))
        x = x + self.feed_forward(self.norm("layers.0.post_attention_layernorm", x))
        return self.norm("norm", x)

    def attention(self, x: Tensor) -> Tensor:
        heads = self.config["num_attention_heads"]
        groups = self.config["num_key_value_heads"]
        width = self.config["head_dim"]
        own = "layers.0.self_attn."
        q, gate = self.linear(f"{own}q_proj", x).unflatten(-1, (heads, 2, width)).unbind(-2)
        k, v = (self.linear(f"{own}{name}_proj", x).unflatten(-1, (groups, width)) for name in "kv")
        q = self.rotated(self.norm(f"{own}q_norm", q))
        k = self.rotated(self.norm(f"{own}k_norm", k))
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        outputs = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = (q[:, head] @ k[:, group].t() / math.sqrt(width)).masked_fill(
                future, -math.inf
            )
            outputs.append(scores.softmax(-1) @ v[:, group] * torch.sigmoid(gate[:, head]))
        return self.linear(f"{own}o_proj", torch.cat(outputs, -1))

    def rotated(self, x: Tensor) -> Tensor:
        """x [s, heads, d] at positions 0, 1, 2, .."""
        rope = self.config["rope_parameters"]
        count = int(x.shape[-1] * rope.get("partial_rotary_factor", 0.25))
        rates = rope["rope_theta"] ** -(torch.arange(0, count, 2).double() / count)
        angles = torch.arange(len(x)).double()[:, None, None] * rates
        first, second = x[..., :count].chunk(2, -1)
        turned = (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        )
        return torch.cat([*turned, x[..., count:]], -1)

    def network(self, name: str, x: Tensor) -> Tensor:
        inner = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", inner)

    def feed_forward(self, x: Tensor) -> Tensor:
        own = "layers.0.mlp"
        if f"mtp.{own}.gate.weight" not in self.weights:
            return self.network(own, x)
        scores = self.linear(f"{own}.gate", x).softmax(-1)
        best, chosen = scores.topk(self.config["num_experts_per_tok"])
        if self.config.get("norm_topk_prob", True):
            best = best / best.sum(-1, keepdim=True)
        rows = []
        for token, weights, experts in zip(x, best, chosen.tolist(), strict=True):
            parts = [
                w * self.expert(f"{own}.experts", e, token)
                for w, e in zip(weights, experts, strict=True)
            ]
            rows.append(torch.stack(parts).sum(0))
        shared = self.network(f"{own}.shared_expert", x)
        return (
            torch.stack(rows) + torch.sigmoid(self.linear(f"{own}.shared_expert_gate", x)) * shared
        )

    def expert(self, name: str, number: int, x: Tensor) -> Tensor:
        packed = self.weights.get(f"mtp.{name}.gate_up_proj")
        if packed is None:
            return self.network(f"{name}.{number}", x)
        gate, up = (x @ packed[number].t()).chunk(2, -1)
        return (F.silu(gate) * up) @ self.weights[f"mtp.{name}.down_proj"][number].t()
