"""The model of a run: a base from a directory with its own heads or new heads; only the heads are
trained."""

import dataclasses
import gc
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from mtpkit.checkpoint import ModelDirectory, open_directory
from mtpkit.checkpoint import load_config as load_model_config
from mtpkit.checkpoint.families import FAMILIES
from mtpkit.checkpoint.load import StoredModel
from mtpkit.config import HEAD_RULES, SECTIONS, ModelConfig, known_letters
from mtpkit.config.checked import keys_of
from mtpkit.errors import MtpkitError, UserError, listed
from mtpkit.model import build_model, init_weights, stack_experts
from mtpkit.model.backends import BackendName, resolve_backend
from mtpkit.model.formats.weight import QuantizedWeight
from mtpkit.model.fp8 import require_fp8, use_fp8_base
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import kinds_in
from mtpkit.platform import default_device, resolve_dtype
from mtpkit.training.config.settings import HeadAttention, HeadInit, HeadsConfig, TrainConfig
from mtpkit.training.parallel import own_rows
from mtpkit.training.stored import StoredFormats, stored_formats

_logger = logging.getLogger(__name__)

HEAD_PREFIX = "mtp."
_FFN_WIDTH = "ffn_hidden_size"


def resolve(
    config: TrainConfig, base: ModelConfig | None = None, drawn: bool = False
) -> tuple[TrainConfig, ModelConfig]:
    """Replace `auto` in the settings, and decide which heads the model gets.

    Args:
        base: config of the base; None: it is read from `config.model`.
        drawn: see `build_with_heads`.

    Raises:
        UserError: the settings of heads or loss do not fit the model.
    """
    base = load_model_config(config.model) if base is None else base
    heads = config.heads
    pattern = default_pattern(base) if heads.pattern == "auto" else heads.pattern
    init = resolve_init(heads.init, base, pattern)
    if init == "checkpoint" and not base.mtp.num_depths:
        raise UserError(
            f"heads.init=checkpoint, but {config.model} has no heads; set heads.init=auto"
        )
    base = _with_ffn(config, base, pattern)
    if init != "checkpoint":
        _check_pattern(config, base, pattern)
        model = base.replace(
            mtp_pattern=pattern,
            mtp_num_depths=heads.num_depths,
            mtp_use_repeated_layer=heads.repeated,
        )
        same = (base.mtp.pattern, base.mtp.num_layers) == (model.mtp.pattern, model.mtp.num_layers)
        if base.mtp.num_depths and not same:
            number = "" if base.mtp.repeated else f" and heads.num_depths={base.mtp.num_depths}"
            raise UserError(
                f"{config.model} has heads of pattern {base.mtp.pattern!r} ({base.mtp.num_layers}"
                f" physical), which heads.init={heads.init} can start from new weights but not"
                " change; set heads.pattern=auto,"
                f" heads.repeated={str(base.mtp.repeated).lower()}{number}"
            )
    elif base.mtp.repeated:
        model = base.replace(mtp_num_depths=heads.num_depths)
    elif base.mtp.num_depths != heads.num_depths:
        raise UserError(
            f"{config.model} has {base.mtp.num_depths} distinct heads; set"
            f" heads.num_depths={base.mtp.num_depths}"
        )
    else:
        model = base
    if config.loss.top_k > model.vocab_size:
        raise UserError(
            f"loss.top_k {config.loss.top_k} exceeds the vocabulary of {config.model},"
            f" {model.vocab_size} tokens; set loss.top_k=0 for all of them"
        )
    model = _with_rules(model, heads)
    if config.loss.hidden_mix and model.mtp.hands_on_normed(0) and not model.mtp.hands_on_normed(1):
        raise UserError(
            f"loss.hidden_mix {config.loss.hidden_mix} mixes the base's hidden states into those of"
            " depths, which are before their final norm where the base's are after it; set"
            " heads.reads_of_depth=after_final_norm, heads.reads_of_base=before_final_norm or"
            " loss.hidden_mix=0"
        )
    attention = resolve_attention(heads.attention, model)
    resolved = dataclasses.replace(heads, init=init, pattern=pattern, attention=attention)
    backend = resolve_backend(config.backend)
    if backend == "te" and not drawn:
        backend = _backend_for(config, stored_formats(open_directory(config.model)))
    dtype = resolve_dtype(config.dtype, default_device())
    exact = dtype == "float32" and config.matmul_precision == "highest"
    if backend == "te" and exact and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        _logger.warning(
            "Transformer Engine multiplies fp32 in TF32, whatever matmul_precision is: set"
            " backend=local, or NVIDIA_TF32_OVERRIDE=0 in the environment"
        )
    return dataclasses.replace(config, heads=resolved, backend=backend, dtype=dtype), model


