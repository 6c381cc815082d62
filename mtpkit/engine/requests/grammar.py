"""Grammars that constrain outputs: compiled in a thread of their own, walked along output tokens
and drafts, and asked which tokens may come next.

The library llguidance does all of this. It computes each mask when it is needed, so that compiling
takes milliseconds.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mtpkit.engine.requests.structured import StructuredOutputsParams
from mtpkit.engine.requests.walk import Position, Walk
from mtpkit.errors import UserError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_BITS = 32
_LONGEST = 200
"""Most characters of a message of the library."""


def grammar_of(params: StructuredOutputsParams) -> str:
    """The grammar that a constraint stands for, in the library's notation. Checking it takes a
    third of a second for a schema with 10,000 properties.

    Raises:
        UserError: the library cannot read it; in one line.
    """
    from llguidance import LLMatcher

    grammar = _written(params)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise _refusal(messages[0])
    return grammar


def _written(params: StructuredOutputsParams) -> str:
    """A constraint in the library's notation, which may still be wrong.

    Raises:
        UserError: the notation has no place for it.
    """
    from llguidance import LLMatcher

    try:
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.choice is not None:
            # Texts in JSON's notation are texts in Lark's, too.
            listed = " | ".join(json.dumps(one) for one in params.choice)
            return LLMatcher.grammar_from_lark(f"start: {listed}")
        if params.grammar is not None:
            return LLMatcher.grammar_from_lark(params.grammar)
        schema = params.json if params.json is not None else '{"type": "object"}'
        flexible: Any = {"whitespace_flexible": not params.disable_any_whitespace}
        return LLMatcher.grammar_from_json_schema(schema, overrides=flexible)
    except ValueError as error:  # such as for lone surrogates, also in a schema
        raise _refusal(str(error)) from error


def _refusal(message: str, what: str = "cannot be compiled") -> UserError:
    line = " ".join(message.split())
    return UserError(f"structured_outputs {what}: {line[:_LONGEST]}")


class Constraint:
    """The tokens that the output of one request may go on with.

    Args:
        compiled: copies of the compiled grammar, in its first state. The constraint takes one of
            them; its request's siblings take the others.
        start_after: token after which the grammar begins; None: it begins with the output.
        size: number of tokens of the vocabulary.
        end_token_ids: tokens that end an output that the grammar has accepted.
    """

    def __init__(
        self,
        compiled: "Future[list[LLMatcher]]",
        start_after: int | None,
        size: int,
        end_token_ids: Sequence[int],
    ) -> None:
        self._compiled = compiled
        self._start_after = start_after
        self._began = start_after is None
        self._end_token_ids = frozenset(end_token_ids)
        self._end_mask = np.zeros(-(-size // _BITS), np.int32)
        for token_id in end_token_ids:
            self._end_mask[token_id // _BITS] |= np.int32(
                np.uint32(1 << (token_id % _BITS)).astype(np.int32)
            )

    @property
    def ready(self) -> bool:
        """Whether the grammar is compiled."""
        return self._compiled.done()

    def wait(self) -> None:
        """Wait until the grammar is compiled; `error` says whether it could be."""
        self._compiled.exception()

    @property
    def error(self) -> str | None:
        """Why the constraint can no longer say what may follow; None: it can. What it says then is
        an end, so that the output must not be taken for a whole one."""
        if self._refused is not None:
            return self._refused
        if not self._matcher.is_error():
            return None
        return str(_refusal(self._matcher.get_error(), "are too complex"))

    # A step asks for these several times for each request.
    @cached_property
    def _refused(self) -> str | None:
        """Why the grammar could not be compiled."""
        error = self._compiled.exception()
        return None if error is None else str(error)

    @cached_property
    def _matcher(self) -> "LLMatcher":
        return self._compiled.result().pop()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Walk along tokens that were added to the output."""
        if self.error is not None:
            return
        for place, token_id in enumerate(token_ids):
            if self._began:
                self._read(token_ids[place:])
                return
            self._began = token_id == self._start_after

    def _read(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            # Only an end follows then.
            if self._matcher.is_stopped():
                return
            self._matcher.consume_token(token_id)

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that must come next, whatever the model would say. There may be more,
        as the last ones can be one token with text that follows."""
        if not self._began or self.error is not None:
            return []
        if self._matcher.is_stopped():
            return []
        return self._matcher.compute_ff_tokens()[:most]

    def walk(
        self,
        token_ids: list[int],
        parents: Sequence[int],
        depth: int,
        writes: bool = True,
        runners_up: Sequence[Sequence[int]] = (),
    ) -> Walk:
        """Walk along the drafts of a step, see `Walk`; the constraint itself stays where it is."""
        matcher = None if self.error is not None else self._matcher
        start_after = None if self._began else self._start_after
        position = Position(matcher, start_after, self._end_token_ids, self._end_mask)
        return Walk(position, token_ids, parents, depth, writes, runners_up)


class Grammars:
    """Makes the constraints of an engine's requests.

    Args:
        tokenizer: a fast tokenizer of transformers.
        size: number of tokens of the vocabulary.
        end_token_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Any, size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._end_token_ids = list(end_token_ids)
        self._thread = ThreadPoolExecutor(1, "mtpkit-grammar")

    @cached_property
    def _wrapped(self) -> "LLTokenizer":
        """The tokenizer as the library needs it, which takes a second for a large vocabulary."""
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, self._size, self._end_token_ids)
        except ValueError as error:
            raise UserError(f"structured_outputs need a fast tokenizer: {error}") from error

    def constraints(
        self, params: StructuredOutputsParams, start_after: int | None, count: int = 1
    ) -> list[Constraint]:
        """Begin to compile a constraint; each of `count` outputs gets its own. Their `error` says
        whether it could be compiled."""
        compiled = self._thread.submit(self._copies, params, count)
        return [
            Constraint(compiled, start_after, self._size, self._end_token_ids) for _ in range(count)
        ]

    def _copies(self, params: StructuredOutputsParams, count: int) -> "list[LLMatcher]":
        # Compiling checks the grammar, too.
        matcher = self._compile(_written(params))
        # Copied in this thread: copies of a choice of 20,000 texts take 36 ms each.
        return [matcher, *(matcher.deep_copy() for _ in range(count - 1))]

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._wrapped, grammar, log_level=0)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return matcher
