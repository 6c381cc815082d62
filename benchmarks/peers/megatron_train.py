"""Time megatron-core's own training step on the work of `mtpkit bench train`: frozen base, MTP
heads, cross-entropy.

Needs a GPU, megatron-core (0.19.2 made the figures of docs/performance.md) with Transformer Engine,
mamba-ssm and causal-conv1d, and a config directory from write_config.py whose head has the pattern
to train. The model is megatron-core's `HybridModel` with megatron-core's own `hybrid_stack_spec`;
only the heads have gradients. Weights and tokens are random. mtpkit is not needed. The script
cannot run on a CPU, because Transformer Engine needs a GPU: there its step was tried with mtpkit's
layers in place of Transformer Engine's. This version of the script has not been run on a GPU yet.
"""

import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peer import fail, print_rows, require

_LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Row:
    """Speed and memory of optimizer steps at one sequence length."""

    sequence_length: int
    tokens: int
    """Tokens per step."""
    seconds: float
    """Median time of a step."""
    tokens_per_s: float
    peak_memory: int | None
    """Bytes that torch held at most; None on a CPU."""


def main(
    model: Annotated[
        Path, typer.Option(help="Config directory from write_config.py --pattern '*-'.")
    ],
    sequence_length: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Tokens of a sequence; repeat for several. By default 4096."),
    ] = None,
    num_depths: Annotated[
        int, typer.Option(min=1, help="K, times that the repeated head is applied.")
    ] = 3,
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps; the median counts.")] = 5,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 3,
) -> None:
    """Train on random tokens, and print one JSON object as the last line."""
    if not (model / "config.json").is_file():
        fail(
            f"{model} has no config.json; write one: python benchmarks/peers/write_config.py"
            f" {model} --pattern '*-'"
        )
    megatron = require("megatron.core", "megatron-core==0.19.2")
    if torch.cuda.is_available():
        require("transformer_engine", "transformer-engine[core_cu13,pytorch]==2.20.2")
        require("mamba_ssm", "mamba-ssm")
        require("causal_conv1d", "causal-conv1d")
    shape = json.loads((model / "config.json").read_text())
    if not shape.get("mtp_hybrid_override_pattern"):
        fail(f"{model}/config.json has no mtp_hybrid_override_pattern: there is no head to train")
    lengths = sequence_length or [4096]
    start_process()
    trainer = Trainer(shape, num_depths, max(lengths))
    rows = [trainer.measure(length, micro_batch_size, steps, warm_up) for length in lengths]
    settings = {
        "model": str(model),
        "num_depths": num_depths,
        "micro_batch_size": micro_batch_size,
        "steps": steps,
    }
    print_rows("megatron_train", megatron, rows, settings)


def start_process() -> None:
    """Set up process groups of one process, unless they are set up already."""
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized():
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
            os.environ.setdefault(name, value)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(0)


def stack_spec(config: Any) -> Any:
    """Spec of megatron-core's own layers, which use Transformer Engine, mamba-ssm and
    causal-conv1d."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    return hybrid_stack_spec


def transformer_config(shape: dict[str, Any], num_depths: int, dtype: torch.dtype) -> Any:
    """Translate a config.json into megatron-core's config; other settings have megatron-core's
    defaults."""
    from megatron.core.activations import squared_relu
    from megatron.core.transformer import TransformerConfig

    if shape.get("mlp_hidden_act", "relu2") != "relu2" or "n_routed_experts" in shape:
        fail(
            "only shapes with squared ReLU and without experts are supported: others were not"
            " compared"
        )
    return TransformerConfig(
        num_layers=len(shape["hybrid_override_pattern"]),
        hidden_size=shape["hidden_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_key_value_heads"],
        kv_channels=shape["head_dim"],
        ffn_hidden_size=shape["intermediate_size"],
        mamba_num_heads=shape["mamba_num_heads"],
        mamba_head_dim=shape["mamba_head_dim"],
        mamba_state_dim=shape["ssm_state_size"],
        mamba_num_groups=shape["n_groups"],
        activation_func=squared_relu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=shape["layer_norm_epsilon"],
        init_method_std=shape["initializer_range"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        is_hybrid_model=True,
        mtp_num_layers=num_depths,
        mtp_use_repeated_layer=True,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
    )


class Trainer:
    """The model, its data-parallel wrapper and its optimizer, all megatron-core's."""

    def __init__(self, shape: dict[str, Any], num_depths: int, longest: int) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.hybrid.hybrid_model import HybridModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        dtype = torch.bfloat16 if cuda else torch.float32
        config = transformer_config(shape, num_depths, dtype)
        head = shape["mtp_hybrid_override_pattern"]
        model = HybridModel(
            config=config,
            hybrid_stack_spec=stack_spec(config),
            vocab_size=shape["vocab_size"],
            max_sequence_length=longest,
            hybrid_layer_pattern="/".join([shape["hybrid_override_pattern"], *[head] * num_depths]),
            position_embedding_type="none",
        ).to(self.device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("mtp."))
        self.vocab_size = shape["vocab_size"]
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=False
        )
        self.model = DistributedDataParallel(config, settings, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=_LEARNING_RATE,
                weight_decay=0.1,
                adam_beta1=0.9,
                adam_beta2=0.95,
                clip_grad=1.0 if cuda else 0.0,  # megatron-core's clipping needs CUDA tensors
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
            ),
            [self.model],
        )

    def measure(self, length: int, sequences: int, steps: int, warm_up: int) -> Row:
        """Time steps on sequences of one length."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        generator = torch.Generator().manual_seed(0)
        seconds = []
        for _ in range(warm_up + steps):
            tokens = torch.randint(
                self.vocab_size, (sequences, length + 1), generator=generator
            ).to(self.device)
            began = time.perf_counter()
            self.step(tokens)
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds[warm_up:])
        peak = torch.cuda.max_memory_allocated() if cuda else None
        return Row(length, sequences * length, median, sequences * length / median, peak)

    def step(self, tokens: torch.Tensor) -> None:
        """Run one forward pass, backward pass and update on `tokens` [sequences, length + 1]."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        inputs = tokens[:, :-1].contiguous()
        labels = tokens[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1], device=self.device).expand_as(inputs)
        losses = self.model(
            inputs, positions, None, labels=labels, loss_mask=torch.ones_like(labels).float()
        )
        loss = losses.float().mean()  # the heads' losses are attached to the hidden states
        loss.backward()
        self.model.finish_grad_sync()
        updated, _, _ = self.optimizer.step()
        if not updated or not loss.isfinite():
            fail(
                f"the loss is {float(loss)}, or the optimizer skipped its step: the times mean"
                " nothing"
            )


if __name__ == "__main__":
    typer.run(main)
