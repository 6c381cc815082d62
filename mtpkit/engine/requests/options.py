"""Settings of an engine, each declared once: the arguments of `LLM` and the options of commands are
made from them.

`LLMOptions` is what a user sets, and `EngineOptions` the part of it that any command which runs an
engine takes; `EngineConfig` in `config.py` has the resolved values that an engine runs with.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from mtpkit.config import LARGEST_COUNT, MOST_DRAFTS
from mtpkit.config.checked import checked, fields_of
from mtpkit.engine.requests.params import Seed
from mtpkit.engine.requests.tree import parse_tree
from mtpkit.kernels import MOST_TREE_TOKENS

Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Drafts = Annotated[int, Field(ge=0, le=MOST_DRAFTS)]
Rollback = Literal["replay", "snapshot"]

DEFAULT_BUDGET = 2048
"""Default limit of the tokens in a step, unless decoding needs more."""

DEFAULT_MIXED = 512
"""Default limit of the prompt tokens that run together with decoding requests."""


def _check_tree[T](tree: T) -> T:
    """Refuse a list or a text that describes no tree."""
    if tree is not None:
        parse_tree(tree)
    return tree


def check_width(budget: int | None, info: ValidationInfo) -> int | None:
    """Refuse a token limit below what one decoding request needs in a step."""
    # A wrong K or tree is not in `data`: it is reported by itself.
    k = info.data.get("num_speculative_tokens")
    if isinstance(budget, int) and (tree := info.data.get("tree")) and budget < tree.tokens:
        raise ValueError(f"must be at least {tree.tokens}, the tokens of one request's tree")
    if isinstance(budget, int) and isinstance(k, int) and budget < 1 + k:
        raise ValueError(f"must be at least {1 + k}, the 1 + num_speculative_tokens of one request")
    return budget


@checked("engine")
class ModelOptions:
    """The first arguments of `LLM`: what decodes, and with how many drafts."""

    model: Any
    """Directory of a checkpoint, in the Hugging Face or the Megatron layout, the id of a model in
    the Hugging Face hub, such as `org/name`, or a model from `mtpkit.model.build_model`; call
    `reset_prefix_cache` after changing the model's weights."""
    num_speculative_tokens: Drafts | Literal["auto"] | None = None
    """Number of drafts per step (K) from the model's MTP heads; by default the number that the
    heads were trained for, or 0 without heads. 0: plain decoding. "auto": K is chosen for each step
    from measured step times and the acceptance so far, up to the number that the heads were trained
    for (7 if that is unknown). If a tree is given, the choice is among chains up to its depth and
    the tree."""

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: Any) -> Any:
        if not isinstance(model, str | Path) and not hasattr(model, "mtpkit_config"):
            raise ValueError(
                "must be the directory of a checkpoint, or a model from mtpkit.model.build_model"
            )
        return model


@checked("hub")
class HubOptions:
    """Where a model comes from that is named by its id in the Hugging Face hub."""

    revision: str | None = None
    """Branch, tag or commit of a model in the Hugging Face hub; by default its main branch."""
    download_dir: str | Path | None = None
    """Directory for models from the Hugging Face hub; by default the cache of huggingface_hub."""


