"""Models and prompts of the benchmarks: published sizes with random weights, or checkpoints; random
or real prompts."""

import difflib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from mtpkit.bench.drawn import DrawnModel, draw_model
from mtpkit.bench.settings import LARGE_SHAPES, HeadFormat, PublishedFormat
from mtpkit.bench.sizes import SHAPES
from mtpkit.bench.weights import ModelWeights
from mtpkit.checkpoint import load_config, load_model, open_directory
from mtpkit.checkpoint.load import load_sizes
from mtpkit.config import ModelConfig
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine.drafting import check_depths
from mtpkit.engine.requests.messages import RENDERING
from mtpkit.engine.requests.prompts import Prompt, encode, list_prompts
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import JsonObject, parse_json, read_text
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import kinds_in
from mtpkit.model.stages import StageBalance
from mtpkit.platform import default_device, resolve_dtype

_logger = logging.getLogger(__name__)


def require_gpu(model: str, device: torch.device, option: str = "--model ") -> None:
    """Refuse a large shape on a CPU.

    Args:
        option: what stands before a model on the command line.

    Raises:
        UserError: the model is a large shape and the device is a CPU.
    """
    if model in LARGE_SHAPES and device.type != "cuda":
        raise UserError(
            f"{model} needs a GPU; {option}nemotron-h-tiny, or a model directory, runs on a CPU"
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
    quantization: Literal["fp8"] | None = None,
    weight_format: PublishedFormat | None = None,
    head_format: HeadFormat | None = None,
) -> HybridModel:
    """A shape with random weights drawn on the device, or the model of a directory.

    Args:
        dtype: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU, float32 on a CPU.
        pattern, distinct: see `get_config`.
        ranks, whole_experts: number of tensor-parallel ranks, and whether each of them holds whole
            experts.
        stages, balance: number of pipeline stages, of which this rank has one, and how layers are
            divided among them.
        quantization: see `EngineOptions`.
        weight_format: format of a shape's matrices; None: as `quantization` says.
        head_format: format of the layers of a shape's heads; None: as `weight_format` says.

    Raises:
        UserError: the model is neither a known shape nor a directory, or it cannot be built, or a
            format is given for a directory; see `get_config`.
    """
    config = get_config(model, pattern, distinct)
    chosen = getattr(torch, resolve_dtype(dtype, device))
    parallel: dict[str, Any] = dict(tensor_parallel=ranks, sequence_parallel=False)
    parallel |= dict(pipeline_parallel=stages, balance=balance)
    if whole_experts:
        parallel |= dict(expert_parallel=ranks, expert_tensor_parallel=1)
    if model in SHAPES:
        return draw_model(
            config, chosen, device, weight_format or quantization, head_format, **parallel
        )
    _refuse_format(model, weight_format)
    _refuse_format(model, head_format, "head_format")
    parallel |= dict(quantization=quantization)
    return load_model(_directory(model), chosen, device, **parallel).requires_grad_(False)


def held_weights(
    model: str,
    dtype: torch.dtype,
    pattern: str | None = None,
    quantization: Literal["fp8"] | None = None,
    weight_format: PublishedFormat | None = None,
    head_format: HeadFormat | None = None,
) -> ModelWeights:
    """The matrices of a model as memory would hold them on one device; none is made or read.

    Args: as `open_model`'s.

    Raises:
        UserError: as `open_model`.
    """
    config = get_config(model, pattern)
    chosen = weight_format or quantization
    if model not in SHAPES:
        _refuse_format(model, weight_format)
        _refuse_format(model, head_format, "head_format")
        directory = open_directory(_directory(model))
        # Without settings of a quantiser, the config alone tells the sizes.
        if quantization is None and directory.recipe is None:
            return ModelWeights.in_dtype(config, dtype)
        return ModelWeights.of(load_sizes(directory, dtype, quantization))
    return drawn_weights(config, dtype, chosen, head_format)


def drawn_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    weight_format: PublishedFormat | Literal["fp8"] | None = None,
    head_format: HeadFormat | None = None,
) -> ModelWeights:
    """The matrices that `draw_model` would make; none is made."""
    if weight_format is None and head_format is None:
        return ModelWeights.in_dtype(config, dtype)

    # Layers of a kind have the same sizes in a shape, so that one of each is enough: a model of
    # tens of thousands of experts takes minutes to make, without a value, too.
    letters = "".join(dict.fromkeys(config.pattern))
    meta = torch.device("meta")
    few = draw_model(config.replace(pattern=letters), dtype, meta, weight_format, head_format)
    found = ModelWeights.of(few)
    layers = dict(zip(letters, found.base, strict=True))
    return replace(found, base=[layers[letter] for letter in config.pattern])


