"""Intake: makes requests from prompts, and refuses prompts that can never be served.

Every check of a request is here, but for the forms of prompts, which `requests.prompts` reads, and
for ids that are taken, which the scheduler knows.
"""

import logging
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from mtpkit.config.checked import are_whole, is_whole
from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.detokenizer import Detokenizer
from mtpkit.engine.requests.grammar import Constraint, Grammars
from mtpkit.engine.requests.params import SEED_BITS, SamplingParams
from mtpkit.engine.requests.prompts import Encoded, Prompt, encode, truncated
from mtpkit.engine.requests.request import PromptError, Request, StopReason
from mtpkit.engine.requests.stats import AcceptanceStats, RequestStats
from mtpkit.engine.requests.token_limits import (
    MOST_BAD_WORDS,
    MOST_END_TOKENS_OF_MIN,
    MOST_TOKENS_OF_BAD_WORD,
)
from mtpkit.engine.requests.token_texts import Tokenizer, TokenTexts
from mtpkit.engine.steps.processors import processors_of
from mtpkit.errors import UserError, shown

_LONG_NUMBER = 18
"""Numeric ids of this many digits or more do not affect the numbering; no count reaches them."""
_logger = logging.getLogger(__name__)


class Intake:
    """Makes the requests of one engine: gives them ids, places in the order of arrival, and seeds.

    Args:
        num_blocks: all blocks of the engine's cache.
        eos_token_ids: tokens that end every request that does not ignore them.
        slot_bytes: bytes of recurrent state of a running request.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        slot_bytes: int = 0,
    ) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.slot_bytes = slot_bytes
        self._texts: dict[bool, TokenTexts] = {}
        """How the tokenizer decodes with special tokens left out (True) and with all tokens."""
        if tokenizer is not None:
            self._texts[True] = TokenTexts(tokenizer)
        self._never_found = set[str]()
        """Stop strings that were warned of."""
        self._seeds = random.Random(config.seed)
        self._grammars: Grammars | None = None
        self.in_background = False
        """Whether grammars are compiled while other requests go on. Ranks that share a model must
        not do this: a request would be admitted when each of them is ready."""
        self._num_requests = 0
        self._next_number = 0

    def next_id(self) -> str:
        """Take the next number as a request's id."""
        return self._id_of(None)

    def seeded(self, params: SamplingParams) -> SamplingParams:
        """Give parameters without a seed the next one that is drawn from the engine's."""
        if params.seed is not None:
            return params
        return replace(params, seed=self._draw_seed())

    def read(
        self, prompt: Prompt, params: SamplingParams, request_id: str, name: str, refuse: bool
    ) -> Request:
        """Make a request of a prompt in any form that users may give.

        Args:
            name: name of the prompt in messages.
            refuse: return a request that has already ended with an error, instead of raising the
                error, if the prompt can never be served.

        Raises:
            PromptError: the prompt can never be served, and `refuse` is not set.
            UserError: it is no prompt at all, or needs a tokenizer and there is none.
        """
        text: str | None = None
        token_ids: Sequence[int] = ()
        try:
            text, token_ids, checkpoint_at = encode(prompt, self.tokenizer, name)
            return self.make(token_ids, params, request_id, text, name, checkpoint_at)
        except PromptError as error:
            if not refuse:
                raise
            return self._refused(request_id, params, error, text, token_ids)

    def make(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
        place: str | None = None,
        checkpoint_at: int | None = None,
    ) -> Request:
        """Make a request without queueing it; with `n` above 1, that of the first output, which
        knows its siblings.

        Args:
            request_id: the request's id; by default requests are numbered.
            place: name of the request in messages, such as its place in a list or in a file.
            checkpoint_at: number of prompt tokens after which the prefix cache keeps a checkpoint,
                besides those that it keeps anyway.

        Raises:
            PromptError: the prompt can never be served.
            UserError: `params` are none, or ask for what the engine cannot do, such as stop strings
                without a tokenizer.
        """
        request_id = self._id_of(request_id)
        name = place or f"request {request_id}"
        if not isinstance(params, SamplingParams):
            raise UserError(f"{name}: params is {shown(params)}, give SamplingParams(...)")

        tokens = list(prompt_token_ids)
        self._check_tokens(name, tokens, checkpoint_at)
        kept = truncated(
            Encoded(prompt, tokens, checkpoint_at),
            params.truncate_prompt_tokens,
            self.config.max_model_len,
        )
        tokens = list(map(int, kept.token_ids))
        self._check_outputs(name, params)
        self._check_stops(name, params)
        texts = self._texts_for(params)
        end_token_ids = self._end_tokens(params, texts)
        bad_words = self._bad_words(name, params)
        self._check_rules(name, params, end_token_ids, bad_words)

        room = max(0, self.config.max_model_len - len(tokens))
        # A seed that users give may be negative.
        seed = self._draw_seed() if params.seed is None else params.seed

        constraints = self._constraints(name, params)

        def output(index: int) -> Request:
            detokenizer = None
            if texts is not None:
                detokenizer = Detokenizer(
                    texts,
                    tokens,
                    params.stop_strings,
                    params.include_stop_str_in_output,
                    params.min_tokens,
                )
            return Request(
                request_id=request_id,
                prompt_token_ids=tokens,
                params=params,
                seed=(seed + index) % (1 << SEED_BITS),
                arrival=self._num_requests + index,
                stats=self._new_stats(self.slot_bytes),
                processors=processors_of(params, self.vocab_size),
                prompt=prompt,
                detokenizer=detokenizer,
                place=place,
                max_tokens=min(params.max_tokens or room, room),
                end_token_ids=end_token_ids,
                bad_words=bad_words,
                # Each output walks along its own tokens.
                constraint=constraints[index],
                checkpoint_at=kept.checkpoint_at,
                index=index,
            )

        first, *others = [output(index) for index in range(params.n)]
        self._num_requests += params.n
        self._check_room(name, first)
        if others:
            siblings = (first, *others)
            for request in siblings:
                request.siblings = siblings
        return first

    def _refused(
        self,
        request_id: str,
        params: SamplingParams,
        error: PromptError,
        prompt: str | None,
        tokens: Sequence[int],
    ) -> Request:
        """Make the request of a prompt that cannot be served: one that has already ended, with
        `error`."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            params=params,
            seed=0,
            arrival=self._num_requests,
            stats=self._new_stats(),
            processors=frozenset(),
            prompt=prompt,
        )
        request.finish_reason = "error"
        request.error = str(error)
        return request

    def _id_of(self, request_id: str | None) -> str:
        """The given id, or else the next number; numbering continues above given numbers, so that
        ids are unique."""
        if request_id is None:
            request_id = str(self._next_number)
        if not isinstance(request_id, str):
            raise UserError(
                f"request_id is {shown(request_id)}, must be a text: leave it out to have requests"
                " numbered"
            )
        # Results may be kept by id, so that no number may come again, even after its request.
        if request_id.isdecimal() and len(request_id) < _LONG_NUMBER:
            self._next_number = max(self._next_number, int(request_id) + 1)
        return request_id

    def _draw_seed(self) -> int:
        return self._seeds.getrandbits(SEED_BITS)

    def _new_stats(self, state_bytes: int = 0) -> RequestStats:
        depths = AcceptanceStats.for_depths(self.config.num_speculative_tokens, self.config.tree)
        return RequestStats(**vars(depths), state_bytes=state_bytes)

    def _check_tokens(self, name: str, tokens: list[int], checkpoint_at: int | None) -> None:
        """Refuse tokens outside the vocabulary, and a checkpoint outside the prompt."""
        # Prompts may have 100,000 tokens: this looks at each of them in C.
        known = are_whole(tokens) and min(tokens, default=0) >= 0
        if not known or max(tokens, default=0) >= self.vocab_size:
            foreign = [
                token for token in tokens if not is_whole(token) or not 0 <= token < self.vocab_size
            ]
            raise PromptError(
                f"{name}: tokens {foreign[:5]} are outside the vocabulary of {self.vocab_size}"
            )
        if checkpoint_at is not None and not 1 <= checkpoint_at <= max(1, len(tokens)):
            raise PromptError(
                f"{name}: checkpoint_at is {checkpoint_at}, must be from 1 to the prompt's"
                f" {len(tokens)} tokens"
            )

    def _check_outputs(self, name: str, params: SamplingParams) -> None:
        """Refuse more outputs than can run at once."""
        most = self.config.max_num_seqs
        if params.n > most:
            raise UserError(
                f"{name}: n is {params.n}, but at most {most} requests run at once: lower n or"
                " raise max_num_seqs"
            )

    def _check_stops(self, name: str, params: SamplingParams) -> None:
        """Warn of stop tokens that never come; refuse stop strings without a tokenizer."""
        stop_tokens = params.stop_token_ids or ()
        unknown = [token for token in stop_tokens if not 0 <= token < self.vocab_size]
        if unknown:
            _logger.warning(
                "stop_token_ids %s have no effect: the vocabulary has %d tokens",
                unknown[:5],
                self.vocab_size,
            )
        if params.stop_strings and self.tokenizer is None:
            raise UserError(
                f"{name}: stop strings need a tokenizer, use stop_token_ids or give one"
            )

    def _bad_words(self, name: str, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The sequences of tokens that `bad_words` stand for: a word as it is, and after a space,
        if that is another sequence of the same length, as in vLLM."""
        if params.bad_words is None:
            return ()
        if self.tokenizer is None:
            raise UserError(f"{name}: bad_words need a tokenizer, use logit_bias or give one")
        found: list[tuple[int, ...]] = []
        for word in params.bad_words:
            plain = self._encoded(word.lstrip())
            spaced = self._encoded(" " + word.lstrip())
            found.append(plain)
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                found.append(spaced)
        longest = max(map(len, found), default=0)
        if len(found) > MOST_BAD_WORDS or longest > MOST_TOKENS_OF_BAD_WORD:
            raise UserError(
                f"{name}: bad_words are {len(found)} sequences of up to {longest} tokens; there may"
                f" be {MOST_BAD_WORDS} of up to {MOST_TOKENS_OF_BAD_WORD}, with and without a space"
                " before each word: leave some out"
            )
        return tuple(found)

    def _constraints(
        self, name: str, params: SamplingParams
    ) -> Sequence[Constraint] | Sequence[None]:
        """The constraint of each of a request's outputs; compiled, unless that happens in the
        background."""
        asked = params.structured_outputs
        if asked is None:
            return [None] * params.n
        if self.tokenizer is None:
            raise UserError(f"{name}: structured_outputs need a tokenizer: give one")
        start_after = None
        if asked.start_after is not None:
            start_after = self._texts[True].added_token(asked.start_after)
            if start_after is None:
                raise UserError(
                    f"{name}: start_after is {shown(asked.start_after)}, which is no special token"
                    " of the tokenizer"
                )
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.vocab_size, sorted(self.eos_token_ids))
        constraints = self._grammars.constraints(asked, start_after, params.n)
        if not self.in_background:
            constraints[0].wait()
            if constraints[0].error is not None:
                raise UserError(f"{name}: {constraints[0].error}")
        return constraints

    def _encoded(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, without special tokens around it."""
        assert self.tokenizer is not None
        encode: Any = self.tokenizer.encode
        return tuple(encode(text, add_special_tokens=False))

    def _check_rules(
        self,
        name: str,
        params: SamplingParams,
        ends: Collection[int],
        bad_words: tuple[tuple[int, ...], ...],
    ) -> None:
        """Refuse rules about tokens that the model does not have, and rules that leave no token to
        choose."""
        given = {
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for field, tokens in given.items():
            foreign = [token for token in tokens if token >= self.vocab_size]
            if foreign:
                raise UserError(
                    f"{name}: {field} has tokens {foreign[:5]}, which are outside the vocabulary of"
                    f" {self.vocab_size}"
                )
        if params.min_tokens and len(ends) > MOST_END_TOKENS_OF_MIN:
            raise UserError(
                f"{name}: min_tokens works with up to {MOST_END_TOKENS_OF_MIN} tokens that end the"
                f" output, but there are {len(ends)}: give fewer stop_token_ids"
            )
        forbidden = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens:
            forbidden.update(ends)
        if params.allowed_token_ids is not None and forbidden >= set(params.allowed_token_ids):
            raise UserError(
                f"{name}: min_tokens and bad_words forbid all of allowed_token_ids: allow more"
            )

    def _check_room(self, name: str, request: Request) -> None:
        """Refuse a request without prompt tokens, without room for output, or for which even the
        empty cache has too few blocks."""
        prompt = len(request.prompt_token_ids)
        output = request.max_tokens
        if not prompt:
            raise PromptError(f"{name}: the prompt is empty, give it at least one token")
        if not output:
            raise PromptError(
                f"{name}: {prompt} prompt tokens leave no room for output in max_model_len "
                f"{self.config.max_model_len}: shorten the prompt or raise max_model_len"
            )
        # Blocks are reserved for the whole prompt. The newest token is never cached, and the last
        # decode step starts before it.
        needed = self.config.blocks_for(self.config.reach(prompt + max(0, output - 2)))
        if needed > self.num_blocks:
            raise PromptError(
                f"{name}: {prompt} prompt tokens + {output} output tokens + lookahead"
                f" {self.config.lookahead} need {needed} blocks of {self.config.block_size}, the"
                f" cache has {self.num_blocks}: shorten the prompt, lower max_tokens or raise"
                " num_blocks"
            )

    def _texts_for(self, params: SamplingParams) -> TokenTexts | None:
        """How outputs become text; None: they do not."""
        if self.tokenizer is None or not params.detokenize:
            return None
        skips = params.skip_special_tokens
        if skips not in self._texts:
            self._texts[skips] = TokenTexts(self.tokenizer, skips)
        return self._texts[skips]

    def _end_tokens(
        self, params: SamplingParams, texts: TokenTexts | None
    ) -> dict[int, StopReason]:
        """Tokens that end a request, each with the stop reason that it is."""
        ends: dict[int, StopReason] = {}
        if texts is not None and params.skip_special_tokens:
            ends |= self._stop_tokens(params.stop_strings, texts)
        ends |= {token: token for token in params.stop_token_ids or ()}
        return ends if params.ignore_eos else ends | dict.fromkeys(self.eos_token_ids)

    def _stop_tokens(self, stop_strings: tuple[str, ...], texts: TokenTexts) -> dict[int, str]:
        """Special tokens that stop strings name. The text leaves special tokens out, so that it
        never holds a name."""
        tokens = {}
        for stop in stop_strings:
            token_id = texts.special_token(stop)
            if token_id is not None:
                tokens[token_id] = stop
                continue
            special = texts.special_inside(stop)
            if special and stop not in self._never_found:
                self._never_found.add(stop)
                _logger.warning(
                    "the stop string %r is never found, as the text leaves out the special token"
                    " %r: use %r alone, or skip_special_tokens=False",
                    stop,
                    special,
                    special,
                )
        return tokens
