"""Chunks of prompts: how many prompt tokens a step computes, and of which requests."""

from mtpkit.engine.requests.request import Request
from mtpkit.engine.scheduling.admission import Admission, Admitted, Room
from mtpkit.engine.scheduling.pacing import Pacing
from mtpkit.engine.steps.plan import Restore, Row

_GATHER_STEPS = 16
_GATHER_SLOTS = 8
"""Prompts gather for at most `_GATHER_STEPS` steps, while fewer than 1 / `_GATHER_SLOTS` of the
slots are free."""


class PromptRows:
    """The rows of prompts of one step, which together have at most `budget` tokens."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens that further rows may have."""
        self.chunks: list[Row] = []
        self.restores: list[Restore] = []
        self.resumed: list[Row] = []
        """Rows of requests that begin at the checkpoints of `restores`, see `Plan`."""

    def add_chunk(self, request: Request) -> None:
        """Add the next chunk of a prompt, as long as the budget allows."""
        if not self.budget:
            return
        start = request.num_computed
        length = min(self.budget, request.next_cut - start)
        ends = start + length == request.prefill_end
        row = Row(request, start, length, samples=ends, emits=not request.num_output)
        self.chunks.append(row)
        self.budget -= length

    def add_admitted(self, admitted: Admitted, without_heads: bool) -> None:
        """Add what an admitted request runs first.

        Args:
            without_heads: run no heads at a checkpoint before the request continues from there, see
                `PrefixCache.successors`.
        """
        request, restore = admitted
        if restore is not None:
            self.restores.append(restore)
        if request.num_computed and not without_heads:
            start = request.num_computed - 1
            emits = not request.num_output
            self.resumed.append(Row(request, start, 1, samples=request.decoding, emits=emits))
            self.budget -= 1
        if not request.decoding:
            self.add_chunk(request)

    def sort(self) -> None:
        """Put rows that sample first, as `Plan` has them; the order of arrival stays otherwise."""
        self.chunks.sort(key=lambda row: not row.samples)
        self.resumed.sort(key=lambda row: not row.samples)


class PromptBudget:
    """Bounds the prompt tokens of steps, and lets prompts gather.

    While more requests wait than slots are free, prompts are held back for some steps, until they
    fill a step or many slots are free. A longer step takes less time per prompt token, so that all
    of these prompts end sooner.

    Args:
        pacing: bounds the prompt tokens of a step; None: the token budget alone bounds them, and
            prompts do not gather.
    """

    def __init__(self, admission: Admission, pacing: Pacing | None) -> None:
        self.admission = admission
        self.pacing = pacing
        self._steps_gathered = [0] * admission.config.num_batches
        """For each batch, for how many steps its prompts have been held back."""

    def limit(self, decode: list[Row], begun: list[Request], room: Room) -> int | None:
        """Most prompt tokens of a step according to pacing; None without pacing.

        Args:
            decode: the step's decode rows.
            begun: running requests of the batch whose prompts are not computed in full yet.
            room: room of the batch for more requests.
        """
        if self.pacing is None:
            return None
        return self.pacing.most_tokens(
            self._left_by(decode),
            len(decode),
            room.due + len(begun),
            room.crowded,
            self._decoding_elsewhere(len(decode)),
        )

    def tokens(
        self,
        batch: int,
        decode: list[Row],
        begun: list[Request],
        room: Room,
        limit: int | None,
    ) -> int:
        """Prompt tokens that a step may compute; 0 while prompts gather. See `limit`."""
        if limit is None:
            return self._left_by(decode)

        left = self._uncomputed(begun, room)
        gathers = (
            # Without decode rows, a step that holds prompts back would have no rows.
            len(decode) > 0
            and room.crowded
            and room.free * _GATHER_SLOTS < len(self.admission.slots_of(batch))
            and left < limit
            and self._steps_gathered[batch] < _GATHER_STEPS
        )
        if not gathers:
            self._steps_gathered[batch] = 0
            return limit
        if left:
            self._steps_gathered[batch] += 1
        return 0

    def _left_by(self, decode: list[Row]) -> int:
        """What decode rows leave of the token budget."""
        used = sum(row.length for row in decode)
        return self.admission.config.max_num_batched_tokens - used

    def _decoding_elsewhere(self, num_decode_rows: int) -> int:
        """Mean number of decoding requests of each other batch, which a step without decode rows
        delays; 0 for other steps."""
        if num_decode_rows:
            return 0
        others = max(1, self.admission.config.num_batches - 1)
        return -(-self.admission.num_ready_to_decode // others)

    def _uncomputed(self, begun: list[Request], room: Room) -> int:
        """Prompt tokens that a step without bounds would compute."""
        left = sum(request.prefill_end - request.num_computed for request in begun)
        admissible = self.admission.waiting[: room.num_admissible]
        return left + sum(len(request.token_ids) for request in admissible)