def to_serve(
    model: Path,
    tokenizer: Path | None,
    weight_format: PublishedFormat | None = None,
    acceptance: float | None = None,
) -> Path | DrawnModel:
    """The model of a server: a shape, for load tests, or a directory or the id of a model as it is.
    A directory that has a shape's name goes before the shape.

    Args:
        tokenizer: directory of a tokenizer; shapes have none of their own.

    Raises:
        UserError: a shape without a tokenizer, with one that has more tokens than its vocabulary,
            or too large for a CPU; a format or acceptance that is given for a directory.
    """
    name = str(model)
    if name not in SHAPES or model.exists():
        _refuse_format(name, weight_format)
        if acceptance is not None:
            raise UserError(
                f"acceptance {acceptance} is for a shape with random weights ({listed(SHAPES)}),"
                f" not for a model directory as {name}, whose drafts are verified: leave it out"
            )
        return model

    require_gpu(name, default_device(), option="")
    if tokenizer is None:
        raise UserError(
            f"{name} is a shape with random weights, which has no tokenizer: give the directory of"
            " one with --tokenizer DIR"
        )
    config = SHAPES[name]
    # Not their number: ids may have gaps.
    last = max(load_tokenizer(tokenizer).get_vocab().values())
    if last >= config.vocab_size:
        raise UserError(
            f"the tokenizer in {tokenizer} has token ids up to {last}, outside of the vocabulary of"
            f" {config.vocab_size} of {name}: give a smaller tokenizer, or a larger shape"
        )
    return DrawnModel(name, config, weight_format)


def _refuse_format(model: str, given: str | None, name: str = "weight_format") -> None:
    """Refuse a format that is given for a directory."""
    if given is not None:
        raise UserError(
            f"{name.replace('_', ' ')} {given} is for a shape ({listed(SHAPES)}), not for a model"
            f" directory as {model}, whose files say theirs"
        )


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
    if any("prompt_token_ids" not in prompt for prompt in prompts):
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
    """Read the prompts of a file, one per line, as `LLM.generate` takes them: `prompt`,
    `prompt_token_ids` or `messages`, and as `name` the file and line, which error messages use.
    Blank lines are skipped.

    A file that ends in .jsonl holds objects with `prompt` (text), `prompt_token_ids` (integers) or
    `messages`, and optionally what `Prompt` allows beside them; other keys are left out. If a
    conversation ends with an answer, that is left out, too, unless the conversation says how it is
    to go on. Any other file is plain text.

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
    messages = record.get("messages")
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
    if text is None and isinstance(messages, list):
        rendering = {key: record[key] for key in RENDERING if record.get(key) is not None}
        return {"messages": _question(messages, rendering), **rendering, **at}
    raise UserError(
        f'{where} must be an object with "prompt", a text, "prompt_token_ids", a list of integers,'
        ' or "messages", a conversation'
    )


def _question(messages: list[Any], rendering: JsonObject) -> list[Any]:
    """A conversation without the answer at its end, which the model is to give."""
    last = messages[-1] if len(messages) > 1 else None
    answered = isinstance(last, dict) and last.get("role") == "assistant"
    # The conversation is to go on with the answer, or ends with it.
    chosen = rendering.keys() & {"add_generation_prompt", "continue_final_message"}
    return messages[:-1] if answered and not chosen else messages


def as_conversations(
    prompts: Sequence[JsonObject], ask: bool, template_kwargs: JsonObject
) -> list[JsonObject]:
    """Apply what a command says about conversations to prompts of `read_prompts`.

    Args:
        ask: make each text a conversation, in which it is a question.
        template_kwargs: variables of the chat template; a conversation's own take precedence.
    """
    found = []
    for prompt in prompts:
        if ask and "prompt" in prompt:
            rest = {key: value for key, value in prompt.items() if key != "prompt"}
            # A text from stdin mostly ends with a line feed.
            question = prompt["prompt"].rstrip("\n")
            prompt = {"messages": [{"role": "user", "content": question}], **rest}
        own = prompt.get("chat_template_kwargs", {})
        # Another type is refused when the prompt is rendered.
        if template_kwargs and "messages" in prompt and isinstance(own, dict):
            prompt = {**prompt, "chat_template_kwargs": {**template_kwargs, **own}}
        found.append(prompt)
    return found


def warn_of_raw_text(prompts: Sequence[Prompt], has_template: bool) -> None:
    """Warn of prompts that are texts where the tokenizer has a chat template."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    texts += [one["prompt"] for one in prompts if isinstance(one, dict) and "prompt" in one]
    if has_template and texts:
        _logger.warning(
            "%s raw text, but the tokenizer has a chat template, without which a chat model may end"
            " at once: --chat asks a text as a question, and rows of a .jsonl may have messages",
            "the prompt is" if len(prompts) == 1 else f"{len(texts)} of {len(prompts)} prompts are",
        )
