"""Resolves the arguments of `LLM` to what an engine runs: model, tokenizer, end tokens, K, graphs,
draft vocabulary."""

import functools
import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mtpkit.config import ModelConfig, MtpConfig
from mtpkit.engine.drafting import check_depths
from mtpkit.engine.memory import MemoryPlan
from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.model_factory import ModelFactory
from mtpkit.engine.requests.options import EngineOptions, LLMOptions
from mtpkit.engine.requests.token_texts import Tokenizer
from mtpkit.engine.requests.tree import DynamicTree, Tree, parse_tree
from mtpkit.errors import UserError
from mtpkit.kernels import MOST_TREE_TOKENS
from mtpkit.kernels.dispatch import CHOICE, on_kernels
from mtpkit.kernels.integer_rows import IntegerBits
from mtpkit.kernels.linear import FP8
from mtpkit.model import output_weight, round_draft_embedding
from mtpkit.model.formats.weight import QuantizedWeight
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import kinds_in
from mtpkit.model.quantized import quantized_as
from mtpkit.model.stages import StageBalance
from mtpkit.platform import Dtype, default_device, resolve_dtype

if TYPE_CHECKING:
    from mtpkit.checkpoint import ModelDirectory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KV_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "fp8_e4m3": FP8}
"""`kv_cache_dtype` -> dtype of keys and values in their cache; None: that of the activations."""
DRAFT_EMBEDDING_BITS: dict[str, IntegerBits] = {"int8": 8, "int4": 4}
_USUAL_SINKS = 4
"""Sinks of heads that were trained without a window (Xiao et al. 2023, arXiv:2309.17453)."""
_FIRST_FP8_GPU = (8, 9)
"""Lowest compute capability of the GPUs for which Triton compiles conversions to e4m3."""
_logger = logging.getLogger(__name__)


type ModelSource = HybridModel | ModelFactory | ModelDirectory
"""Where a model comes from: it is given, made, or read from a directory."""


def located(options: LLMOptions) -> LLMOptions:
    """The options with the directory of a model that is named by its id in the Hugging Face hub.

    Raises:
        UserError: see `find_model`.
    """
    from mtpkit.checkpoint.hub import find_model

    if not isinstance(options.model, str | Path):
        return options
    found = find_model(options.model, options.revision, options.download_dir)
    # Of a directory there are no revisions.
    return replace(options, model=found, revision=None)


def opened(model: HybridModel | ModelFactory | str | Path) -> ModelSource:
    """A model or what makes it as it is, or a directory opened, to be handed on.

    Raises:
        UserError: `model` is no model directory.
    """
    from mtpkit.checkpoint import open_directory

    return open_directory(model) if isinstance(model, str | Path) else model


def config_of(model: ModelSource | str | Path) -> ModelConfig:
    """The config of a model, or of a model directory without reading its weights.

    Raises:
        UserError: `model` is no model directory, or its config cannot be represented.
    """
    from mtpkit.checkpoint import ModelDirectory

    source = opened(model) if isinstance(model, str | Path) else model
    return source.config if isinstance(source, ModelDirectory) else source.mtpkit_config


def tokenizer_of(model: ModelSource, tokenizer: Tokenizer | str | Path | None) -> Tokenizer | None:
    """A tokenizer that is given, or read from its directory.

    Args:
        model: from `opened`.
        tokenizer: a tokenizer or its directory. None: the tokenizer beside the model, if there is
            one.

    Raises:
        UserError: a directory without a tokenizer, or with one that cannot be read.
    """
    from mtpkit.checkpoint import ModelDirectory
    from mtpkit.data.tokenizer import TOKENIZER_FILES, load_tokenizer

    if isinstance(tokenizer, str | Path):
        return load_tokenizer(tokenizer)
    if tokenizer is not None or not isinstance(model, ModelDirectory):
        return tokenizer
    beside = model.companions
    if any((beside / name).is_file() for name in TOKENIZER_FILES):
        return load_tokenizer(beside)
    return None


