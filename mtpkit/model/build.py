"""Build megatron-core's HybridModel from a `ModelConfig`."""

import math
import re
import zlib
from contextlib import nullcontext
from typing import Literal, get_args

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from mtpkit.config import ModelConfig
from mtpkit.errors import UserError, listed
from mtpkit.model.backends import get_backend
from mtpkit.model.hybrid import HybridModel, megatron_pattern, stack_spec, transformer_config
from mtpkit.model.kinds import KINDS, kinds_in, layers_of
from mtpkit.model.kinds.base import Draw, LayerKind
from mtpkit.model.quantized import wait, waiting_linears
from mtpkit.model.stages import StageBalance, first_layer, stage_patterns
from mtpkit.model.state import StateSpec
from mtpkit.platform import CpuInsteadOfCuda, ensure_distributed

Init = Literal["portable", "device", "none"]
"""Device that draws initial weights. "portable": the CPU, so that they are the same on every
machine. "device": the parameter's own device, which takes a GPU seconds for billions of parameters
but gives other numbers. "none": no draw, for weights that are loaded right afterwards."""


def build_model(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    backend: str = "local",
    seed: int = 0,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    init: Init = "portable",
    sequence_parallel: bool | None = None,
    base_layers: bool = True,
    balance: StageBalance = "memory",
    expert_tensor_parallel: int | None = None,
    waiting: bool = False,
) -> HybridModel:
    """Build a model with freshly initialised weights, in eval mode.

    Sets up torch.distributed and megatron-core's groups unless that has been done.
    `model.mtpkit_config` is `config`. A pipeline stage holds only its own layers, see
    `model.stage_patterns`. The last stage also holds the heads and an embedding for them.

    Args:
        sequence_parallel: split the sequence over tensor-parallel ranks outside their linears.
            Works only for whole sequences whose length is divisible by the ranks. None: on if the
            model has experts and several ranks.
        base_layers: False: leave out the base's layers and keep its embedding, final norm and
            lm_head; the heads are the same.
        balance: cost that layers are distributed over pipeline stages by, see `stage_patterns`.
        expert_tensor_parallel: ranks that each expert is split over; None: `tensor_parallel`. With
            1, tensor-parallel ranks may hold different whole experts.
        waiting: leave the weights of linears on device meta until quantised ones are loaded; needs
            init "none".

    Raises:
        UserError: unknown backend, init or balance, or parallel sizes that do not fit the
            processes.
    """
    if init not in get_args(Init):
        raise UserError(f"init is {init!r}, must be one of {listed(get_args(Init))}")
    modules = get_backend(backend)
    ensure_distributed(tensor_parallel, pipeline_parallel, expert_parallel, expert_tensor_parallel)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    stage = groups.pp.rank()
    stages = groups.pp.size()
    if sequence_parallel is None:
        # megatron-core refuses to train experts on several tensor-parallel ranks without it.
        sequence_parallel = tensor_parallel > 1 and any(
            kind.experts(config).count for kind in kinds_in(config.letters)
        )
    patterns = stage_patterns(config, stages, balance)
    pattern = config.hybrid_layer_pattern.removeprefix(config.pattern)
    if base_layers:
        # megatron-core reads "|" as the end of a pipeline stage.
        pattern = "|".join(patterns) + pattern
    assert init == "none" or not waiting, "weights without memory cannot be drawn"
    with (
        CpuInsteadOfCuda() if not torch.cuda.is_available() else torch.no_grad(),
        waiting_linears() if waiting else nullcontext(),
    ):
        model = HybridModel(
            config,
            backend,
            patterns,
            config=transformer_config(
                config,
                dtype,
                tensor_model_parallel_size=tensor_parallel,
                pipeline_model_parallel_size=pipeline_parallel,
                expert_model_parallel_size=expert_parallel,
                expert_tensor_parallel_size=groups.expt_tp.size(),
                sequence_parallel=sequence_parallel,
            ),
            hybrid_stack_spec=stack_spec(modules, config),
            hybrid_layer_pattern=megatron_pattern(pattern),
            pre_process=stage == 0,
            post_process=stage == stages - 1,
            pg_collection=groups,
        )
    _finish(model, config)
    # megatron-core's own linear, which `waiting_linears` does not know.
    if waiting and model.post_process and model.output_layer.quantizable:
        wait(model.output_layer)
    if init != "none":
        init_weights(model, config, seed, init=init)
    if device is not None:
        # `Module.to` refuses tensors on device meta.
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return model.eval()


def _finish(model: HybridModel, config: ModelConfig) -> None:
    """Set the mixers' `layer_name`, and drop a second copy of a tied embedding."""
    if config.tie_word_embeddings and model.mtp_process and not model.pre_process:
        model.output_layer.weight = None  # tied to the heads' embedding; megatron-core makes both
    for name, layer, kind in layers_of(model):
        if kind.mixer:
            getattr(layer, kind.mixer).layer_name = name


