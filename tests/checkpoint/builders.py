"""Tiny Nemotron-H checkpoints as transformers itself writes them, with heads added under the
published names."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mtpkit.checkpoint.directory import load_config, open_directory
from mtpkit.checkpoint.families import get_family
from mtpkit.checkpoint.layouts.huggingface import HFReader
from mtpkit.checkpoint.layouts.torch_dist_write import CHECKPOINT_VERSION, write_megatron
from mtpkit.checkpoint.tensors import CheckedTensors, TensorInfo, bits_equal

GOLDEN = Path(__file__).parents[1] / "golden"

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    ssm_state_size=8,
    mamba_num_heads=4,
    mamba_head_dim=8,
    n_groups=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=24,
    routed_scaling_factor=2.5,
)
BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def write_base(
    directory: Path,
    pattern: str = "M*-E",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes,
) -> None:
    """A random model saved by transformers; no parameter keeps a value that another could be
    mistaken for.

    Its step size dt has no lower bound: transformers clamps at `time_step_min`, where Megatron-LM
    and vLLM do not.
    """
    from transformers import NemotronHConfig, NemotronHForCausalLM

    torch.manual_seed(seed)
    blocks = [BLOCKS[letter] for letter in pattern]
    model = NemotronHForCausalLM(NemotronHConfig(layers_block_type=blocks, **SIZES | changes))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            scale = 0.3 if tensor.dim() == 1 else 0.1
            tensor.add_(scale * torch.randn(tensor.shape))
            assert tensor.unique().numel() > 1 or tensor.numel() == 1, name
    # only now: initial values are drawn between it and `time_step_max`
    model.config.time_step_min = 0.0
    model.to(dtype).save_pretrained(directory)


def add_heads(
    directory: Path, pattern: str = "*E", physical: int = 1, depths: int = 3, repeated: bool = True
) -> None:
    """Add `mtp.*` tensors and their config keys. Sublayers are those of a throw-away base of the
    same sizes."""
    donor = directory / "donor"
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    routing = ("moe_latent_size", "n_group", "topk_group", "norm_topk_prob", "layer_norm_epsilon")
    changes = {key: config[key] for key in (*SIZES, *routing) if key in config}
    write_base(donor, pattern * physical, seed=1, dtype=tensors["lm_head.weight"].dtype, **changes)
    heads = load_file(donor / "model.safetensors")
    tensors |= {
        n.replace("backbone.", "mtp."): t
        for n, t in heads.items()
        if n.startswith("backbone.layers.")
    }
    hidden = config["hidden_size"]
    length = len(pattern)
    dtype = tensors["lm_head.weight"].dtype
    for depth in range(physical):
        first = f"mtp.layers.{depth * length}"
        last = f"mtp.layers.{depth * length + length - 1}"
        tensors[f"{first}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden).to(dtype)
        for name in (f"{first}.enorm", f"{first}.hnorm", f"{last}.final_layernorm"):
            tensors[f"{name}.weight"] = (1 + 0.3 * torch.randn(hidden)).to(dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_nextn_predict_layers": physical, "mtp_hybrid_override_pattern": pattern}
    config.pop("mtp_layers_block_type", None)
    config["mtpkit"] = {"mtp_num_depths": depths, "mtp_use_repeated_layer": repeated}
    (directory / "config.json").write_text(json.dumps(config))
    for file in donor.iterdir():
        file.unlink()
    donor.rmdir()


def edit(directory: Path, change) -> None:
    """Change the tensors of a single-file checkpoint with `change(dict)`."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def edit_config(directory: Path, **changes) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def differing_after_round_trip(directory: Path) -> list[str]:
    """Names of the tensors of a published directory that are not the same bits after both
    conversions, of which there must be some tensors at all."""
    config = load_config(directory)
    family = get_family(config.family)
    reader = HFReader(directory, family.published_name, family.carried)
    table = family.table(config)
    stored = replace(table.stored_in(reader.tensors), rounded=table.rounded_in(reader))
    back = table.to_hf(
        table.to_megatron(CheckedTensors(reader, directory), directory), directory, stored
    )
    assert back.tensors.keys() == reader.tensors.keys() and len(back.tensors) > 5
    return [name for name in back.tensors if not bits_equal(back.read(name), reader.read(name))]


class Unchecked:
    """Tensors as they are, for checkpoints that mtpkit itself would not write."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.values = tensors
        self.tensors = {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        return self.values[name]

    def require_finite(self) -> None:
        """Nothing is checked."""


def write_megatron_copy(source: Path, directory: Path, change) -> None:
    """The Megatron twin of a model directory, with its tensors, under Megatron's names, changed by
    `change(dict)`."""
    weights = open_directory(source).weights()
    tensors = {name: weights.read(name).clone() for name in weights.tensors}
    change(tensors)
    directory.mkdir()
    write_megatron(directory, Unchecked(tensors), CHECKPOINT_VERSION)
    (directory / "mtpkit.json").write_text(json.dumps(load_config(source).to_dict()))
