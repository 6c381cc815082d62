"""Fields of requests that are refused or ignored.

A field that changes what a client gets back is refused, unless its value asks for what the server
does anyway. Other fields without a meaning here are ignored, with one warning per name.
"""

import logging
from typing import Any, NamedTuple

from mtpkit.errors import shown
from mtpkit.server.errors import ApiError
from mtpkit.server.protocol.base import RequestBody

_logger = logging.getLogger(__name__)


class Refusal(NamedTuple):
    """A field that is refused."""

    why: str
    neutral: tuple[Any, ...] = ()
    """Values that are accepted, besides null."""


_RENAMED = "use structured_outputs"
_TEXT_ONLY = "models read and write text only"

REFUSED = {
    "best_of": Refusal("use n, and choose among the outputs", (1,)),
    "use_beam_search": Refusal("beam search is not supported", (False,)),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        Refusal(_RENAMED),
    ),
    "spaces_between_special_tokens": Refusal("texts are those of the tokenizer's decode", (True,)),
    "add_special_tokens": Refusal("give token ids as prompt"),
    "suffix": Refusal("texts are continued, not filled in", ("",)),
    "priority": Refusal("requests run first come, first served", (0,)),
    "chat_template": Refusal("the server is started with it: mtpkit serve --chat-template FILE"),
    "functions": Refusal("use tools", ([],)),
    "function_call": Refusal("use tool_choice", ("none",)),
    "modalities": Refusal(_TEXT_ONLY, (["text"],)),
    **dict.fromkeys(("audio", "prompt_embeds"), Refusal(_TEXT_ONLY)),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), Refusal(_TEXT_ONLY, ({},))),
    "logprob_token_ids": Refusal("log-probabilities are those of the most probable tokens"),
    "return_tokens_as_token_ids": Refusal("use return_token_ids", (False,)),
    "thinking_token_budget": Refusal("bound the output by max_tokens", (-1,)),
    "repetition_detection": Refusal("use frequency_penalty"),
    "truncation_side": Refusal("the last tokens of a prompt are kept", ("left",)),
    "watermarking": Refusal("outputs have no watermarks", (False,)),
    "documents": Refusal("use chat_template_kwargs", ([],)),
    "include_reasoning": Refusal("reasoning is sent as reasoning_content", (True,)),
    "cache_salt": Refusal("all requests share the prefix cache"),
    **dict.fromkeys(
        ("kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
        Refusal("leave it out", ({},)),
    ),
}
"""Fields that are refused, each with the reason or with what to do instead."""

SILENT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
"""Fields that are about OpenAI's service alone, which are ignored without a warning."""

_warned = set[str]()


def check_fields(body: RequestBody) -> None:
    """Refuse or ignore the fields that a request's body does not have.

    Raises:
        ApiError: a field is refused.
    """
    for name, value in (body.model_extra or {}).items():
        if name in REFUSED:
            if value is not None and not _is_neutral(value, REFUSED[name].neutral):
                why = REFUSED[name].why
                raise ApiError(400, f"{name} is {shown(value)}, not supported: {why}", name)
        elif name not in SILENT and name not in _warned:
            _warned.add(name)
            _logger.warning("requests have the unknown field %s, which is ignored", shown(name))


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # 0 and False are equal in Python, but not in JSON.
    return any(type(value) is type(one) and value == one for one in neutral)