def open_model(
    model: ModelSource,
    dtype: Dtype | Literal["auto"],
    device: torch.device | str | int | None,
    tokenizer: Tokenizer | str | Path | None,
    ranks: int = 1,
    whole_experts: bool = False,
    stages: int = 1,
    balance: StageBalance = "memory",
    quantization: Literal["fp8"] | None = None,
) -> tuple[HybridModel, Tokenizer | None, list[int]]:
    """Load model and tokenizer from directories, make the model, or take them as given.

    Args:
        model: from `opened`.
        dtype: a key of `DTYPES`, or "auto".
        tokenizer: see `tokenizer_of`.
        ranks: number of tensor-parallel ranks, of which this one loads its part, unless a model is
            given.
        whole_experts: give each of these ranks whole experts, instead of a part of every expert.
        stages, balance: number of pipeline stages, of which this rank loads one, and how layers are
            divided among them.
        quantization: see `EngineOptions`; of a given model, what it must be.

    Returns:
        The model, its tokenizer (None if there is none), and the union of the end-of-sequence
        tokens that config, generation settings and tokenizer name, since each may lack some.

    Raises:
        UserError: a directory that cannot be loaded, a model of another dtype or quantisation, a
            device that does not exist or has no fp8.
    """
    from mtpkit.checkpoint import ModelDirectory, load_model

    # Before anything is read: a wrong device or tokenizer should not cost the time of a load.
    place = _device(device)
    read = tokenizer_of(model, tokenizer)

    if not isinstance(model, ModelDirectory | ModelFactory):
        weight = next(model.parameters())
        own = weight.dtype
        if weight.is_meta:
            raise UserError(
                "the model given lies on device meta, without weights: load it, or build it on"
                " 'cuda' or 'cpu'"
            )
        if dtype != "auto" and DTYPES[dtype] != own:
            raise UserError(
                f"dtype is {dtype}, but the model given holds {own}: leave it 'auto', or convert"
                " the model"
            )
        if quantization is not None and quantized_as(model) != {quantization}:
            raise UserError(
                f"quantization is {quantization}, but the model given is not quantised so: give its"
                " directory, or call mtpkit.model.quantize_base on the model"
            )
        # A model that is given stays where it is, unless a device is named.
        given = model if device is None else model.to(place)
        return given.eval(), read, sorted(_end_tokens(given, read))

    if quantization is not None:
        _require_fp8(f"quantization is {quantization}", place, "leave it out")
    settings: dict[str, Any] = dict(
        dtype=DTYPES[resolve_dtype(dtype, place)],
        device=place,
        quantization=quantization,
        tensor_parallel=ranks,
        pipeline_parallel=stages,
        balance=balance,
        expert_parallel=ranks if whole_experts else 1,
        expert_tensor_parallel=1 if whole_experts else None,
        sequence_parallel=False,
    )
    if isinstance(model, ModelFactory):
        made = model.make(**settings)
        return made, read, sorted(_end_tokens(made, read))
    loaded = load_model(model, **settings)
    vocab_size = loaded.mtpkit_config.vocab_size
    return loaded, read, sorted(_end_tokens(loaded, read) | model.end_token_ids(vocab_size))


def _device(device: torch.device | str | int | None) -> torch.device:
    """The device named by an argument.

    Raises:
        UserError: the machine has no such device, or decoding is not supported on it.
    """
    try:
        place = default_device() if device is None else torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device {device!r} is unknown: use 'cuda' or 'cpu'") from error
    if place.type not in ("cuda", "cpu"):
        raise UserError(
            f"device is {place}, on which decoding is not supported: use 'cuda' or 'cpu'"
        )
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device is {place}, but torch finds no GPU here: use 'cpu', or check the driver and"
            " the torch build"
        )
    return place


def _end_tokens(model: HybridModel, tokenizer: Tokenizer | None) -> frozenset[int]:
    # Not every tokenizer has one.
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(model.mtpkit_config.eos_token_ids) | ({own} if isinstance(own, int) else set())


def resolve_drafts(config: ModelConfig, k: int | Literal["auto"] | None) -> int:
    """The largest number of drafts per step: as given, or by default the depths that the heads were
    trained for.

    Raises:
        UserError: the heads cannot make `k` drafts.
    """
    if k is None:
        return config.mtp.default_drafts
    check_depths(config, k)
    return config.mtp.most_adaptive_drafts if k == "auto" else k


