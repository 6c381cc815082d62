"""Engines with and without a prefix cache, run on the same prompts and compared in tokens, logits
and drafts."""

import torch

from mtpkit.engine import LLM
from tests.engine.fakes import KnownTokens
from tests.engine.tiny import generate, greedy, make_llm

TOLERANCE = 1e-5


class Observed:
    """Notes the logits that chose each token, the drafts after it and what each depth chose them
    from, by all tokens up to there."""

    def __init__(self, llm: LLM) -> None:
        self.logits: dict[tuple, torch.Tensor] = {}
        self.drafts: dict[tuple, list[int]] = {}
        self.states: dict[tuple, torch.Tensor] = {}
        self.known: list[list[int]] = []
        self._tokens = KnownTokens()
        engine = llm.engine
        self._verify = engine.executor.verifier
        self._drafter = engine.executor.drafter
        engine.executor.verifier = self.verify
        engine.executor.drafter = self
        heads = getattr(self._drafter, "inner", self._drafter)
        if hasattr(heads, "grow"):
            self._grow = heads.grow
            heads.grow = self.grow
        elif hasattr(heads, "choose"):
            self._choose = heads.choose
            heads.choose = self.choose

    def verify(self, logits, batch):
        verdict = self._verify(logits, batch)
        self.known = self._tokens.after(batch, verdict)
        decoding = batch.shape.decode_rows
        width = batch.inputs.decode_width
        for row, known in enumerate(self.known):
            if not known:  # its request has ended
                continue
            newest = int(verdict.accepted[row])
            if row < decoding and verdict.path is not None:
                newest = int(verdict.path[row, newest])
            place = row * width + newest if row < decoding else decoding * (width - 1) + row
            self.logits[tuple(known)] = logits[place].clone()
        return verdict

    def choose(self, state, depth, batch, newest):
        for known, one in zip(self.known, state, strict=True):
            if known:
                self.states[(*known, -depth)] = one.clone()
        return self._choose(state, depth, batch, newest)

    def grow(self, growth, state, batch, newest, probs):
        for known, drafts in zip(self.known, state.unflatten(0, (len(newest), -1)), strict=True):
            for place, one in enumerate(drafts if known else ()):
                self.states[(*known, -growth.depth, place)] = one.clone()
        return self._grow(growth, state, batch, newest, probs)

    def draft(self, hidden, batch, verdict):
        drafts = self._drafter.draft(hidden, batch, verdict)
        for known, token_ids in zip(self.known, drafts.token_ids.tolist(), strict=True):
            if known:
                self.drafts[tuple(known)] = token_ids
        return drafts


class Pair:
    """The same model with the cache off and on."""

    def __init__(self, model, k: int, wrap=lambda llm: llm, **settings) -> None:
        self.cached = {
            name: settings.pop(name) for name in list(settings) if name.startswith("prefix_cache")
        }
        self.off = wrap(make_llm(model, k, **settings))
        self.on = wrap(make_llm(model, k, enable_prefix_caching=True, **settings, **self.cached))
        self.seen = [Observed(self.off), Observed(self.on)]

    def run(self, prompts, params=None, together: bool = True) -> list[list[int]]:
        """Outputs of the prompts, which must be the same; `together`: all at once."""
        groups = [prompts] if together else [[prompt] for prompt in prompts]
        params = params or greedy()
        off, on = (
            [one for group in groups for one in generate(llm, group, params)]
            for llm in (self.off, self.on)
        )
        assert on == off
        return off

    def check(self, tolerance: float = TOLERANCE) -> None:
        """What was seen of both is the same: logits and states of the heads within the tolerance of
        the largest, log-probs within the tolerance itself, drafts and what was accepted of them
        exactly."""
        off, on = self.seen
        for have, want in ((on.logits, off.logits), (on.states, off.states)):
            assert have.keys() <= want.keys()
            worst = max(
                (float((have[known] - want[known]).abs().max()) for known in have), default=0
            )
            scale = max((float(one.abs().max()) for one in want.values()), default=0)
            assert worst <= tolerance * scale, f"logits or states differ by {worst} of {scale}"
        differences = (
            on.logits[known].log_softmax(-1) - off.logits[known].log_softmax(-1)
            for known in on.logits
        )
        worst = max((float(one.abs().max()) for one in differences), default=0)
        assert worst <= tolerance, f"log-probs differ by {worst}"
        acceptance = [llm.stats().acceptance for llm in (self.off, self.on)]
        assert acceptance[0] == acceptance[1], acceptance
        wrong = [known for known in on.drafts if on.drafts[known] != off.drafts[known]]
        assert not wrong, f"{len(wrong)} of {len(on.drafts)} drafts differ"

    @property
    def hits(self) -> int:
        """Tokens that were not computed."""
        return self.on.stats().cached_tokens


def multi_turn(pair: Pair, start: list[int], turns: int, params=None, added: int = 3) -> list[int]:
    """A conversation, which is returned: each turn's prompt is all of the last turn and a few
    tokens."""
    history = list(start)
    for turn in range(turns):
        (output,) = pair.run([history], params)
        history = history + output + [(7 * turn + i) % 61 for i in range(added)]
    return history
