"""Let the base answer prompts, as data: heads learn best from text that the base itself would
write."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mtpkit.data.documents import describe
from mtpkit.data.prompts import Prompt
from mtpkit.data.regenerate import Answer, Journal, digest
from mtpkit.engine.engine import Engine
from mtpkit.engine.requests.options import EngineOptions
from mtpkit.engine.requests.params import SamplingParams
from mtpkit.errors import MtpkitError, UserError, listed, shown

logger = logging.getLogger(__name__)

_ALWAYS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos")
"""Sampling parameters that every journal has. Others are left out while they have their defaults,
so that a journal stays valid when a new version brings a new parameter."""
_HELD = ("quantization", "kv_cache_dtype", "state_dtype", "prefix_cache_dtype")
"""Options of the engine that answers depend on, left out in the same way."""

_REFRESH = 0.5
"""Seconds after which the count of tokens is shown again, whether or not an answer is finished."""


def journal_settings(
    model: Path,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    seed: int,
    engine: EngineOptions,
) -> dict[str, object]:
    """All settings that the answers depend on.

    Args:
        params: of all prompts; their seed is not used.
        engine: what decodes; only the types in which it holds numbers change answers.
    """
    own = {"n", "seed", "stop", *_ALWAYS}
    usual = vars(SamplingParams())
    others = {
        name: value
        for name, value in vars(params).items()
        if name not in own and value != usual[name]
    }
    held = {name: getattr(engine, name) for name in _HELD}
    plain = EngineOptions()
    others |= {name: value for name, value in held.items() if value != getattr(plain, name)}
    return {
        "model": str(model.resolve()),
        "prompts": f"{len(prompts)} of digest {digest(prompts)}",
        **{name: getattr(params, name) for name in _ALWAYS},
        "stop": params.stop_strings,
        "seed": seed,
        "dtype": engine.dtype,
        **others,
    }


def regenerate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    journal: Journal,
    tokenizer: str,
    seed: int,
    in_flight: int,
    refused: Sequence[str] = (),
) -> int:
    """Answer all prompts that the journal has no answer to, with continuous batching and a progress
    bar.

    Each prompt has its own seed, so that its answer depends neither on other requests nor on
    interruptions, except for rounding differences between batches. A prompt that the engine cannot
    serve is left out, with a warning.

    Args:
        params: of all prompts; their seed is not used.
        tokenizer: fingerprint of the engine's tokenizer.
        in_flight: largest number of requests that the engine holds at once.
        refused: `describe` of the rows without a prompt, for the warning.

    Returns:
        The number of answers, which are in the output by then.

    Raises:
        UserError: no prompt can be served.
        MtpkitError: the engine failed on a prompt. The answers so far are kept.
    """
    done = journal.done
    if beyond := [index for index in done if index >= len(prompts)]:
        raise UserError(
            f"{journal.path} answers prompt {shown(max(beyond) + 1)}, but there are {len(prompts)};"
            " remove it to start again"
        )
    left_out = list(refused)
    waiting = iter([index for index in range(len(prompts)) if index not in done])
    open_requests = 0
    before = engine.stats().generated_tokens
    drawn = time.monotonic()
    # disable=None: silent where stderr is not a terminal.
    with tqdm(
        total=len(prompts), initial=len(done), desc="answering", unit=" prompts", disable=None
    ) as progress:
        while True:
            while open_requests < in_flight and (index := next(waiting, None)) is not None:
                own = replace(params, seed=_seed(seed, index))
                try:
                    engine.add_request(prompts[index].token_ids, own, str(index))
                    open_requests += 1
                except UserError as error:
                    left_out.append(describe(prompts[index].name, str(error)))
                    progress.update()
            if not open_requests:
                break
            answers = _answers(engine, prompts, journal, tokenizer)
            open_requests -= len(answers)
            tokens = engine.stats().generated_tokens - before
            elapsed = progress.format_dict["elapsed"]
            rate = f", {tokens / elapsed:,.0f} tokens/s" if elapsed else ""
            progress.set_postfix_str(f"{tokens:,} tokens{rate}", refresh=False)
            progress.update(len(answers))
            if time.monotonic() > drawn + _REFRESH:  # long answers: no update for a while
                progress.refresh()
                drawn = time.monotonic()
    answered = len(journal.done)
    if not answered:
        raise UserError(f"no prompt can be served; the first: {left_out[0]}")
    if left_out:
        total = len(prompts) + len(refused)
        logger.warning("%d of %d prompts are left out: %s", len(left_out), total, listed(left_out))
    journal.publish()
    return answered


def _answers(
    engine: Engine, prompts: Sequence[Prompt], journal: Journal, tokenizer: str
) -> list[Answer]:
    """Take a step of the engine, and journal the answers that it finished."""
    answers = list[Answer]()
    failed = list[str]()
    for output in engine.step(finished_only=True):
        index = int(output.request_id)
        completion = output.outputs[0]
        prompt = prompts[index]
        if completion.finish_reason == "error":
            failed.append(f"{prompt.name}: {completion.error}")
            continue
        assert completion.finish_reason is not None, "steps return what is finished"
        messages = None
        if prompt.messages is not None:
            messages = [*prompt.messages, {"role": "assistant", "content": completion.text}]
        answer = Answer(
            index=index,
            name=prompt.name,
            prompt=prompt.text,
            completion=completion.text,
            finish_reason=completion.finish_reason,
            tokenizer=tokenizer,
            prompt_token_ids=prompt.token_ids,
            completion_token_ids=completion.token_ids,
            messages=messages,
            tools=prompt.tools,
            chat_template_kwargs=prompt.template_kwargs,
        )
        journal.add(answer)
        answers.append(answer)
    # After the loop: the other answers of this step are in the journal by then.
    if failed:
        raise MtpkitError(f"{failed[0]}; the {len(journal.done)} answers so far are kept")
    return answers


def _seed(seed: int, index: int) -> int:
    # Without the lowest bit: seeds have 63 bits.
    return int(
        np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> np.uint64(1)
    )