def resolve_tree(options: LLMOptions, config: ModelConfig) -> tuple[Tree | None, int]:
    """Return the tree of the drafts, or None for a chain, and the largest number of drafts on a
    path.

    Raises:
        UserError: settings that exclude each other, or that the heads cannot serve.
    """
    given = options.speculative_token_tree
    topk = options.speculative_eagle_topk
    tokens = options.speculative_num_draft_tokens
    k = options.num_speculative_tokens
    if options.speculative_budget and (given is not None or topk is not None):
        raise UserError(
            f"speculative_budget is {options.speculative_budget!r}, must be None with trees of"
            " drafts: only chains have budgets"
        )
    if given is not None:
        tree = parse_tree(given)
        if topk is not None or tokens is not None:
            raise UserError(
                "speculative_token_tree and speculative_eagle_topk or speculative_num_draft_tokens"
                " exclude each other: give a fixed tree, or one that grows"
            )
        if k not in (None, "auto", tree.depth):
            raise UserError(
                f"num_speculative_tokens is {k}, but speculative_token_tree has depth {tree.depth}:"
                " leave it out"
            )
        depth = resolve_drafts(config, tree.depth)
        return (None if tree.is_chain else tree), depth
    depth = resolve_drafts(config, k)
    if topk is None:
        if tokens is not None:
            raise UserError(
                "speculative_num_draft_tokens needs speculative_eagle_topk, the children of a draft"
            )
        return None, depth
    # One child per draft makes a chain.
    if topk == 1 or not depth:
        return None, depth
    if options.draft_sampling:
        raise UserError(
            "draft_sampling draws the drafts, and speculative_eagle_topk keeps the most probable"
            " ones: give speculative_token_tree, or leave draft_sampling out"
        )
    grown = DynamicTree(depth, topk, tokens or min(MOST_TREE_TOKENS, 1 + topk * depth))
    # A mask of the heads' entries has one bit for each, as that of a tree's tokens has.
    if grown.tokens > 1 + grown.candidates or grown.entries > MOST_TREE_TOKENS:
        raise UserError(
            f"speculative_num_draft_tokens is {grown.tokens} and speculative_eagle_topk {topk}:"
            f" with K = {depth} there are {1 + grown.candidates} tokens to choose from, and at most"
            f" {MOST_TREE_TOKENS} drafts may get children"
        )
    return grown, depth


def check_children(tree: Tree | None, tokens: int) -> None:
    """Check that no token of a tree has more children than there are tokens to choose drafts from.

    Args:
        tokens: number of tokens that drafts are chosen from.

    Raises:
        UserError: a token of the tree has more children than that.
    """
    if tree is not None and tree.most_children > tokens:
        raise UserError(
            f"a token of the tree has {tree.most_children} children, but there are {tokens} tokens"
            " to draft"
        )


def check_kv_cache_dtype(options: LLMOptions, config: ModelConfig) -> None:
    """Check that the device can have a cache of this type, and warn if the model needs no cache.

    Raises:
        UserError: the GPU is too old for it.
    """
    if KV_DTYPES[options.kv_cache_dtype] is None:
        return
    specs = (spec for kind in kinds_in(config.letters) for spec in kind.states(config))
    if not any(spec.unit == "block" for spec in specs):
        _logger.warning("kv_cache_dtype has no effect: the model keeps no keys and values")
    _require_fp8(f"kv_cache_dtype is {options.kv_cache_dtype}", _place(options), "leave it 'auto'")


def check_draft_lm_head_dtype(options: LLMOptions, depths: int) -> None:
    """Check that the device can have an lm_head of this type for drafts, if there are any.

    Raises:
        UserError: the GPU is too old for it.
    """
    if options.draft_lm_head_dtype != "auto" and depths:
        setting = f"draft_lm_head_dtype is {options.draft_lm_head_dtype}"
        _require_fp8(setting, _place(options), "leave it 'auto'")