def state_specs(model: HybridModel) -> dict[str, tuple[StateSpec, ...]]:
    """Return the states that each layer keeps on this rank, by its key in `StepInput.states`."""
    ranks = model.config.tensor_model_parallel_size
    specs = {name: kind.states(model.mtpkit_config, ranks) for name, _, kind in layers_of(model)}
    return {name: states for name, states in specs.items() if states}


def layer_numbers(model: HybridModel) -> dict[str, int]:
    """Return a number for each layer of this rank, by its key in `StepInput.states`: one below 2^31
    that only this layer of the whole model has. All are odd, since Triton compiles kernels once
    more for integers that are multiples of 16."""
    names = [name for name, *_ in layers_of(model)]
    return {name: zlib.crc32(_global_name(name, model).encode()) & 0x7FFFFFFF | 1 for name in names}


@torch.no_grad()
def init_weights(
    model: HybridModel, config: ModelConfig, seed: int, prefix: str = "", init: Init = "portable"
) -> None:
    """Initialise the parameters whose names start with `prefix`, each from `seed` and its name.

    An embedding that two pipeline stages hold therefore starts the same on both, and heads start
    the same beside any base. Each rank draws a split tensor whole and takes its part, so that the
    model is the same at any parallelism. Matrices are normal with standard deviation `init_std`,
    divided by sqrt(2 layers) if they write to the residual stream; norms multiply by one; other
    vectors are zero. `LayerKind.initial` overrides some of a kind's parameters. Weights that wait
    on device meta, see `build_model`, are left out.
    """
    residual_std = config.init_std / math.sqrt(2 * len(config.pattern))
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not name.startswith(prefix):
            continue
        generator = torch.Generator("cpu" if init == "portable" else parameter.device)
        # crc32, since Python's own hash of a string differs from process to process.
        generator.manual_seed((seed + zlib.crc32(_global_name(name, model).encode())) % 2**32)
        kind = _kind_of(name, model)
        shape = _whole_shape(name, parameter)
        draw = Draw(generator)
        value = kind.initial(name, shape, config, draw) if kind else None
        module, _, leaf = name.rpartition(".")
        # A linear that norms its input has the norm's weight under the second name.
        if value is None and ("norm" in module.rpartition(".")[2] or leaf == "layer_norm_weight"):
            value = (
                torch.zeros(shape) if config.layernorm_zero_centered_gamma else torch.ones(shape)
            )
        elif value is None and parameter.dim() == 1:
            value = torch.zeros(shape)
        elif value is None:
            last = kind is not None and any(part in name for part in kind.writes_residual)
            value = draw.normal(shape, residual_std if last else config.init_std)
        parameter.copy_(_own_part(name, value, parameter, kind, config))


def _kind_of(name: str, model: HybridModel) -> LayerKind | None:
    """Return the kind of the layer that a parameter belongs to; None: it belongs to no layer."""
    found = re.match(r"(decoder|mtp\.layers\.\d+\.mtp_model_layer)\.layers\.(\d+)\.", name)
    if found is None:
        return None
    stage = model.stage_patterns[model.pg_collection.pp.rank()]
    return KINDS[
        (stage if found[1] == "decoder" else model.mtpkit_config.mtp.pattern)[int(found[2])]
    ]


def _global_name(name: str, model: HybridModel) -> str:
    """Return a parameter's name in the undivided model: experts count over all ranks, base layers
    over all stages."""
    kind = _kind_of(name, model)
    ranks = parallel_state.get_expert_model_parallel_world_size()
    experts = kind.experts(model.mtpkit_config).count // ranks if kind else 0
    firsts = {
        "local_experts.": experts * parallel_state.get_expert_model_parallel_rank(),
        "decoder.layers.": first_layer(model),
    }
    pattern = r"(local_experts\.|^decoder\.layers\.)(\d+)"
    return re.sub(pattern, lambda found: f"{found[1]}{int(found[2]) + firsts[found[1]]}", name)


def _tensor_place(name: str, parameter: nn.Parameter) -> tuple[int, int]:
    """Return this rank's index among the ranks that a parameter is split over, and their number."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return 0, 1
    if "local_experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
        return group.rank(), group.size()
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _whole_shape(name: str, parameter: nn.Parameter) -> torch.Size:
    shape = list(parameter.shape)
    if (ranks := _tensor_place(name, parameter)[1]) > 1:
        shape[parameter.partition_dim] *= ranks  # type: ignore[attr-defined]
    return torch.Size(shape)


def _own_part(
    name: str,
    whole: torch.Tensor,
    parameter: nn.Parameter,
    kind: LayerKind | None,
    config: ModelConfig,
) -> torch.Tensor:
    """Return this rank's share of a whole tensor; each of its parts, see `LayerKind.parts`, is
    split over the ranks."""
    rank, ranks = _tensor_place(name, parameter)
    if ranks == 1:
        return whole
    dim = parameter.partition_dim  # type: ignore[attr-defined]
    size = whole.shape[dim]
    parts = whole.split(kind.parts(name, size, config) if kind else [size], dim)
    return torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)
