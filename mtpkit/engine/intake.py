"""Intake: makes requests from prompts, and refuses prompts that can never be served.

Every check of a request is here, but for the forms of prompts, which `requests.prompts` reads, and
for ids that are taken, which the scheduler knows.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import replace

from mtpkit.config.checked import are_whole, is_whole
from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.detokenizer import Detokenizer
from mtpkit.engine.requests.params import SEED_BITS, SamplingParams
from mtpkit.engine.requests.prompts import Prompt, checkpoint_of, encode
from mtpkit.engine.requests.request import PromptError, Request
from mtpkit.engine.requests.stats import AcceptanceStats, RequestStats
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
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._never_found = set[str]()
        """Stop strings that were warned of."""
        self._seeds = random.Random(config.seed)
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
            text, token_ids = encode(prompt, self.tokenizer, name)
            checkpoint_at = checkpoint_of(prompt, name)
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
        """Make a request without queueing it.

        Args:
            request_id: the request's id; by default requests are numbered.
            place: name of the request in messages, such as its place in a list or in a file.
            checkpoint_at: number of prompt tokens after which the prefix cache keeps a checkpoint,
                besides those that it keeps anyway.

        Raises:
            PromptError: the prompt can never be served.
            UserError: `params` are none, or have stop strings although there is no tokenizer.
        """
        request_id = self._id_of(request_id)
        name = place or f"request {request_id}"
        if not isinstance(params, SamplingParams):
            raise UserError(f"{name}: params is {shown(params)}, give SamplingParams(...)")
        arrival = self._num_requests
        self._num_requests += 1

        tokens = list(prompt_token_ids)
        self._check_tokens(name, tokens, checkpoint_at)
        self._check_stops(name, params)

        room = max(0, self.config.max_model_len - len(tokens))
        detokenizer = None
        if self._texts is not None:
            detokenizer = Detokenizer(self._texts, tokens, params.stop_strings)
        # A seed that users give may be negative.
        seed = self._draw_seed() if params.seed is None else params.seed
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(map(int, tokens)),
            params=params,
            seed=seed % (1 << SEED_BITS),
            arrival=arrival,
            stats=self._new_stats(self.slot_bytes),
            processors=processors_of(params, self.vocab_size),
            prompt=prompt,
            detokenizer=detokenizer,
            place=place,
            max_tokens=min(params.max_tokens or room, room),
            end_token_ids=self._end_tokens(params),
            checkpoint_at=checkpoint_at,
        )
        self._check_room(name, request)
        return request

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

    def _end_tokens(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a request."""
        ends = frozenset(params.stop_token_ids or ()) | self._stop_tokens(params.stop_strings)
        return ends if params.ignore_eos else ends | self.eos_token_ids

    def _stop_tokens(self, stop_strings: tuple[str, ...]) -> frozenset[int]:
        """Special tokens that stop strings name. The text leaves special tokens out, so that it
        never holds a name."""
        if self._texts is None:
            return frozenset()
        tokens = set[int]()
        for stop in stop_strings:
            token_id = self._texts.special_token(stop)
            if token_id is not None:
                tokens.add(token_id)
                continue
            special = self._texts.special_inside(stop)
            if special and stop not in self._never_found:
                self._never_found.add(stop)
                _logger.warning(
                    "the stop string %r is never found, as the text leaves out the special token"
                    " %r: use %r alone",
                    stop,
                    special,
                    special,
                )
        return frozenset(tokens)