def draft_head_dtype(model: HybridModel, dtype: str, depths: int) -> str | None:
    """Type of the copy of a model's lm_head that drafts are chosen by; None: drafts are chosen by
    the lm_head itself. A warning says why, where the setting asks for a copy.

    Args:
        dtype: `EngineOptions.draft_lm_head_dtype`.
        depths: the largest K; 0 on a pipeline stage that drafts nothing.
    """
    if dtype == "auto" or not depths:
        return None
    if isinstance(output_weight(model), QuantizedWeight):
        _logger.warning(
            "draft_lm_head_dtype has no effect: the lm_head of this model is quantised, and drafts"
            " are chosen by it as it is"
        )
        return None
    return dtype


def _place(options: LLMOptions) -> torch.device:
    """The device that a model will be on."""
    given = isinstance(options.model, HybridModel) and options.device is None
    return next(options.model.parameters()).device if given else _device(options.device)


def _require_fp8(setting: str, place: torch.device, remedy: str) -> None:
    """Refuse a setting that needs fp8 on a GPU that is too old for it."""
    if place.type == "cuda" and torch.cuda.get_device_capability(place) < _FIRST_FP8_GPU:
        raise UserError(
            f"{setting}, but {torch.cuda.get_device_name(place)} cannot convert to fp8: {remedy}"
        )


def windowed(config: ModelConfig, options: EngineOptions) -> ModelConfig:
    """The config with the window that the options give the heads' attention.

    Raises:
        UserError: the heads have no attention layer, or the window is less than their depths.
    """
    heads = config.mtp
    window = options.draft_attention_window
    sinks = options.draft_attention_sinks
    if not heads.pattern or (window is None and sinks is None):
        return config
    if window is None:
        window = heads.attention_window
    if sinks is None:
        sinks = heads.attention_sinks if heads.attention_window else _USUAL_SINKS
    return config.replace(mtp_attention_window=window, mtp_attention_sinks=sinks if window else 0)


def round_embedding(model: HybridModel, dtype: str, depths: int, stages: int) -> None:
    """Round the draft embedding of a model's last pipeline stage to integers, or log why this
    setting has no effect.

    Args:
        dtype: a key of `DRAFT_EMBEDDING_BITS`, or "auto".
        depths: the largest K.
        stages: pipeline stages.

    Raises:
        UserError: the draft embedding of a given model was already rounded to another number of
            bits, or `hidden_size` is odd for int4.
    """
    if dtype == "auto":
        return
    config = model.mtpkit_config
    bits = DRAFT_EMBEDDING_BITS[dtype]
    reason = ""
    if bits == 4 and config.hidden_size % 2:
        raise UserError(
            f"draft_embedding_dtype int4 stores pairs of numbers, hidden_size {config.hidden_size}"
            " is odd"
        )
    if not depths:
        reason = "num_speculative_tokens is 0"
    elif stages == 1:
        reason = "with one pipeline stage the heads read the embedding of the base"
    elif config.tie_word_embeddings:
        reason = "the heads read the lm_head, which is the embedding of this model, too"
    if reason:
        _logger.warning("draft_embedding_dtype has no effect: %s", reason)
    else:
        round_draft_embedding(model, bits)


@functools.cache
def warn_untrained(model: str, k: int, depths: int) -> None:
    """Warn once per process that a repeated head is unrolled further than it was trained."""
    _logger.warning(
        "num_speculative_tokens is %d, but the head of %s has %d depths: later drafts were not"
        " trained; take at most %d, or train more depths",
        k,
        model,
        depths,
        depths,
    )


def check_trained(model: HybridModel | ModelFactory | str | Path, heads: MtpConfig, k: int) -> None:
    """Warn if a repeated head is to make more drafts than it was trained for, where the checkpoint
    says for how many."""
    if heads.repeated and heads.depths_known and k > heads.num_depths:
        warn_untrained(
            str(model) if isinstance(model, str | Path) else "the model given", k, heads.num_depths
        )


def report_unused(depths: int, model: ModelConfig, **settings: object) -> None:
    """If nothing is drafted, log which settings have no effect, and that heads are unused."""
    if depths:
        return
    for name in (name for name, value in settings.items() if value is not None):
        _logger.warning("%s has no effect: num_speculative_tokens is 0", name)
    if model.mtp.num_depths:
        _logger.info("the model's MTP heads are not used: num_speculative_tokens is 0")


