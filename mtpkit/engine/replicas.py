"""Replicas: processes, each with a whole model and its own GPU, that divide a list of prompts among
them.

The process that starts the replicas hands out the prompts and collects the outputs. Each replica
holds as many prompts as it can run and a few that wait, and gets a new one whenever one ends: a
replica with long outputs gets fewer prompts. Tokens do not depend on which replica chooses them:
seeds are given with the prompts. When a replica ends early, for whatever reason, all are ended.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from mtpkit.engine.llm import LLM
from mtpkit.engine.processes import EngineProcesses
from mtpkit.engine.requests.options import LLMOptions
from mtpkit.engine.requests.params import SEED_BITS, RequestOutputKind, SamplingParams
from mtpkit.engine.requests.prompts import (
    Prompt,
    is_prompt,
    list_params,
    list_prompts,
)
from mtpkit.engine.requests.request import PromptError, RequestOutput
from mtpkit.engine.requests.stats import EngineStats
from mtpkit.engine.worker import Add, Answer, Ask
from mtpkit.errors import UserError


@dataclass(frozen=True)
class _Work:
    """A prompt with everything that its output depends on besides the model."""

    index: int
    """Place among all prompts, from 0."""
    name: str
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class _Encoded:
    """A prompt that a replica has encoded and checked."""

    text: str | None
    add: Add


@dataclass(frozen=True)
class _Checked:
    """What a replica says of the prompts that it was sent to check."""

    encoded: list[_Encoded]
    refused: list[RequestOutput]
    """Outputs of the prompts that cannot be served."""
    errors: dict[int, str]
    """Messages of errors that concern all prompts, such as that there is no tokenizer, by
    `_Work.index`."""


class Replicas:
    """`count` processes with the same model. Use it as a context manager, or call `close`.

    Args:
        options: see `EngineProcesses`.

    Raises:
        UserError, MtpkitError: see `EngineProcesses`.
    """

    def __init__(self, options: LLMOptions, count: int) -> None:
        self._seed = options.seed
        self._most = options.max_num_seqs + max(1, options.max_num_seqs // 4)
        """Most prompts that a replica holds at once. Some of them wait, so that the next step can
        fill a free slot."""
        self._stats: EngineStats | None = None
        self._processes = EngineProcesses(options, count)
        self.memory_plan = self._processes.ready.memory_plan
        """The memory plan of replica 0."""
        self.has_tokenizer = self._processes.ready.has_tokenizer
        self.has_chat_template = self._processes.ready.has_chat_template

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        self._processes.close()

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the output of each prompt when it has ended; its request id is the prompt's place.
        Call it only once.

        The outputs are the same as those of `LLM.generate` with the same options, with or without
        seeds.

        Raises:
            UserError: as in `LLM.generate`, raised by the call itself, before any prompt is
                decoded.
            MtpkitError: a replica failed or died; it is named.
        """
        listed = list_prompts(prompts)
        drawn = random.Random(self._seed)
        params = list_params(sampling_params, len(listed))
        # Drawn here, in the order of the prompts: tokens must not depend on the replica.
        seeded = [
            replace(one, seed=drawn.getrandbits(SEED_BITS)) if one.seed is None else one
            for one in params
        ]
        works = [
            _Work(index, *named, replace(one, output_kind=RequestOutputKind.FINAL_ONLY))
            for index, (named, one) in enumerate(zip(listed, seeded, strict=True))
        ]
        encoded, refused = self._check(works)
        if refused and is_prompt(prompts):
            raise PromptError(refused[0].error)
        return chain(refused, self._serve(deque(encoded)))

    def _check(self, works: Sequence[_Work]) -> tuple[list[_Encoded], list[RequestOutput]]:
        """Have the replicas encode and check the prompts, each an equal share; prompts that cannot
        be served have their outputs already."""
        count = self._processes.count
        for replica in range(count):
            question = partial(_checked, works=works[replica::count])
            self._processes.send(replica, Ask(0, question))
        checked: list[_Checked] = self._answers()
        errors = {index: message for one in checked for index, message in one.errors.items()}
        if errors:
            raise UserError(errors[min(errors)])
        encoded = sorted(
            (one for each in checked for one in each.encoded), key=lambda one: _place(one.add)
        )
        return encoded, [output for one in checked for output in one.refused]

    def _serve(self, waiting: deque[_Encoded]) -> Iterator[RequestOutput]:
        held: list[dict[str, _Encoded]] = [{} for _ in range(self._processes.count)]
        while waiting or any(held):
            counts = [len(one) for one in held]
            while waiting and min(counts) < self._most:
                # The one that holds fewest, so that none is idle while another has prompts that
                # wait.
                replica = counts.index(min(counts))
                encoded = waiting.popleft()
                self._processes.send(replica, encoded.add)
                held[replica][encoded.add.request_id] = encoded
                counts[replica] += 1
            for replica, message in self._processes.receive():
                assert isinstance(message, list)
                for progress in message:
                    encoded = held[replica].pop(progress.request_id)
                    yield progress.output(encoded.text, encoded.add.prompt_token_ids)

        for replica in range(len(held)):
            self._processes.send(replica, Ask(0, LLM.stats))
        self._stats = EngineStats.together(self._answers())

    def _answers[T](self) -> list[T]:
        """The answers of all replicas to a question."""
        return [answer.value for answer in self._processes.one_of_each(Answer)]

    def stats(self) -> EngineStats:
        """Totals of all replicas, once all prompts have ended."""
        assert self._stats is not None
        return self._stats


def _checked(llm: LLM, works: Sequence[_Work]) -> _Checked:
    """Encode and check prompts."""
    checked = _Checked([], [], {})
    for work in works:
        try:
            request = llm.engine.intake.read(
                work.prompt, work.params, str(work.index), work.name, refuse=True
            )
        except UserError as error:
            checked.errors[work.index] = str(error)
            continue
        if request.finished:
            checked.refused.append(RequestOutput.of(request.all_of_prompt))
            continue
        add = Add(
            request.request_id,
            request.prompt_token_ids,
            work.params,
            work.name,
            request.checkpoint_at,
        )
        checked.encoded.append(_Encoded(request.prompt, add))
    return checked


def _place(add: Add) -> int:
    """Place of a prompt among all prompts."""
    return int(add.request_id)
