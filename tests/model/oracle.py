"""An independent forward pass in fp64: Mamba2, attention and MLP layers, and MTP heads, straight
from a checkpoint or from a model's parameters."""

import json
import math
import warnings
from pathlib import Path
from typing import Self

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.kernels import recurrence

EPSILON = 1e-5


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a distributed checkpoint under their names on disk, in fp64."""
    items = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in items.items()
        if isinstance(item, TensorStorageMetadata)
    }
    # of reading in a single process
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return {name: tensor.double() for name, tensor in state.items()}


def rms_norm(x: Tensor, weight: Tensor | float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPSILON) * weight


class Oracle:
    """Results of a golden case; token ids are [b, s], hidden states [b, s, h].

    `normed` says of the base and of a depth whether what they hand on to the next depth is their
    state after the final norm; golden files have it so. `unroll` and `draft` heed it, the others
    return what they say. These two read zeros in place of the embedding at position 0 if `zeroed`.
    """

    def __init__(
        self,
        config: dict,
        weights: dict[str, Tensor],
        normed: tuple[bool, bool] = (True, True),
        zeroed=False,
    ) -> None:
        self.config = config
        self.weights = weights
        self.normed = normed
        self.zeroed = zeroed
        self.base, *self.heads = config["hybrid_layer_pattern"].split("/")

    @classmethod
    def of(cls, case: Path, normed: tuple[bool, bool] = (True, True), zeroed: bool = False) -> Self:
        config = json.loads((case / "config.json").read_text())["config"]
        return cls(config, read_tensors(case / "checkpoint"), normed, zeroed)

    @classmethod
    def of_model(cls, model) -> Self:
        """Of a model whose layers have the same names in memory as on disk."""
        config = model.mtpkit_config
        settings = config.values() | dict(hybrid_layer_pattern=config.hybrid_layer_pattern)
        settings["gated_linear_unit"] = config.mlp.gated
        return cls(
            settings,
            {name: parameter.detach().double() for name, parameter in model.named_parameters()},
        )

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(
            x, self.weights[name] + int(self.config.get("layernorm_zero_centered_gamma", False))
        )

    def hidden(self, ids: Tensor) -> Tensor:
        """After the final norm."""
        return self.norm("decoder.final_norm.weight", self.stream(ids))

    def stream(self, ids: Tensor) -> Tensor:
        """Before the final norm."""
        return self.block(
            "decoder", self.base, self.weights["embedding.word_embeddings.weight"][ids]
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weights["output_layer.weight"].t()

    def depth(self, k: int, previous: Tensor, ids: Tensor) -> Tensor:
        """g^k at the positions i < s - k, from g^{k-1} at as many and the tokens t_{i+k}."""
        entries = self.entries(k, previous[:, : ids.shape[1] - k], ids[:, k:])
        return self.final(
            k, self.block(f"{self.head(k)}.mtp_model_layer", self.heads[k - 1], entries)
        )

    def head(self, k: int) -> str:
        return f"mtp.layers.{0 if self.config['mtp_use_repeated_layer'] else k - 1}"

    def entries(self, k: int, previous: Tensor, tokens: Tensor, zeroed: bool = False) -> Tensor:
        """What the block of depth k reads for states and tokens of as many positions, the first
        token left out if `zeroed`."""
        embedding = self.weights["embedding.word_embeddings.weight"][tokens]
        if zeroed:
            embedding = torch.cat([0 * embedding[:, :1], embedding[:, 1:]], 1)
        x = [
            self.norm(f"{self.head(k)}.enorm.weight", embedding),
            self.norm(f"{self.head(k)}.hnorm.weight", previous),
        ]
        return torch.cat(x, -1) @ self.weights[f"{self.head(k)}.eh_proj.weight"].t()

    def final(self, k: int, x: Tensor) -> Tensor:
        return self.norm(f"{self.head(k)}.final_layernorm.weight", x)

    def unroll(self, ids: Tensor, depths: int) -> list[Tensor]:
        """g^1 .. g^K, g^k at the positions i < s - k, each depth over its own stream."""
        handed_on = self.hidden(ids) if self.normed[0] else self.stream(ids)
        found = []
        for k in range(1, depths + 1):
            entries = self.entries(k, handed_on[:, : ids.shape[1] - k], ids[:, k:], self.zeroed)
            x = self.block(f"{self.head(k)}.mtp_model_layer", self.heads[k - 1], entries)
            found.append(self.final(k, x))
            handed_on = found[-1] if self.normed[1] else x
        return found

    def draft(self, ids: Tensor, i: int, depths: int) -> list[Tensor]:
        """g^1_i .. g^K_i [b, h] of a repeated head that decodes: depth k adds one entry to those of
        depth 1 up to i."""
        handed_on = self.hidden(ids) if self.normed[0] else self.stream(ids)
        entries = self.entries(1, handed_on[:, : i + 1], ids[:, 1 : i + 2], self.zeroed)
        found = []
        for k in range(1, depths + 1):
            if k > 1:
                entries = torch.cat(
                    [entries, self.entries(k, handed_on, ids[:, i + k : i + k + 1])], 1
                )
            x = self.block(f"{self.head(k)}.mtp_model_layer", self.heads[0], entries)[:, -1:]
            found.append(self.final(k, x)[:, 0])
            handed_on = found[-1][:, None] if self.normed[1] else x
        return found

    def block(self, prefix: str, pattern: str, x: Tensor) -> Tensor:
        layers = {"M": self.mamba, "*": self.attention, "-": self.mlp}
        for i, letter in enumerate(pattern):
            x = x + layers[letter](f"{prefix}.layers.{i}", x)
        return x

    def norm_linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.weights.get(f"{name}.bias", torch.zeros(()))
        return self.norm(f"{name}.layer_norm_weight", x) @ self.weights[f"{name}.weight"].t() + bias

    def mlp(self, name: str, x: Tensor) -> Tensor:
        inner = self.norm_linear(f"{name}.mlp.linear_fc1", x)
        if self.config.get("gated_linear_unit"):
            gate, up = inner.chunk(2, -1)
            inner = F.silu(gate) * up
        else:
            inner = inner.relu() ** 2
        return inner @ self.weights[f"{name}.mlp.linear_fc2.weight"].t()

    def attention(self, name: str, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        groups = self.config["num_query_groups"]
        width = self.config["kv_channels"]
        rep = self.config["num_attention_heads"] // groups
        gated = self.config.get("attention_output_gate", False)
        name = f"{name}.self_attention"
        qkv = self.norm_linear(f"{name}.linear_qkv", x).view(batch, length, groups, -1, width)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        heads = []
        for group in range(groups):
            key = qkv[:, :, group, -2]
            value = qkv[:, :, group, -1]
            key = self.placed(f"{name}.k_layernorm", key)
            for head in range(rep):
                query = self.placed(f"{name}.q_layernorm", qkv[:, :, group, head])
                scores = query @ key.transpose(1, 2) / math.sqrt(width)
                out = scores.masked_fill(future, -math.inf).softmax(-1) @ value
                heads.append(out * torch.sigmoid(qkv[:, :, group, rep + head]) if gated else out)
        name = name.removesuffix(".self_attention")
        return torch.cat(heads, -1) @ self.weights[f"{name}.self_attention.linear_proj.weight"].t()

    def placed(self, norm: str, x: Tensor) -> Tensor:
        """Queries or keys [b, s, d] of one head, normed and rotated: channel i of the first
        `rotary_percent` of them with the channel half as many further on."""
        if self.config.get("qk_layernorm"):
            x = self.norm(f"{norm}.weight", x)
        if self.config.get("position_embedding_type", "none") == "none":
            return x
        half = int(x.shape[-1] * self.config.get("rotary_percent", 1.0)) // 2
        x = x.clone()
        for i in range(half):
            angle = torch.arange(x.shape[1], dtype=torch.float64) * self.config["rotary_base"] ** (
                -i / half
            )
            a = x[..., i].clone()
            b = x[..., half + i].clone()
            x[..., i], x[..., half + i] = (
                a * angle.cos() - b * angle.sin(),
                b * angle.cos() + a * angle.sin(),
            )
        return x

    def mamba(self, name: str, x: Tensor) -> Tensor:
        name += ".mixer"
        w = {
            key.removeprefix(f"{name}."): t
            for key, t in self.weights.items()
            if key.startswith(f"{name}.")
        }
        u = self.norm(f"{name}.in_proj.layer_norm_weight", x)
        z, dt = (u @ w[f"in_proj.weight.{part}"].t() for part in ("z", "dt"))
        inner, B, C = (self.convolve(u @ w[f"in_proj.weight.{p}"].t(), w, p) for p in "xBC")
        heads = self.config["mamba_num_heads"]
        groups = self.config["mamba_num_groups"]
        y, _ = recurrence.scan(
            inner.unflatten(-1, (heads, -1)),
            F.softplus(dt + w["dt_bias"]),
            -w["A_log"].exp(),
            B.unflatten(-1, (groups, -1)),
            C.unflatten(-1, (groups, -1)),
            w["D"],
        )
        gated = (y.flatten(2) * F.silu(z)).unflatten(-1, (groups, -1))
        return (rms_norm(gated, 1.0).flatten(2) * w["norm.weight"]) @ w["out_proj.weight"].t()

    @staticmethod
    def convolve(x: Tensor, weights: dict[str, Tensor], part: str) -> Tensor:
        taps = weights[f"conv1d.weight.{part}"][:, 0]
        out = weights[f"conv1d.bias.{part}"].expand_as(x)
        for lag in range(taps.shape[1]):
            out = out + F.pad(x, (0, 0, lag, 0))[:, : x.shape[1]] * taps[:, -1 - lag]
        return F.silu(out)
