"""Models and prompts of the benchmarks: published sizes with random weights, or checkpoints; random
or real prompts."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from mtpkit.bench.settings import LARGE_SHAPES
from mtpkit.bench.sizes import SHAPES
from mtpkit.checkpoint import load_config, load_model, open_directory
from mtpkit.config import ModelConfig
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine.drafting import check_depths
from mtpkit.engine.requests.prompts import encode, list_prompts
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import JsonObject, parse_json, read_text
from mtpkit.model import build_model
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import kinds_in, layers_of
from mtpkit.model.kinds.base import Draw
from mtpkit.model.stages import StageBalance
from mtpkit.platform import resolve_dtype


def require_gpu(model: str, device: torch.device) -> None:
    """Refuse a large shape on a CPU.

    Raises:
        UserError: the model is a large shape and the device is a CPU.
    """
    if model in LARGE_SHAPES and device.type != "cuda":
        raise UserError(
            f"{model} needs a GPU; --model nemotron-h-tiny, or a model directory, runs on a CPU"
        )


def get_config(model: str, pattern: str | None = None, distinct: bool = False) -> ModelConfig:
    """The config of a shape or of a model directory.

    Args:
        pattern: layers of a shape's head; None: its own.
        distinct: give a shape a head for each depth.

    Raises:
        UserError: the model is neither a known shape nor a directory, the pattern has unknown
            layers, or a pattern or distinct heads are given for a directory.
    """
    if model in SHAPES:
        config = SHAPES[model] if pattern is None else with_pattern(SHAPES[model], pattern)
        return config.replace(mtp_use_repeated_layer=False) if distinct else config
    directory = _directory(model)
    if distinct or pattern is not None:
        given = "distinct heads are" if distinct else f"pattern {pattern!r} is"
        raise UserError(
            f"{given} for a shape ({listed(SHAPES)}), not for a model directory as {model}"
        )
    return load_config(directory)


def with_pattern(config: ModelConfig, pattern: str, **changes: int | bool) -> ModelConfig:
    """The config with heads of these layers, and other changes.

    Raises:
        UserError: the model cannot have them.
    """
    try:
        return config.replace(mtp_pattern=pattern, **changes)
    except UserError as error:
        own = listed(map(repr, sorted(set(config.pattern))))
        raise UserError(
            f"pattern {pattern!r} does not fit: {error}; layers of this base are {own}"
        ) from error


def get_base(model: str) -> ModelConfig:
    """The config to train heads for. Shapes lose an attention-only head, which they have for timing
    decoding.

    Raises:
        UserError: as in `get_config`.
    """
    config = get_config(model)
    alone = all(kind.keeps_past for kind in kinds_in(config.mtp.pattern))
    return config.replace(mtp_pattern="", mtp_num_depths=0) if model in SHAPES and alone else config


def choose_drafts[K: (int, int | Literal["auto"])](
    config: ModelConfig, given: Sequence[K] | None, usual: Sequence[int]
) -> tuple[K | int, ...]:
    """Return the K that are `given`, or else the `usual` ones, limited to the depths that the heads
    were trained for.

    Raises:
        UserError: the heads cannot make as many drafts as a given K.
    """
    if given is None:
        # The limit may make several of the usual K equal.
        return tuple(dict.fromkeys(min(k, config.mtp.default_drafts) for k in usual))
    for k in given:
        check_depths(config, k)
    return tuple(given)


def open_model(
    model: str,
    device: torch.device,
    dtype: str = "auto",
    pattern: str | None = None,
    distinct: bool = False,
    ranks: int = 1,
    whole_experts: bool = False,
    stages: int = 1,
    balance: StageBalance = "memory",
) -> HybridModel:
    """A shape with random weights drawn on the device, or the model of a directory.

    Args:
        dtype: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU, float32 on a CPU.
        pattern, distinct: see `get_config`.
        ranks, whole_experts: number of tensor-parallel ranks, and whether each of them holds whole
            experts.
        stages, balance: number of pipeline stages, of which this rank has one, and how layers are
            divided among them.

    Raises:
        UserError: the model is neither a known shape nor a directory, or it cannot be built; see
            `get_config`.
    """
    config = get_config(model, pattern, distinct)
    chosen = getattr(torch, resolve_dtype(dtype, device))
    parallel: dict[str, Any] = dict(tensor_parallel=ranks, sequence_parallel=False)
    parallel |= dict(pipeline_parallel=stages, balance=balance)
    if whole_experts:
        parallel |= dict(expert_parallel=ranks, expert_tensor_parallel=1)
    if model in SHAPES:
        built = build_model(config, chosen, device, init="device", **parallel).requires_grad_(False)
        _depend_on_context(built)
        return built
    return load_model(_directory(model), chosen, device, **parallel).requires_grad_(False)


@torch.no_grad()
def _depend_on_context(model: HybridModel) -> None:
    """Make the outputs of random layers depend on all earlier tokens, so that a wrong cache shows
    in the tokens. With the usual initialisation, the best tokens are the same without state or
    attention."""
    draw = Draw(torch.Generator().manual_seed(0))
    for _, layer, kind in layers_of(model, heads=False):
        kind.depend_on_context(layer, model.mtpkit_config, draw)


def read_token_ids(path: Path, model: str) -> list[list[int]]:
    """Read the prompts of a file as token ids; texts are encoded with the tokenizer beside the
    model.

    Raises:
        UserError: the file cannot be read, or it has texts and the model is a shape, which has no
            tokenizer.
    """
    prompts = read_prompts(path)
    tokenizer = None
    # Token ids need no tokenizer, and a shape has none.
    if any("prompt" in prompt for prompt in prompts):
        if model in SHAPES:
            raise UserError(
                f"{path} holds texts, but the shape {model} has no tokenizer: give prompt_token_ids"
                " in a .jsonl"
            )
        tokenizer = load_tokenizer(open_directory(_directory(model)).companions)
    return [list(encode(prompt, tokenizer, name)[1]) for name, prompt in list_prompts(prompts)]


def _directory(model: str) -> Path:
    if not Path(model).is_dir():
        raise UserError(
            f"model {model!r} is neither a shape ({listed(SHAPES)}) nor a model directory"
        )
    return Path(model)


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()


def read_prompts(path: Path, limit: int | None = None) -> list[JsonObject]:
    """Read the prompts of a file, one per line, as `LLM.generate` takes them: `prompt` or
    `prompt_token_ids`, and as `name` the file and line, which messages use. Blank lines are
    skipped.

    A file that ends in .jsonl holds objects with `prompt` (text) or `prompt_token_ids` (integers),
    and optionally `checkpoint_at`, see `Prompt`; other keys are left out. Any other file is plain
    text.

    Args:
        limit: most prompts to return, evenly spread over the file.

    Raises:
        UserError: the file cannot be read, a line has another form, a key is almost
            `checkpoint_at`, or there is no prompt at all.
    """
    try:
        lines = read_text(path).split("\n")  # a text may contain other line breaks
    except UserError as error:
        raise UserError(f"prompts file {error}; name a .jsonl or a text file") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"prompts file {path} holds no prompts; write one a line")
    if limit is not None and limit < len(numbered):
        numbered = [numbered[index * len(numbered) // limit] for index in range(limit)]
    if path.suffix != ".jsonl":
        return [{"prompt": line, "name": f"{path}:{number}"} for number, line in numbered]
    return [
        {**_parse(line, f"{path}:{number}"), "name": f"{path}:{number}"}
        for number, line in numbered
    ]


def _parse(line: str, where: str) -> JsonObject:
    parsed = parse_json(line, where)
    record = parsed if isinstance(parsed, dict) else {}
    # Other keys are left out silently. With this one, the checkpoint would be left out, too.
    if misspelt := difflib.get_close_matches(
        "checkpoint_at", record.keys() - {"checkpoint_at"}, 1, cutoff=0.85
    ):
        raise UserError(f"{where} has the key {shown(misspelt[0])}; did you mean checkpoint_at?")
    text = record.get("prompt")
    token_ids = record.get("prompt_token_ids")
    at = (
        {"checkpoint_at": record["checkpoint_at"]}
        if record.get("checkpoint_at") is not None
        else {}
    )
    # By their exact type: JSON's true and false are ints to isinstance.
    if isinstance(token_ids, list) and all(type(token) is int for token in token_ids):
        return {"prompt_token_ids": token_ids, **at}
    if isinstance(text, str):
        return {"prompt": text, **at}
    raise UserError(
        f'{where} must be an object with "prompt", a text, or "prompt_token_ids", a list of'
        " integers"
    )
