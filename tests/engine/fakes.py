"""Small stand-ins for a model and its heads, which go through the engine's real caches and
interfaces."""

import random
from collections.abc import Callable
from contextlib import nullcontext

import torch

from mtpkit.engine import Engine, EngineConfig, SamplingParams
from mtpkit.engine.device.checkpoints import CheckpointStore
from mtpkit.engine.device.runner import StepRunner
from mtpkit.engine.drafting import NoDrafter
from mtpkit.engine.drafting.growth import Shape
from mtpkit.engine.requests.tree import Tree
from mtpkit.engine.scheduling.decision import Decision
from mtpkit.engine.scheduling.scheduler import Scheduler
from mtpkit.engine.steps.plan import Drafts, HeadSpan, Plan, StepOutput
from mtpkit.engine.steps.sampler import TOKEN_STREAM
from mtpkit.kernels import sampling
from mtpkit.model.state import Part, ReplaySpec, SnapshotSpec, StateLayout, StateSizes
from tests.engine.planned import planned_rows

CPU = torch.device("cpu")
MODULUS = 1_000_003


def extend_hash(value: int, token_id: int) -> int:
    return (value * 31 + token_id + 1) % MODULUS


class HashModel:
    """Logits are a table row chosen by a hash of all tokens up to a position."""

    def __init__(self, vocab_size: int = 11, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.table = torch.randn(509, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2

    def logits(self, values: list[int]) -> torch.Tensor:
        return self.table[[value % 509 for value in values]]

    def next_token(self, token_ids: list[int]) -> int:
        value = 0
        for token_id in token_ids:
            value = extend_hash(value, token_id)
        return int(self.logits([value]).argmax())

    @torch.inference_mode()
    def choices(self, prompt: list[int], output: list[int], params: SamplingParams) -> list[int]:
        """The token that each one of an output had to be, given those before it: `decode`, all at
        once."""
        value = 0
        values = []
        for token_id in [*prompt, *output]:
            value = extend_hash(value, token_id)
            values.append(value)
        logits = self.logits(values[len(prompt) - 1 : -1])
        if params.has_penalties:
            earlier = torch.nn.functional.one_hot(torch.tensor(output), self.vocab_size).cumsum(0)
            counts = torch.cat([torch.zeros_like(earlier[:1]), earlier[:-1]])
            logits = self._penalties(logits, prompt, counts, params)
        if params.greedy:
            return logits.argmax(-1).tolist()
        temperature = torch.full((len(output),), params.temperature)
        places = torch.arange(len(prompt), len(prompt) + len(output))
        numbers = sampling.uniform(torch.full_like(places, params.seed or 0), places, TOKEN_STREAM)
        return sampling.sample(sampling.probabilities(logits, temperature), numbers).tolist()

    def check(
        self,
        prompt: list[int],
        output: list[int],
        params: SamplingParams,
        eos: tuple[int, ...] = (),
    ) -> None:
        """Compare an output with what `decode` returns, without decoding.

        Raises:
            AssertionError: they differ.
        """
        assert output, "no tokens"
        want = self.choices(prompt, output, params)
        assert output == want, f"{output} where {want} was right, each given those before it"
        ends = [
            index
            for index, token_id in enumerate(output, 1)
            if token_id in (*eos, *params.stop_token_ids)
        ]
        last = min([*ends[:1], params.max_tokens])
        assert len(output) == last, (
            f"{len(output)} tokens, the last of which had to be number {last}"
        )

    def _penalties(
        self, logits: torch.Tensor, prompt: list[int], counts: torch.Tensor, params: SamplingParams
    ):
        """[N, V] logits of one request, whose outputs so far have [N, V] counts."""
        seen = torch.zeros(len(counts), self.vocab_size, dtype=torch.bool)
        seen[:, prompt] = True
        weights = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        numbers = (torch.full((len(counts),), float(weight)) for weight in weights)
        rows = torch.arange(len(counts))
        return sampling.apply_penalties(
            logits, seen, counts, *numbers, rows, torch.zeros(0, 0, dtype=torch.int64)
        )

    def _penalised(
        self, logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
    ):
        counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=self.vocab_size)[
            None
        ]
        return self._penalties(logits, prompt, counts, params)

    def decode(
        self,
        prompt: list[int],
        params: SamplingParams,
        eos: tuple[int, ...] = (),
        rules: Callable[[torch.Tensor, list[int]], torch.Tensor] = lambda logits, output: logits,
    ) -> list[int]:
        """Decode without an engine: one token at a time from the whole sequence.

        Args:
            rules: changes logits [V], given the output so far, before penalties.
        """
        tokens = list(prompt)
        value = 0
        for token_id in prompt:
            value = extend_hash(value, token_id)
        while True:
            temperature = torch.tensor([0.0 if params.greedy else params.temperature])
            output = tokens[len(prompt) :]
            ruled = rules(self.logits([value])[0], output)[None]
            logits = self._penalised(ruled, prompt, output, params)
            probs = sampling.probabilities(logits, temperature)
            numbers = sampling.uniform(
                torch.tensor([params.seed or 0]), torch.tensor([len(tokens)]), TOKEN_STREAM
            )
            tokens.append(int(sampling.sample(probs, numbers)))
            value = extend_hash(value, tokens[-1])
            output = tokens[len(prompt) :]
            if tokens[-1] in (*eos, *params.stop_token_ids) or len(output) == params.max_tokens:
                return output


HASH_SPECS = {"hash": (ReplaySpec((), {"token": Part((), torch.int64)}), SnapshotSpec(()))}


class StandIn(StepRunner):
    """A runner without a model, which is neither captured nor one of several stages."""

    hidden_size = 1

    def shortened(self):
        return nullcontext()

    def receive(self, tokens: int) -> None:
        pass


class HashRunner(StandIn):
    """`HashModel` over caches of its own: pages of tokens, a snapshot a token, and a state with a
    ring behind it.

    All three must tell the same history. What the step must not read is broken before it.
    """

    def __init__(
        self, model: HashModel, num_blocks: int, num_slots: int, layout: StateLayout
    ) -> None:
        self.ring, self.newest = layout.counters
        self.model = model
        self.block_size = layout.sizes.block_size
        self.ring_length = self.ring.length
        self.pages = [None] * (num_blocks * self.block_size)
        self.snapshots = [[None] * layout.sizes.decode_width for _ in range(num_slots)]
        self.states = [None] * num_slots
        self.rings = [[None] * self.ring_length for _ in range(num_slots)]

    def run(self, batch) -> StepOutput:
        inputs = batch.inputs
        if batch.resumed_hidden is not None:
            known = batch.resumed_hidden[batch.logit_indices, 0, 0].tolist()
            return StepOutput(self.model.logits(list(map(int, known))), batch.resumed_hidden)
        tokens = batch.token_ids.tolist()
        for kv_slot, token_id in zip(inputs.kv_slots.tolist(), tokens, strict=True):
            if kv_slot >= 0:
                self.pages[kv_slot] = token_id
        values = []
        ring_lens = inputs.committed.counts[self.ring]
        stays = []
        for group in inputs.decode_groups:
            stays += self.ring.after(ring_lens[group.rows], group.width, 0).tolist()
        chain = torch.arange(-1, inputs.decode_width - 1).expand(inputs.num_decode_rows, -1)
        trees = (chain if inputs.tree is None else inputs.tree.parents.expand_as(chain)).tolist()
        for row, slot in enumerate(inputs.state_slots.tolist()):
            start, end = inputs.query_start[row : row + 2].tolist()
            decoding = row < inputs.num_decode_rows
            if slot < 0:  # a request that has ended
                values += [0] * (end - start)
                continue
            parents = trees[row][: end - start] if decoding else range(-1, end - start - 1)
            values += self._row(
                inputs, row, slot, tokens[start:end], parents, stays[row] if decoding else None
            )
        hidden = torch.tensor(values, dtype=torch.float32)
        return StepOutput(
            self.model.logits([values[i] for i in batch.logit_indices.tolist()]),
            hidden[:, None, None],
        )

    def _row(
        self, inputs, row: int, slot: int, tokens: list[int], parents, base: int | None
    ) -> list[int]:
        context = int(inputs.context_lens[row])
        table = inputs.block_tables[row].tolist()
        paged = 0
        for position in range(context):
            token_id = self.pages[
                table[position // self.block_size] * self.block_size + position % self.block_size
            ]
            paged = extend_hash(paged, token_id)
        if context:
            snapshot = self.snapshots[slot][int(inputs.committed.counts[self.newest][row])]
            replayed = self.states[slot]
            for position in range(context - int(inputs.committed.counts[self.ring][row]), context):
                replayed = extend_hash(replayed, self.rings[slot][position % self.ring_length])
            assert paged == snapshot == replayed, (paged, snapshot, replayed)
        values = []
        for index, (token_id, parent) in enumerate(zip(tokens, parents, strict=True)):
            values.append(extend_hash(paged if parent < 0 else values[parent], token_id))
            if base is not None:
                self.snapshots[slot][index] = values[-1]
        if base is None:
            self.snapshots[slot][0] = self.states[slot] = values[-1] if values else paged
        else:
            if base == 0 and int(inputs.committed.counts[self.ring][row]):
                self.states[slot] = replayed
            for position, token_id in enumerate(tokens, context):
                self.rings[slot][position % self.ring_length] = token_id
        return values

    def keep_path(self, batch, verdict) -> None:
        """Move what was written of the accepted tokens of trees to where a chain has them."""
        inputs = batch.inputs
        for row, path in enumerate(verdict.path.tolist()):
            slot = int(inputs.state_slots[row])
            context = int(inputs.context_lens[row])
            places = inputs.kv_slots[row * inputs.decode_width :].tolist()
            for to in range(1, int(verdict.accepted[row]) + 1) if slot >= 0 else ():
                self.pages[places[to]] = self.pages[places[path[to]]]
                self.snapshots[slot][to] = self.snapshots[slot][path[to]]
                ring = self.rings[slot]
                length = self.ring_length
                ring[(context + to) % length] = ring[(context + path[to]) % length]

    def fold(self, states, slots, context_lens, committed, noise_keys) -> None:
        """Bring both histories of slots to where a chunk leaves them."""
        counts = (committed.counts[self.newest].tolist(), committed.counts[self.ring].tolist())
        for slot, end, newest, count in zip(
            slots.tolist(), context_lens.tolist(), *counts, strict=True
        ):
            self.snapshots[slot][0] = self.snapshots[slot][newest]
            for position in range(end - count, end):
                self.states[slot] = extend_hash(
                    self.states[slot], self.rings[slot][position % self.ring_length]
                )

    def forget(self, blocks: list[int], slots: list[int]) -> None:
        """Break what nobody holds."""
        size = self.block_size
        nothing = [None] * self.block_size
        for block in blocks:
            self.pages[block * size : (block + 1) * size] = nothing
        for slot in slots:
            self.states[slot] = None
            self.snapshots[slot] = [None] * len(self.snapshots[slot])
            self.rings[slot] = [None] * self.ring_length


class KnownTokens:
    """All tokens of each slot's request, from what the steps fed and chose: the host may be a step
    behind."""

    def __init__(self) -> None:
        self._by_slot: dict[int, list[int]] = {}

    def move(self, old: int, new: int) -> None:
        """A request goes to another slot."""
        self._by_slot[new] = self._by_slot.pop(old)

    def of(self, slot: int) -> list[int]:
        """All tokens of a slot's request after the step."""
        return list(self._by_slot[slot])

    def after(self, batch, verdict) -> list[list[int]]:
        """The tokens of each row that samples, after the step. Called once a step."""
        for row, planned in enumerate(planned_rows()):
            slot = int(batch.inputs.state_slots[row])
            accepted = int(verdict.accepted[row])
            token_ids = verdict.token_ids[row].tolist()
            if slot < 0:  # a request that has ended
                self._by_slot[slot] = []
                continue
            if row < batch.shape.decode_rows:
                known = self._by_slot[slot] + token_ids[: accepted + 1]
            else:
                known = planned.request.token_ids[: planned.start + planned.length]
                known += token_ids[:1] if row < batch.shape.sampling_rows else []
            self._by_slot[slot] = known
        slots = batch.inputs.state_slots[: batch.shape.sampling_rows].tolist()
        return [list(self._by_slot[slot]) for slot in slots]


class RuleDrafter:
    """The best draft is what `rule(tokens so far)` says, the others of a tree are the tokens before
    that one."""

    span = HeadSpan(after=1)

    def __init__(
        self, rule: Callable[[list[int]], int], depths: int, vocab_size: int, tree: Tree | None
    ) -> None:
        self.rule, self.depths, self.vocab_size, self.known = (
            rule,
            depths,
            vocab_size,
            KnownTokens(),
        )
        self.shape = Shape(tree, CPU) if tree else None

    def draft(self, hidden, batch, verdict) -> Drafts:
        known = self.known.after(batch, verdict)
        if batch.shape.trees and known:
            return self._trees(known)
        depths = batch.shape.num_speculative_tokens
        rows = []
        for tokens in known:
            for _ in range(depths):
                tokens.append(self.rule(tokens))
            rows.append(tokens[len(tokens) - depths :])
        return Drafts(torch.tensor(rows, dtype=torch.int64).view(len(rows), depths))

    def _trees(self, known: list[list[int]]) -> Drafts:
        """Where the shape is not given, trees that differ from row to row."""
        growth = self.shape.start()
        fronts = [[tokens] for tokens in known]
        for width in self.shape.widths:
            tokens = [[self._children(path, width) for path in front] for front in fronts]
            chances = [[self._chances(path, width) for path in front] for front in fronts]
            growth.add(torch.tensor(tokens), torch.tensor(chances))
            if growth.depth <= self.depths:
                level = growth.levels[-1]
                rows = zip(fronts, level.tokens.tolist(), level.above.tolist(), strict=True)
                fronts = [
                    [[*front[a], t] for t, a in zip(ts, above, strict=True)]
                    for front, ts, above in rows
                ]
        token_ids, parents = growth.drafts()
        return Drafts(token_ids, None, parents, growth.best())

    def _children(self, path: list[int], count: int) -> list[int]:
        best = self.rule(path)
        return [(best - rank) % self.vocab_size for rank in range(count)]

    @staticmethod
    def _chances(path: list[int], count: int) -> list[float]:
        """Log-probabilities of the children, which are drawn."""
        rng = random.Random(sum(path))
        return sorted((-2 * rng.random() for _ in range(count)), reverse=True)


class HashStore(CheckpointStore):
    """Checkpoints of the histories of a `HashRunner`, and of the heads' entries of a
    `HeadDrafter`."""

    def __init__(self, engine: Engine) -> None:
        config = engine.config
        count = config.num_checkpoints
        fold = engine.executor.runner.fold
        super().__init__(
            engine.layout, engine.executor.states, engine.executor.state, count, torch.float32, fold
        )
        self.engine = engine
        self.kept = [None] * count

    def save(self, saves) -> None:
        super().save(saves)
        runner = self.engine.executor.runner
        for one in saves:
            self.kept[one.checkpoint] = (runner.states[one.slot], runner.snapshots[one.slot][0])

    def restore(self, restores) -> None:
        super().restore(restores)
        runner = self.engine.executor.runner
        size = self.engine.config.block_size
        pairs = [pair for one in restores for pair in one.blocks]
        for pages in (runner.pages, getattr(self.engine.executor.drafter, "entries", [])):
            blocks = [pages[old * size : (old + 1) * size] for old, _ in pairs]
            for (_, new), block in zip(pairs, blocks, strict=True):
                pages[new * size : new * size + len(block)] = block
        for one in restores:
            runner.states[one.slot], runner.snapshots[one.slot][0] = self.kept[one.checkpoint]


class HeadDrafter(RuleDrafter):
    """A `RuleDrafter` whose heads have an entry for each position j, made of all tokens up to j + 1
    + `before`.

    Entries must be right for all positions up to `before` ones before a step. Those are made again
    by each step, which needs their tokens and the base's hidden states.
    """

    def __init__(
        self,
        runner: HashRunner,
        rule: Callable[[list[int]], int],
        config: EngineConfig,
        before: int,
    ) -> None:
        super().__init__(rule, config.num_speculative_tokens, runner.model.vocab_size, config.tree)
        self.runner = runner
        self.block_size = config.block_size
        self.entries = [None] * len(runner.pages)
        self.span = HeadSpan(before, before + 1, runner.hidden_size)

    def draft(self, hidden, batch, verdict) -> Drafts:
        if verdict.path is not None:
            self.runner.keep_path(batch, verdict)
        drafts = super().draft(hidden, batch, verdict)
        inputs = batch.inputs
        before = self.span.before
        for row, slot in enumerate(inputs.state_slots.tolist()):
            if slot < 0:
                continue
            start, end = inputs.query_start[row : row + 2].tolist()
            tokens = self.known.of(slot)
            if row >= batch.shape.sampling_rows:
                tokens += [token for token in batch.lookahead[row].tolist() if token >= 0]
            table = inputs.block_tables[row].tolist()
            context = int(inputs.context_lens[row])
            self._check_earlier(batch, row, tokens[:context])
            for position in range(context + end - start):
                place = (
                    table[position // self.block_size] * self.block_size
                    + position % self.block_size
                )
                right = (
                    hash(tuple(tokens[: position + 2 + before]))
                    if position + 1 + before < len(tokens)
                    else None
                )
                if position < context - before:
                    assert self.entries[place] == right, (position, context)
                self.entries[place] = right
        return drafts

    def _check_earlier(self, batch, row: int, tokens: list[int]) -> None:
        """What the step has of the positions before it, whose `tokens` are given."""
        index = -torch.arange(1, min(self.span.before, len(tokens)) + 1)
        rows = torch.full_like(index, row)
        values = [0]
        for token_id in tokens:
            values.append(extend_hash(values[-1], token_id))
        assert batch.token_ids_at(rows, index).tolist() == [
            tokens[place] for place in index.tolist()
        ]
        hidden = batch.hidden_at(rows, index, torch.full((len(batch.token_ids), 1, 1), torch.nan))
        assert hidden[:, 0].tolist() == [values[place] for place in index.tolist()]


def make_rule(model: HashModel, kind: str) -> Callable[[list[int]], int]:
    """A rule that is never, always or sometimes right."""
    wrong_every = {"never": 1, "always": 0, "sometimes": 3}[kind]

    def rule(tokens: list[int]) -> int:
        wrong = wrong_every and sum(tokens) % wrong_every == 0
        return (model.next_token(tokens) + bool(wrong)) % model.vocab_size

    return rule


def state_sizes(config: EngineConfig, dtype: torch.dtype = torch.float32) -> StateSizes:
    """What states are made by."""
    return StateSizes(config.block_size, config.decode_width, config.state_rollback, dtype)


def fake_engine(
    model: HashModel,
    drafts: str = "sometimes",
    num_blocks: int = 64,
    eos=(),
    tokenizer=None,
    before: int = 0,
    **settings,
) -> Engine:
    """An engine over a `HashModel`; `before`: see `HeadDrafter`."""
    config = EngineConfig(**{"max_model_len": 1000, "max_num_seqs": 4, "block_size": 4, **settings})
    layout = StateLayout(HASH_SPECS, state_sizes(config))
    runner = HashRunner(model, num_blocks, config.max_num_seqs, layout)
    heads = config.num_speculative_tokens > 0
    drafter = (
        HeadDrafter(runner, make_rule(model, drafts), config, before) if heads else NoDrafter()
    )
    engine = Engine(
        config, layout, num_blocks, runner, drafter, model.vocab_size, CPU, tokenizer, eos
    )
    if engine.executor.checkpoints:
        engine.executor.checkpoints = HashStore(engine)
    return engine


def check_batches(scheduler: Scheduler) -> list[int]:
    """Check each further plan: all its rows are of one batch, that of their slots.

    Returns:
        A list that gets the batch of each step.
    """
    plan = scheduler.plan
    steps = list[int]()
    count = scheduler.config.num_batches

    def checked(decision: Decision) -> list[Plan]:
        plans = plan(decision)
        slots = [row.request.slot for one in plans for row in one.rows]
        slots += [restore.slot for one in plans for restore in one.restores]
        batches = {one.batch for one in plans}
        assert {slot % count for slot in slots} == batches and len(batches) == bool(plans)
        steps.extend(batches)
        return plans

    scheduler.plan = checked
    return steps


def run(engine: Engine) -> dict:
    """All finished outputs by request id."""
    finished = {}
    while engine.has_unfinished:
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return finished