def _backend_for(config: TrainConfig, stored: StoredFormats) -> BackendName:
    """The backend for a base where Transformer Engine can be used, which cannot multiply with
    matrices as files store them."""
    if not stored.base:
        return "te"
    if config.backend == "auto":
        return "local"
    others = ", and so trains heads on other hidden states than decoding has"
    _logger.warning(
        "backend=te widens the base, which is stored in %s%s: set backend=local",
        stored.of_base,
        others if stored.rounds_inputs else "",
    )
    return "te"


def resolve_init(asked: HeadInit, base: ModelConfig, pattern: str) -> HeadInit:
    """The way in which heads of a pattern start, with `auto` replaced."""
    if asked != "auto":
        return asked
    if base.mtp.num_depths:
        return "checkpoint"
    return "base" if set(pattern) <= set(base.pattern) else "fresh"


def _with_ffn(config: TrainConfig, base: ModelConfig, pattern: str) -> ModelConfig:
    """The base's config with `heads.ffn_hidden_size`.

    Raises:
        UserError: new heads have no MLPs, or others have some of another width, which is that of
            all MLPs of a model.
    """
    width = config.heads.ffn_hidden_size
    if width in ("auto", base.value(_FFN_WIDTH)):
        return base
    setting = f"heads.ffn_hidden_size={width}"
    own = [letter for letter, kind in SECTIONS.items() if _FFN_WIDTH in keys_of(kind).values()]
    if not set(own) & set(pattern):
        raise UserError(
            f"{setting} is for MLPs, which heads of pattern {pattern!r} have none of; leave it auto"
        )
    if set(own) & set(base.letters):
        raise UserError(
            f"{setting}, but {config.model} has MLPs of width {base.value(_FFN_WIDTH)}, and"
            " all MLPs of a model have the same; leave it auto"
        )
    return base.replace(**{_FFN_WIDTH: width})


def _with_rules(model: ModelConfig, heads: HeadsConfig) -> ModelConfig:
    """Replace the model's `HEAD_RULES` by those that the settings give; `auto` leaves the model's
    own."""
    asked = {name: getattr(heads, name) for name in HEAD_RULES}
    return model.replace(
        **{f"mtp_{name}": value for name, value in asked.items() if value != "auto"}
    )


def default_pattern(base: ModelConfig) -> str:
    """Pattern of new heads: that of the base's heads, else one layer that mixes tokens and one that
    does not.

    Both layers are of kinds that the base has. Attention is preferred to Mamba2, and MLPs are
    preferred to experts unless the servers of the base's family build no heads of MLPs: then
    experts, or the mixing layer alone. Example: a base `M*-` gives `*-`, or `*` if it is a
    Nemotron-H, `ME*E` gives `*E`, `M-` gives `M-`, `M*` gives `*`, and DeepSeek-V3 gives `+E`.
    """
    if base.mtp.pattern:
        return base.mtp.pattern
    kinds = kinds_in(base.pattern)
    mixers, others = (
        [kind.letter for kind in kinds if kind.keeps_past is mixes] for mixes in (True, False)
    )
    patterns = ["".join((*mixers[:1], other)) for other in others or [""]]
    written = [pattern for pattern in (*patterns, *mixers[:1]) if _can_be_written(base, pattern)]
    family = FAMILIES.get(base.family)
    served = [pattern for pattern in written if family and family.serving.builds(pattern)]
    return next(iter((*served, *written, *patterns)))


