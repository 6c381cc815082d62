"""Random histories of an engine with a prefix cache over a hash model, every read of which checks
the whole past.

`python -m tests.engine.prefix.fuzz --operations 100000` from the root of the repository, on all
cores; a share of it runs in the suite. An operation is an arrival (of a new prompt, one that shares
a prefix with an earlier one, or one that goes on where an output ended), a step, or an abort. After
each one the allocators are compared with their holders, and what nobody holds is broken. The tokens
are those of a decoder without caches, and a request finds the longest checkpoint that a plain list
of all of them has.
"""

import argparse
import math
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace

import torch
from tqdm import tqdm

from mtpkit.engine import SamplingParams
from mtpkit.engine.requests.tree import DynamicTree, parse_tree
from mtpkit.engine.scheduling.prefix_cache import PrefixCache
from tests.engine.fakes import HashModel, check_batches, fake_engine

MODEL = HashModel()
EOS = 0
TREES = [
    *map(parse_tree, ([2, 1], [2, 2], [1, 3], [3, 2, 1])),
    DynamicTree(2, 2, 5),
    DynamicTree(3, 3, 9),
]
_OPERATIONS_PER_ENGINE = 120
_OPERATIONS_PER_SHARE = 1000
_MOST_OUTPUT = 18


class PlainIndex:
    """All checkpoints as lists of tokens, beside the index under test."""

    def __init__(self, prefix: PrefixCache) -> None:
        self.prefix = prefix
        self.tokens = {}
        keep = prefix.keep
        match = prefix.match

        def kept(request, length, decoded=False):
            save = keep(request, length, decoded)
            if save is not None:
                self.tokens[save.checkpoint] = list(request.token_ids[:length])
            return save

        def matched(request):
            hit = match(request)
            held = [i for i in range(prefix.slots.size) if i not in prefix.slots.free_ids]
            tokens = request.token_ids[: request.prefill_end]
            found = [
                len(self.tokens[i]) for i in held if tokens[: len(self.tokens[i])] == self.tokens[i]
            ]
            longest = max(found, default=0)
            length = 0 if hit is None else hit.length
            assert length <= longest, "what no checkpoint has was found"
            assert length == longest or prefix.blocks.num_evicted, "a checkpoint was not found"
            return hit

        prefix.keep = kept
        prefix.match = matched