@checked("engine")
class EngineOptions:
    """How an engine decodes, whatever the model and the number of drafts."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and activations. "auto": a given model's own; else bfloat16 on a GPU, float32
    on a CPU."""
    quantization: Literal["fp8"] | None = None
    """Quantise the base's linears and experts while they are loaded: "fp8" gives each row of a
    matrix a scale, and each token of its input. By default matrices are what the checkpoint holds,
    quantised or not."""
    tensor_parallel_size: Count = 1
    """Number of processes, each with a GPU and a part of the model, that decode together; start
    them with torchrun."""
    pipeline_parallel_size: Count = 1
    """Number of pipeline stages, each with some of the model's layers. A stage is one process, or a
    group of `tensor_parallel_size` processes."""
    enable_expert_parallel: bool = False
    """Give each tensor-parallel process whole experts of the mixture-of-experts layers, instead of
    a part of every expert."""
    disable_custom_all_reduce: bool = False
    """Use NCCL for all tensors that tensor-parallel ranks exchange. By default, one kernel that
    reads the memory of the other GPUs exchanges small tensors, if all GPUs are on one host and can
    access each other's memory."""
    seed: Seed | None = 0
    """Seed from which requests without their own seed get one; None: a new seed for each engine."""
    block_size: Count = 16
    """Tokens per block of the cache of keys and values."""
    max_model_len: Count | None = None
    """Most tokens of a prompt and its output together; by default the model's longest sequence.
    Outputs that reach it end with finish reason "length"."""
    max_num_seqs: Count = 64
    """Most requests that run at once; each holds a slot of recurrent state."""
    max_num_batched_tokens: Count | None = None
    """Most tokens in a step; longer prompts are split into chunks. If it is too small for all
    decoding requests, they take turns. An engine's own default is 2048, or more if decoding needs
    more."""
    max_mixed_tokens: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = DEFAULT_MIXED
    """Most prompt tokens that share a forward pass with decoding requests; if there are more, they
    run in a separate pass. 0: prompts always run in a separate pass, as with
    `num_speculative_tokens` "auto"."""
    max_inter_token_latency: Annotated[float, Field(gt=0)] | None = None
    """Most seconds that a decoding request waits for its next tokens while prompts arrive, as far
    as shorter chunks of the prompts can achieve this. By default, on a GPU, a few times the wait
    while no prompts arrive."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that may be in use, by weights, activations and caches together."""
    num_blocks: Count | None = None
    """Number of blocks of the cache of keys and values; by default as many as fit, or if that is
    less as many as `max_num_seqs` requests of full length need, with the prefix cache twice as
    many."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Type of keys and values in their cache. "auto": `dtype`. "fp8_e4m3" takes half of bfloat16's
    memory and rounds them, with the scales of the checkpoint (`k_scale`, `v_scale`) or 1."""
    state_rollback: Rollback = "replay"
    """Method to roll recurrent state back after rejected drafts: `replay` reads the state once per
    step, `snapshot` keeps one copy per token."""
    state_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of recurrent state. "float16" rounds stochastically, "bfloat16" to nearest."""
    enable_prefix_caching: bool = True
    """Let prompts that begin like an earlier request continue from what that request left: blocks
    of keys and values, and checkpoints of recurrent state at the end of its prompt and of its
    output."""
    prefix_cache_bytes: Annotated[int, Field(ge=0)] | None = None
    """Bytes for the checkpoints of recurrent state; 0: nothing is cached. By default, there is room
    for 2 * `max_num_seqs` checkpoints, at least 16, as far as they fit in the cache memory that
    `max_num_seqs` requests of full length leave, or in a tenth of the cache memory if that is
    more."""
    prefix_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of recurrent state in checkpoints, rounded as with `state_dtype`. "auto":
    `state_dtype`."""
    prefix_cache_interval: Count = 2048
    """Interval in tokens between the checkpoints of a long prompt, which leaves one at every
    multiple of it."""
    draft_sampling: bool = False
    """Draw drafts from the heads' distribution instead of taking their best tokens."""
    speculative_token_tree: Annotated[str | list | tuple | None, AfterValidator(_check_tree)] = (
        Field(default=None, title="a list, its text, or None")
    )
    """Draft a tree instead of a chain. Give the number of children per token for each depth, such
    as "[3, 2, 1]", or the paths of the tree as ranks among siblings, such as "[[0], [1], [0, 0]]".
    The tree's depth is K; by default a chain is drafted."""
    speculative_eagle_topk: Count | None = None
    """Draft a tree that keeps the most probable paths: at each depth, this number of best drafts
    get this number of children each. The tree's depth is K. By default, and with 1, a chain is
    drafted."""
    speculative_num_draft_tokens: Annotated[int, Field(ge=2, le=MOST_TREE_TOKENS)] | None = None
    """Number of tokens that a decoding request feeds in a step with `speculative_eagle_topk`, its
    newest token included; by default 1 + K * `speculative_eagle_topk`, at most 63."""
    speculative_budget: Literal["auto"] | None = None
    """"auto": verify fewer drafts of the requests whose drafts are accepted least often, where the
    steps of many requests become faster by it; K is then chosen for each step, too, up to
    `num_speculative_tokens`, but with `draft_sampling`. By default all requests of a step verify
    equally many. A request keeps out of it by `SamplingParams.speculative_budget`."""
    draft_vocab: str | Path | list[Any] | tuple[Any, ...] | frozenset[Any] | None = Field(
        default=None, title="a list of token ids, a file of mtpkit data draft-vocab, or None"
    )
    """Tokens that drafts are chosen from: a file written by `mtpkit data draft-vocab`, or ids; by
    default all tokens. The output remains that of the base."""
    draft_embedding_dtype: Literal["auto", "int8", "int4"] = "auto"
    """Type of the draft embedding on the last of several pipeline stages. "int8" takes half of
    bfloat16's memory and "int4" about a quarter, with scales; both change only the drafts. "auto":
    the type of the model."""
    draft_lm_head_dtype: Literal["auto", "fp8_e4m3", "nvfp4"] = "auto"
    """Type of the lm_head that drafts are chosen by. "fp8_e4m3" reads half of bfloat16's bytes for
    each draft, from a copy with a scale per row, and "nvfp4" little more than a quarter. Both
    change only the drafts: the base verifies them with the lm_head itself. "auto": the lm_head
    itself."""
    draft_attention_window: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = None
    """Positions up to its own that the heads' attention layers see: a draft then reads so many keys
    and values, however long the context is. 0: all; by default as the heads were trained. Only the
    drafts change."""
    draft_attention_sinks: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = None
    """With a window: first positions that are seen as well; by default as many as in training, or 4
    for heads that were trained without a window."""
    async_scheduling: bool | None = None
    """Launch a step before the results of the last one are read. This is the default on a GPU and
    with pipeline stages."""
    enforce_eager: bool = False
    """Run all steps without CUDA graphs."""
    warm_up: bool = True
    """Compile kernels and capture CUDA graphs for steps of all sizes before the first request, not
    when a step first needs them."""

    @field_validator("draft_sampling")
    @classmethod
    def _check_draft_sampling(cls, draw: bool, info: ValidationInfo) -> bool:
        if draw and info.data.get("num_speculative_tokens") == "auto":
            raise ValueError(
                "must be False: num_speculative_tokens 'auto' needs the heads' best tokens"
            )
        return draw

    @field_validator("prefix_cache_dtype")
    @classmethod
    def _check_prefix_cache_dtype(cls, dtype: str, info: ValidationInfo) -> str:
        if dtype == "bfloat16" and info.data.get("state_dtype") == "float16":
            raise ValueError(
                "must be 'auto', 'float16' or 'float32' with state_dtype 'float16': bfloat16 takes"
                " as many bytes and keeps fewer bits"
            )
        return dtype

    _check_budget = field_validator("max_num_batched_tokens")(check_width)


