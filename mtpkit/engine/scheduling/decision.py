"""What a step depends on besides requests and results."""

from dataclasses import dataclass

from mtpkit.engine.requests.tree import DraftShape


@dataclass(frozen=True)
class Decision:
    """What the requests and the results of earlier steps leave open about a step.

    It follows from measured times, which differ between ranks. Rank 0 therefore decides, by
    `adaptive.py` and `pacing.py`, and all ranks plan by its decision.
    """

    drafts: DraftShape
    """Drafts of the decode rows, see `Plan.drafts`."""
    short: tuple[int, int] = (0, 0)
    """Number of the decode rows that verify fewer drafts, and how many drafts each verifies. They
    are those of the requests whose drafts are accepted least often."""
    prompt_tokens: int | None = None
    """Most prompt tokens of the step. None: the pacing of the rank that plans bounds them, or the
    token budget alone if there is no pacing."""