def _can_be_written(base: ModelConfig, pattern: str) -> bool:
    """Whether the base's family has weight names for heads of this pattern; True if the family is
    not known."""
    family = FAMILIES.get(base.family)
    return family is None or not any(
        family.misfits(base.replace(mtp_pattern=pattern, mtp_num_depths=1))
    )


def _check_pattern(config: TrainConfig, base: ModelConfig, pattern: str) -> None:
    """Refuse layers that new heads cannot have; say which `heads.pattern` or `heads.init` to set
    instead."""
    copies = config.heads.init == "base"
    absent = sorted(set(pattern) - set(base.pattern))
    known = [letter for letter in absent if letter in SECTIONS]
    sizeless = [letter for letter in known if list(base.section(SECTIONS[letter]).requirements(1))]
    if unknown := sorted(set(pattern) - SECTIONS.keys()):
        problem = f"has {listed(map(repr, unknown))}, but layers are {known_letters()}"
    elif copies and absent:
        problem = (
            f"has {_named(absent)}, but heads.init=base copies layers of {config.model}, which has"
            " none"
        )
    elif sizeless:
        problem = f"has {_named(sizeless)}, whose sizes the config of {config.model} lacks"
    elif not pattern:
        problem = "is empty"
    else:
        return
    fits = not copies or set(default_pattern(base)) <= set(base.pattern)
    raise UserError(
        f"heads.pattern={pattern} {problem}; set"
        f" {'heads.pattern=auto' if fits else 'heads.init=fresh'}"
    )


def _named(letters: Sequence[str]) -> str:
    return listed(f"{letter!r} ({SECTIONS[letter].title})" for letter in letters)


def resolve_attention(asked: HeadAttention, model: ModelConfig) -> HeadAttention:
    """The attention of a model's heads, with `auto` replaced.

    Raises:
        UserError: `serving` for distinct heads.
    """
    if asked == "serving" and not model.mtp.repeated:
        raise UserError(
            "heads.attention=serving is for one repeated head; distinct heads have a cache per"
            " depth, so that heads.attention=per_depth is what they see in serving"
        )
    if asked != "auto":
        return asked
    return "serving" if model.mtp.repeated else "per_depth"


def build_with_heads(
    config: TrainConfig,
    model_config: ModelConfig,
    device: torch.device,
    resumed: Path | None = None,
    base_layers: bool = True,
    drawn: bool = False,
) -> HybridModel:
    """Build the model for settings from `resolve`. Matrices of the base that are stored quantised
    stay so with backend `local`; `base_fp8` quantises others while they are loaded.

    Args:
        resumed: directory of a run whose newest checkpoint is restored later; what that cannot
            restore, see `base_from_files`, is read from there.
        base_layers: as in `build_model`.
        drawn: draw all weights on the device, as a benchmark does; `config.model` is not read.

    Raises:
        UserError: the weights in `config.model` do not fit its config, or the GPU has no fp8.
    """
    dtype = getattr(torch, resolve_dtype(config.dtype, device))
    fp8 = config.base_fp8 and base_layers
    at_load = fp8 and config.backend == "local" and not drawn
    stored = None
    if not drawn:
        if at_load:
            require_fp8(device)
        quantization: Literal["fp8"] | None = "fp8" if at_load else None
        # refuses a wrong config before a model of its sizes is built
        stored = StoredModel(open_directory(config.model), dtype, device, quantization, True)
        run = None if resumed is None else open_directory(resumed)
        if run is not None and base_from_files(config, run):
            stored = StoredModel(run, dtype, device, quantization, True)
        elif run is not None:
            stored = None
    parallel = config.parallel
    model = build_model(
        model_config,
        dtype=dtype,
        device=device,
        tensor_parallel=parallel.tensor,
        pipeline_parallel=parallel.pipeline,
        expert_parallel=parallel.expert,
        sequence_parallel=parallel.tensor > 1,
        seed=config.seed,
        init="device" if drawn else "none",
        base_layers=base_layers,
        backend=config.backend,
        balance=parallel.balance,
        waiting=stored is not None and stored.waiting,
    )
    new = config.heads.init != "checkpoint"
    if stored is not None:
        stored.fill(model, strict=base_layers, allow_missing_heads=new or resumed is not None)
    # Drawn weights include those of the heads: a second draw, on the CPU, may take a minute.
    if resumed is None and new and not drawn:
        init_weights(model, model_config, config.seed, prefix=HEAD_PREFIX)
    if resumed is None and config.heads.init == "base":
        if stored is not None:
            pattern = model_config.mtp.pattern
            stored.copy_layers(model, [model_config.pattern.rindex(each) for each in pattern])
        init_inputs_from_base(model)
    if fp8 and not at_load:
        use_fp8_base(model)
    return model


