"""How conversations and rows become what is learnt."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from mtpkit.config.checked import checked
from mtpkit.errors import listed

Loss = Literal["all_turns", "last_turn"]
LongConversations = Literal["split", "cut", "drop"]
OnBadRow = Literal["stop", "skip"]
_RESERVED = frozenset(
    """
    conversation messages tools chat_template add_generation_prompt continue_final_message
    tokenize padding truncation max_length tokenizer_kwargs sanitize_control_tokens
    return_tensors return_dict return_assistant_tokens_mask
    """.split()  # noqa: SIM905 (as a list it would take one line per name)
)
"""Arguments of `apply_chat_template` that are no variables of templates."""


@checked("data options")
class DataOptions:
    """What is learnt from conversations, and what happens to rows that cannot be used."""

    loss: Loss = "all_turns"
    """Messages of the assistant that are learnt: `all_turns`, or only the last one of a
    conversation, `last_turn`. A message whose `weight`, `loss_mask`, `trainable`, `train` or `loss`
    is 0 or false is read, but never learnt."""
    sample_per_turn: bool = False
    """Make a sample of each message that is learnt, with what precedes it: for templates that drop
    the reasoning of earlier turns."""
    long_conversations: LongConversations = "split"
    """What happens to conversations, and prompts with responses, that are longer than a sequence:
    `split` into parts, of which only the first has its prompt; `cut` off the end; or `drop`. Texts
    are always split."""
    on_bad_row: OnBadRow = "stop"
    """What happens at a row that cannot be read, lacks its column, or is refused by the chat
    template: `stop`, or `skip` it. Skipped rows are counted by reason."""
    bad_rows_allowed: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of a source's rows that may be skipped; more are an error."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking`. A row's own column of this name
    takes precedence."""

    def problems(self) -> Iterator[str]:
        """Yield one clause for names that are no variables of templates."""
        if taken := reserved(self.chat_template_kwargs):
            yield (
                f"chat_template_kwargs has {listed(map(repr, taken))}, no variable of chat"
                " templates"
            )


def reserved(names: Iterable[str]) -> list[str]:
    """Those names that are arguments of `apply_chat_template` rather than variables of
    templates."""
    return [name for name in names if name in _RESERVED]


SKIPPING = "--on-bad-row skip leaves such rows out (data.on_bad_row=skip in training)"
"""The remedy for rows that cannot be used, for error messages."""
