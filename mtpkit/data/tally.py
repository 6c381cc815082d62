"""Counts of the documents of a source while they are made, and what is said of those that are left
out."""

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from mtpkit.data.documents import Document, describe
from mtpkit.data.options import DataOptions
from mtpkit.errors import UserError, listed

logger = logging.getLogger(__name__)

NUMBERS = ("num_documents", "num_rows", "num_bad_rows", "num_long", "num_empty_answers")
"""The counts of a `Tally` to which documents add, in the order of `numbers_of`."""
_MOST_REASONS = 20
"""Most reasons that are counted one by one."""


@dataclass
class Tally:
    """Counts of the documents of a source."""

    source: str
    num_documents: int = 0
    num_rows: int = 0
    """Rows that the documents come from."""
    num_bad_rows: int = 0
    """Rows that cannot be used."""
    num_long: int = 0
    """Conversations, and prompts with responses, that are longer than a sequence."""
    num_empty_answers: int = 0
    """Answers and texts without any text, which are not learnt."""
    left_out: list[str] = field(default_factory=list)
    """`describe` of each document of which nothing is learnt."""
    _reasons: Counter[str] = field(default_factory=Counter)
    _bad: Counter[str] = field(default_factory=Counter)
    _first_bad: str = ""

    def count(self, numbers: Mapping[str, int]) -> None:
        """Add the `numbers_of` one or more documents."""
        for name, number in numbers.items():
            setattr(self, name, getattr(self, name) + number)

    def leave_out(self, name: str, problem: str, bad: bool) -> None:
        """Note a document of which nothing is learnt."""
        self.left_out.append(describe(name, problem))
        reason = _reason(problem or "empty mask")
        self._reasons[reason] += 1
        # A bad row is a fault of the data; other documents may rightly have nothing to learn.
        if bad:
            self._bad[reason] += 1
            self._first_bad = self._first_bad or self.left_out[-1]

    @property
    def reasons(self) -> dict[str, int]:
        """How many documents are left out for each reason, the most frequent first."""
        most = dict(self._reasons.most_common(_MOST_REASONS))
        # Reasons may hold text of the data, so their number has no bound.
        others = self._reasons.total() - sum(most.values())
        return most | ({"other reasons": others} if others else {})

    def check(self, options: DataOptions) -> None:
        """Refuse a source of which too many rows cannot be used.

        Raises:
            UserError: their share is above `bad_rows_allowed`.
        """
        if self.num_bad_rows > options.bad_rows_allowed * self.num_rows:
            raise UserError(
                f"data: {self.source}: {self.num_bad_rows} of {self.num_rows} rows cannot be used"
                f" ({_counts(self._bad)}), the first is {self._first_bad}; mend them, or allow a"
                " larger share of them with --bad-rows-allowed (data.bad_rows_allowed in training)"
            )

    def warn(self, options: DataOptions, sequence_length: int, more: str = "") -> None:
        """Warn of documents that are left out, and of those that are longer than a sequence.

        Args:
            more: a note at the end of the warning about what is left out.
        """
        if self.left_out:
            what = (
                f"{len(self.left_out)} of {self.num_documents} documents have no token to learn and"
                " are left out"
            )
            if len(self.left_out) > 1:
                more = f"; by reason: {_counts(self._reasons)}{more}"
            logger.warning("data: %s: %s%s", what, listed(self.left_out), more)
        if self.num_long:
            happens = {
                "split": "split into parts, of which only the first has its prompt",
                "cut": "cut off",
                "drop": "left out",
            }
            logger.warning(
                "data: %s: %d of %d documents are conversations longer than a sequence of %d"
                " tokens, and are %s; --long-conversations (data.long_conversations in training)"
                " says what is done with them",
                self.source,
                self.num_long,
                self.num_documents,
                sequence_length,
                happens[options.long_conversations],
            )


def numbers_of(document: Document, sequence_length: int) -> dict[str, int]:
    """What a document adds to the counts of a `Tally`."""
    numbers = (
        1,
        int(document.opens_row),
        int(document.bad),
        int(document.is_long(sequence_length)),
        document.num_empty_answers,
    )
    return dict(zip(NUMBERS, numbers, strict=True))


def _reason(problem: str) -> str:
    """What is wrong, without what differs from row to row."""
    return re.sub(r"\d+", "N", re.split(r"[:;]", problem)[0])


def _counts(reasons: Counter[str]) -> str:
    return listed(f"{number} {reason}" for reason, number in reasons.most_common())