def base_from_files(config: TrainConfig, run: ModelDirectory) -> bool:
    """Whether a resumed run reads its base as a new one does, since megatron-core cannot restore
    matrices into a model that has them in another format."""
    fp8 = config.base_fp8 and config.backend == "local" and not config.cache
    return fp8 or run.is_quantized


@torch.no_grad()
def init_inputs_from_base(model: HybridModel) -> None:
    """Make heads whose layers are copies of the base's read the sum of embedding and hidden state.

    The random values of `eh_proj` remain as noise on top of this sum, and the input norms do not
    change.
    """
    for head in model.mtp.layers if model.mtp_process else []:
        weight = head.eh_proj.weight
        identity = torch.eye(weight.shape[1] // 2, dtype=weight.dtype, device=weight.device)
        # The copied layers then read the sum of embedding and hidden state, until the fit.
        weight.add_(own_rows(torch.cat([identity, identity], dim=1), weight, model))
        head.final_layernorm.weight.copy_(model.decoder.final_norm.weight)


def drop_base_layers(model: HybridModel) -> None:
    """Free the base's layers before heads are trained on cached hidden states."""
    model.decoder.layers = torch.nn.ModuleList()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def freeze_base(model: HybridModel) -> dict[str, nn.Parameter]:
    """Make the heads' parameters the only ones that require a gradient, and return them by name.
    Experts of the base are stacked (see `stack_experts`), except with tensor- or expert-parallel
    ranks."""
    model.requires_grad_(False)
    model.eval()
    if not stack_experts(model.decoder):
        _logger.info("experts of the base are not stacked, since ranks share sequences or experts")
    heads = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.startswith(HEAD_PREFIX)
    }
    for parameter in heads.values():
        parameter.requires_grad_(True)
    return heads


def fingerprint(model: nn.Module) -> dict[str, int]:
    """One integer per tensor that training must not change: the sum of its bit patterns.

    These are the base's parameters, persistent buffers and quantised matrices, and the router
    biases of the heads (`expert_bias`), which have no gradient, but which trainers that balance
    experts adjust.
    """
    quantized = {
        f"{name}.{part}": tensor
        for name, module in model.named_modules()
        if isinstance(module, QuantizedWeight)
        for part, tensor in module.named_buffers()
    }
    return {
        name: _bit_sum(tensor)
        for name, tensor in (model.state_dict() | quantized).items()
        if isinstance(tensor, Tensor)
        and (not name.startswith(HEAD_PREFIX) or name.endswith("expert_bias"))
    }


def check_unchanged(model: nn.Module, before: dict[str, int]) -> None:
    """Compare with an earlier `fingerprint`.

    Raises:
        MtpkitError: frozen tensors changed; names them.
    """
    after = fingerprint(model)
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    if changed:
        raise MtpkitError(f"training changed tensors of the frozen base: {listed(changed)}")


def _bit_sum(tensor: Tensor) -> int:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        tensor.element_size()
    ]
    return int(tensor.detach().contiguous().view(integer).sum(dtype=torch.int64))