class History:
    """One engine, its requests, and what has become of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        tree = rng.choice([None, None, rng.choice(TREES)])
        self.block_size, self.k = (
            rng.choice([1, 2, 3, 4, 8]),
            tree.depth if tree else rng.choice([0, 1, 2, 3, 5]),
        )
        self.most = rng.choice([16, 24, 50])
        width = tree.tokens if tree else self.k
        longest = self.most + _MOST_OUTPUT + 2 * width
        self.engine = fake_engine(
            MODEL,
            rng.choice(["never", "sometimes", "always"]),
            -(-longest // self.block_size) + rng.choice([0, 0, 1, 3, 6, 30, 200]),
            eos=(EOS,),
            before=rng.choice([0, max(0, self.k - 1)]),
            num_speculative_tokens=self.k,
            tree=tree,
            block_size=self.block_size,
            max_num_seqs=rng.randint(1, 4),
            max_num_batched_tokens=max(width, rng.choice([6, 12, 40, 200])),
            max_mixed_tokens=rng.choice([0, 7, 100]),
            async_scheduling=rng.random() < 0.5,
            num_batches=rng.randint(1, 3),
            enable_prefix_caching=True,
            num_checkpoints=rng.choice([0, 1, 4, 8, 30, 30]),
            prefix_cache_interval=rng.choice([8, 16, 1000]),
        )
        check_batches(self.engine.scheduler)
        if rng.random() < 0.3:  # another K in each step, or the tree
            shapes = [*range(self.k + 1), *([tree] * (self.k + 1) if tree else [])]
            self.engine.speculation.choose = lambda rows: rng.choice(shapes)
        # What no request of a batch asks for costs nothing.
        self.temperature, self.penalty = rng.choice([0.0, 0.0, 0.8]), rng.choice([1.0, 1.0, 1.4])
        self.oracle = PlainIndex(self.engine.scheduler.prefix)
        self.known = [[rng.randrange(MODEL.vocab_size) for _ in range(n)] for n in (3, 17)]
        """Prompts and what followed them."""
        self.live: dict[str, tuple[list[int], SamplingParams]] = {}
        self.outputs: dict[str, dict[int, list[int]]] = {}
        """The tokens so far of all outputs of live prompts."""
        self.cut: dict[tuple[str, int], int] = {}
        """Lengths of outputs that were aborted alone, of live prompts."""
        self.count = self.hits = 0

    def num_outputs(self) -> int:
        """Outputs of the next prompt."""
        return 1

    def arrive(self) -> None:
        rng = self.rng
        past = self.rng.choice(self.known)
        kept = past[: rng.choice([0, len(past), len(past) - 1, rng.randint(0, len(past))])]
        more = rng.choice([0, 1, 1, rng.randint(0, 12)])
        prompt = (kept + [rng.randrange(1, MODEL.vocab_size) for _ in range(more)])[
            : self.most
        ] or [1]
        params = SamplingParams(
            n=self.num_outputs(),
            max_tokens=rng.randint(1, _MOST_OUTPUT),
            temperature=rng.choice([0.0, self.temperature]),
            seed=rng.randrange(5),
            stop_token_ids=rng.choice([(), (), (), (3,), (2, 4, 6)]),
            ignore_eos=rng.random() < 0.6,
            repetition_penalty=rng.choice([1.0, self.penalty]),
        )
        name = str(self.count)
        self.count += 1
        at = rng.choice([None, None, rng.randint(1, len(prompt))])
        self.engine.add_request(prompt, params, name, checkpoint_at=at)
        self.live[name] = (prompt, params)

    def step(self) -> None:
        if not self.engine.has_unfinished:
            return
        for output in self.engine.step():
            tokens = self.outputs.setdefault(output.request_id, {})
            tokens |= {one.index: one.token_ids for one in output.outputs}
            for one in output.outputs:
                if one.finish_reason == "abort":
                    self.cut[output.request_id, one.index] = len(one.token_ids)
            if output.finished:
                prompt, params = self.live.pop(output.request_id)
                assert sorted(self.outputs.pop(output.request_id)) == list(range(params.n))
                for index, got in tokens.items():
                    own = replace(params, seed=params.seed + index)
                    if (length := self.cut.pop((output.request_id, index), None)) is not None:
                        if not length:
                            continue
                        own = replace(own, max_tokens=length)
                    MODEL.check(prompt, got, own, () if params.ignore_eos else (EOS,))
                got = tokens[0]
                if output.num_cached_tokens is None:
                    assert not any(tokens.values()), "all were aborted before they ran"
                    continue
                assert 0 <= output.num_cached_tokens <= len(prompt)
                self.hits += output.num_cached_tokens
                self.known = [*self.known[-12:], prompt + got]

    def abort(self) -> None:
        if self.live:
            name = self.rng.choice([*self.live])
            self.engine.abort(name)
            del self.live[name]
            self.outputs.pop(name, None)

    def operate(self) -> None:
        """One operation, and the checks after it."""
        operation = self.rng.choices(
            [self.arrive, self.step, self.abort], [4 if len(self.live) < 6 else 0, 12, 0.5]
        )
        operation[0]()
        self.check()

    def check(self) -> None:
        scheduler = self.engine.scheduler
        runner = self.engine.executor.runner
        scheduler.check_integrity()
        free = scheduler.blocks.free_ids
        slots = scheduler.slots.free_ids
        runner.forget(free, slots)
        earlier = self.engine.executor.state.earlier
        earlier.hidden[slots], earlier.token_ids[slots] = math.nan, -9
        size = self.block_size
        nothing = [None] * self.block_size
        for block in free if self.k else ():
            self.engine.executor.drafter.entries[block * size : (block + 1) * size] = nothing
        for checkpoint in scheduler.prefix.slots.free_ids:
            self.engine.executor.checkpoints.kept[checkpoint] = None

    def counts(self) -> Counter[str]:
        """What has happened."""
        scheduler = self.engine.scheduler
        return Counter(
            {
                "requests": self.count,
                "hits": self.hits,
                "preemptions": scheduler.admission.num_preemptions,
                "second children": sum(
                    sum(ranks[1:]) for ranks in scheduler.acceptance.ranks_per_depth
                ),
                "blocks evicted": scheduler.blocks.num_evicted,
                "checkpoints evicted": scheduler.prefix.num_evicted,
            }
        )

    def end(self) -> None:
        """Let all requests end; then nobody holds anything."""
        while self.engine.has_unfinished:
            self.step()
            self.check()
        scheduler = self.engine.scheduler
        assert not self.live and scheduler.blocks.num_free == scheduler.blocks.size
        scheduler.prefix.clear()
        assert scheduler.prefix.slots.num_free == scheduler.prefix.slots.size


def run(operations: int, seed: int | str, history_class: type[History] = History) -> Counter[str]:
    """Run so many operations, on new engines now and then; what happened is counted.

    Raises:
        Exception: the engine or its cache is wrong.
    """
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    while counts["operations"] < operations:
        history = history_class(rng)
        for _ in range(min(_OPERATIONS_PER_ENGINE, operations - counts["operations"])):
            history.operate()
            counts["operations"] += 1
        history.end()
        counts += history.counts()
    return counts


def run_share(place: tuple[int, int]) -> tuple[tuple[int, int], Counter[str] | str]:
    """Run one share of a long run; what was wrong is told as text."""
    torch.set_num_threads(1)
    try:
        return place, run(_OPERATIONS_PER_SHARE, f"{place[0]}.{place[1]}")
    except Exception:
        return place, traceback.format_exc()


def main() -> None:
    """Run shares in several processes; what they do depends on the seed alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    began = time.perf_counter()
    counts = Counter[str]()
    shares = [(given.seed, index) for index in range(-(-given.operations // _OPERATIONS_PER_SHARE))]
    with (
        multiprocessing.Pool(given.processes) as pool,
        tqdm(total=len(shares) * _OPERATIONS_PER_SHARE, desc="operations") as progress,
    ):
        for (seed, index), found in pool.imap_unordered(run_share, shares):
            if isinstance(found, str):
                sys.exit(f"{found}\nfound by run({_OPERATIONS_PER_SHARE}, '{seed}.{index}')")
            counts += found
            progress.update(_OPERATIONS_PER_SHARE)
    print(dict(counts), f"{time.perf_counter() - began:.0f} s in {given.processes} processes")


if __name__ == "__main__":
    main()