@checked("engine")
class LLMOptions(HubOptions, EngineOptions, ModelOptions):
    """The arguments of `LLM`: those of `ModelOptions` come first, then those of `EngineOptions` and
    `HubOptions`."""

    synthetic_acceptance: Sequence[float] | Sequence[Sequence[float]] | None = Field(
        default=None, title="a list of rates, one per draft, or of such lists, or None"
    )
    """Rates at which drafts are accepted at random, one per depth; for benchmarks with random
    weights. Of n lists, a request with seed s has number s modulo n, counted from 0."""
    device: Any = None
    """"cuda", "cpu", a `torch.device`, or a GPU's number. By default the GPU, or the CPU where
    there is none."""
    tokenizer: Any = None
    """A transformers tokenizer or its directory. By default the one beside the checkpoint, if there
    is one."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Which log-probabilities `SamplingParams.logprobs` asks for: the model's own, or those after
    rules about tokens, penalties, temperature and filters (of greedy requests, at temperature 1).
    Those of prompts, which nobody draws, are the model's own in both modes, as in vLLM."""

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: Any) -> Any:
        # A torch.device is known by the name of its class: `--help` imports this, but not torch.
        if (
            device is not None
            and type(device) not in (str, int)
            and type(device).__name__ != "device"
        ):
            raise ValueError("must be 'cuda', 'cpu' or a GPU's number, or None")
        return device

    @field_validator("tokenizer")
    @classmethod
    def _check_tokenizer(cls, tokenizer: Any) -> Any:
        works = all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode"))
        if tokenizer is not None and not isinstance(tokenizer, str | Path) and not works:
            raise ValueError("must be a directory, something with encode and decode, or None")
        return tokenizer


def takes_fields[**P, S, O, R](
    options: Callable[P, O],
) -> Callable[[Callable[[S, O], R]], Callable[Concatenate[S, P], R]]:
    """Make a method that takes one checked object take that object's fields instead, with defaults
    and docstrings."""

    def decorate(method: Callable[[S, O], R]) -> Callable[Concatenate[S, P], R]:
        hints = typing.get_type_hints(options)
        signature = inspect.signature(options)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [
            each.replace(annotation=hints[name]) for name, each in signature.parameters.items()
        ]

        @functools.wraps(method)
        def taking(self: S, /, *args: P.args, **named: P.kwargs) -> R:
            return method(self, options(*args, **named))

        taking.__signature__ = signature.replace(parameters=[own, *parameters])  # type: ignore[attr-defined]
        fields = fields_of(options)
        docs = (f"    {name}: {info.description}" for name, info in fields.items())
        taking.__doc__ = "\n".join([method.__doc__ or "", "", "Args:", *docs])
        return taking

    return decorate
