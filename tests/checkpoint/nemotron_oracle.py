"""MTP depths of Nemotron 3 in fp64, straight from the tensors of a directory, written from what is
published: attention without positions, experts with squared ReLU in a latent width, routers that
choose by biased scores."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class Heads:
    """Depths of the heads in a directory; hidden states and token ids are [s, ...] of one row."""

    def __init__(self, directory: Path) -> None:
        self.weights = {
            name: t.double() for name, t in load_file(directory / "model.safetensors").items()
        }
        self.config = json.loads((directory / "config.json").read_text())
        self.pattern = self.config["mtp_hybrid_override_pattern"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        rms = torch.sqrt(x.square().mean(-1, keepdim=True) + self.config["layer_norm_epsilon"])
        return x / rms * self.weights[f"mtp.layers.{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"mtp.layers.{name}.weight"].t()

    def depth(self, k: int, previous: Tensor, tokens: Tensor) -> Tensor:
        """g^k at each position from g^(k-1) there and the token k places on."""
        layers = {"*": self.attention, "E": self.experts, "-": self.network}
        length = len(self.pattern)
        first = (k - 1) % self.config["num_nextn_predict_layers"] * length
        embedding = self.weights["backbone.embeddings.weight"][tokens]
        x = self.linear(f"{first}.eh_proj", self.joined(first, embedding, previous))
        for number, letter in enumerate(self.pattern, first):
            x = x + layers[letter](f"{number}.mixer", self.norm(f"{number}.norm", x))
        return self.norm(f"{first + length - 1}.final_layernorm", x)

    def joined(self, first: int, embedding: Tensor, previous: Tensor) -> Tensor:
        return torch.cat(
            [self.norm(f"{first}.enorm", embedding), self.norm(f"{first}.hnorm", previous)], -1
        )

    def attention(self, name: str, x: Tensor) -> Tensor:
        heads = self.config["num_attention_heads"]
        groups = self.config["num_key_value_heads"]
        width = self.config["head_dim"]
        q, k, v = (
            self.linear(f"{name}.{part}_proj", x).unflatten(-1, (-1, width)) for part in "qkv"
        )
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        outputs = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = (q[:, head] @ k[:, group].t() / math.sqrt(width)).masked_fill(
                future, -math.inf
            )
            outputs.append(scores.softmax(-1) @ v[:, group])
        return self.linear(f"{name}.o_proj", torch.cat(outputs, -1))

    def network(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.down_proj", self.linear(f"{name}.up_proj", x).relu().square())

    def experts(self, name: str, x: Tensor) -> Tensor:
        latent = f"mtp.layers.{name}.fc1_latent_proj.weight" in self.weights
        inner = self.linear(f"{name}.fc1_latent_proj", x) if latent else x
        rows = []
        for token, weights in zip(inner, self.routed(name, x), strict=True):
            parts = [w * self.network(f"{name}.experts.{e}", token) for e, w in weights.items()]
            rows.append(torch.stack(parts).sum(0))
        out = (
            self.linear(f"{name}.fc2_latent_proj", torch.stack(rows))
            if latent
            else torch.stack(rows)
        )
        return out + self.network(f"{name}.shared_experts", x)

    def routed(self, name: str, x: Tensor) -> list[dict[int, Tensor]]:
        """Expert -> weight for each token: biased scores choose the groups, by their best two, and
        the experts."""
        bias = self.weights[f"mtp.layers.{name}.gate.e_score_correction_bias"]
        groups = self.config.get("n_group", 1)
        kept = self.config.get("topk_group", 1)
        found = []
        for scores in self.linear(f"{name}.gate", x).sigmoid():
            choice = scores + bias
            if groups > 1:
                best = choice.view(groups, -1).topk(2, -1)[0].sum(-1).topk(kept)[1].tolist()
                size = len(choice) // groups
                out = [e for e in range(len(choice)) if e // size not in best]
                choice[out] = -math.inf
            chosen = choice.topk(self.config["num_experts_per_tok"])[1]
            weights = self.weighed(scores, bias)[chosen]
            if self.config.get("norm_topk_prob", True):
                weights = weights / (weights.sum() + 1e-20)
            weights = weights * self.config["routed_scaling_factor"]
            found.append(dict(zip(chosen.tolist(), weights, strict=True)))
        return found

    def weighed(self, scores: Tensor, bias: Tensor) -> Tensor:
        """What the experts' outputs are multiplied by, before they are divided by their sum."""
        return scores
