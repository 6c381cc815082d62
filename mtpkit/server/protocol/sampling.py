"""Fields that completions and chats have in common."""

from typing import Any

from pydantic import model_validator

from mtpkit.engine import RequestOutputKind, SamplingParams, StructuredOutputsParams
from mtpkit.errors import UserError, listed
from mtpkit.server.protocol.base import RequestBody
from mtpkit.server.protocol.usage import StreamOptions


class SamplingFields(RequestBody):
    """Fields of `SamplingParams`, which has their meaning and defaults, and checks them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    n: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    speculate: bool | None = None
    speculative_budget: bool | None = None


class DecodingRequest(SamplingFields):
    """What requests for text have in common."""

    model: str | None = None
    """The served model's name, or nothing."""
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: dict[str, Any] | None = None
    """Fields of `StructuredOutputsParams`: one of `json`, `json_object`, `regex`, `choice`,
    `grammar`."""
    response_format: dict[str, Any] | None = None
    """Its type is text, json_object or json_schema."""
    prompt_logprobs: int | None = None
    """Number of most probable tokens whose log-probabilities are sent for each token of the prompt;
    not in streams."""
    return_token_ids: bool | None = None
    """Send token ids of prompts and outputs beside their text."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> "DecodingRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not sent in streams")
        return self

    def sampling_params(self, **others: Any) -> SamplingParams:
        """The sampling parameters, for outputs that hold what is new if this asks for a stream.

        Raises:
            UserError: values out of range.
        """
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        known = {name: value for name, value in given.items() if value is not None}
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        known = {"prompt_logprobs": self.prompt_logprobs, **known, **others}
        constraint = self._constraint()
        return SamplingParams(**known, structured_outputs=constraint, output_kind=kind)

    def _constraint(self) -> StructuredOutputsParams | None:
        asked = self.structured_outputs or {}
        match self.response_format:
            case None | {"type": "text"}:
                pass
            case {"type": "json_object"}:
                asked = {**asked, "json_object": True}
            case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
                asked = {**asked, "json": schema}
            case _:
                raise UserError(
                    "response_format must have the type text, json_object, or json_schema with"
                    " json_schema.schema"
                )
        if not asked:
            return None
        unknown = asked.keys() - vars(StructuredOutputsParams(json_object=True)).keys()
        if unknown:
            raise UserError(f"structured_outputs has no {listed(map(ascii, sorted(unknown)))}")
        return StructuredOutputsParams(**asked)

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream is the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_plain_chunks(self) -> bool:
        """Whether the chunks of a stream have nothing but new text, between the first chunk of a
        choice and its last one."""
        asks_for_log_probs = getattr(self, "logprobs", None) not in (None, False)
        return not (asks_for_log_probs or self.return_token_ids or self.continuous_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)