def report_limits(config: EngineConfig, positions: int) -> None:
    """Warn about requests that cannot all decode in one step, and about outputs beyond the model's
    positions.

    Args:
        positions: length of the longest sequence that the model is made for.
    """
    most = config.max_num_batched_tokens // config.decode_width
    slots = -(-config.max_num_seqs // config.num_batches)
    if slots > most:
        _logger.warning(
            "max_num_batched_tokens %d has room for %d of %d requests of %d tokens each: if more"
            " decode, they take turns; raise it to %d or lower max_num_seqs",
            config.max_num_batched_tokens,
            most,
            slots,
            config.decode_width,
            slots * config.decode_width,
        )
    if config.max_model_len > positions:
        _logger.warning(
            "max_model_len %d is above the model's %d positions (max_position_embeddings): text"
            " beyond them may be meaningless; lower max_model_len",
            config.max_model_len,
            positions,
        )


def report_uncached(options: EngineOptions, plan: MemoryPlan) -> None:
    """Log which settings of the prefix cache have no effect, or that it has no room."""
    if options.enable_prefix_caching and options.prefix_cache_bytes and not plan.num_checkpoints:
        _logger.warning(
            "prefix_cache_bytes is %d, but a checkpoint takes %d: nothing is cached",
            options.prefix_cache_bytes,
            plan.checkpoint_bytes,
        )
    if options.enable_prefix_caching:
        return
    for name in ("prefix_cache_bytes", "prefix_cache_dtype", "prefix_cache_interval"):
        if getattr(options, name) != getattr(EngineOptions, name):
            _logger.warning("%s has no effect: enable_prefix_caching is off", name)


def execution(
    weight: torch.Tensor,
    stacked: bool,
    async_scheduling: bool | None,
    enforce_eager: bool,
    stages: int = 1,
) -> tuple[bool, bool]:
    """Whether a step is launched before the results of the last one are read, and whether steps are
    CUDA graphs.

    Args:
        weight: any weight of the model, for its device.
        stacked: whether the weights of all experts are stacked, or the model has none.
        stages: pipeline stages.

    Raises:
        UserError: the model is on a GPU that is not the current one, on which streams and kernels
            run.
    """
    device = weight.device
    on_gpu = weight.is_cuda
    if on_gpu and device.index not in (None, torch.cuda.current_device()):
        raise UserError(
            f"device is {device}, but cuda:{torch.cuda.current_device()} is current: call"
            f" torch.cuda.set_device({device.index}) first, or choose the GPU by"
            " CUDA_VISIBLE_DEVICES"
        )
    reason = ""
    if not stacked:
        reason = "experts that cannot be stacked need a host-device sync, which CUDA graphs forbid"
    if on_gpu and not on_kernels(weight):
        reason = (
            f"{CHOICE} chooses plain PyTorch kernels, with host-device syncs, which CUDA graphs"
            " forbid"
        )
    if on_gpu and (enforce_eager or reason):
        _logger.info("decoding without CUDA graphs: %s", reason or "enforce_eager is set")
    # On a CPU without stages nothing runs beside the host, so that a step ahead gains nothing.
    if async_scheduling is None:
        async_scheduling = on_gpu or stages > 1
    return async_scheduling, on_gpu and not enforce_eager and not reason


def draft_token_ids(
    draft_vocab: str | Path | Collection[int] | None, vocab_size: int
) -> torch.Tensor | None:
    """[D] int64, the tokens that drafts are chosen from, ascending; None: all tokens.

    Raises:
        UserError: a file that cannot be read, or ids outside the vocabulary.
    """
    if draft_vocab is None:
        return None
    from mtpkit.data.draft_vocab import check_draft_vocab, load_draft_vocab

    if isinstance(draft_vocab, str | Path):
        ids = load_draft_vocab(draft_vocab, vocab_size)
    else:
        ids = list(draft_vocab)
        check_draft_vocab(ids, vocab_size, "draft_vocab")
    return torch.tensor(sorted(ids), dtype=torch.int64)
