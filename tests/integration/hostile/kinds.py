"""Every kind of file that mtpkit reads, which modules read them, and which cases are run."""

from collections import defaultdict
from hashlib import blake2b
from pathlib import Path

from tests.integration.hostile import kinds_data, kinds_model, kinds_run
from tests.integration.hostile.cases import CONTROL, Case, Kind

KINDS = (*kinds_model.KINDS, *kinds_data.KINDS, *kinds_run.KINDS)
READERS: dict[str, tuple[str, ...]] = {
    "cli/options.py": (),  # JSON that is an option's value
    "cli/torchrun.py": (),  # reports of the processes that torchrun started
    "training/log.py": (),  # what it wrote itself
    "bench/machine.py": (),  # what the processor is called
    "bench/shapes.py": ("prompts as text", "prompts as jsonl", "prompts of token ids"),
    "checkpoint/layouts/huggingface.py": ("index", "safetensors"),
    "checkpoint/directory.py": (
        *("config.json", "mtpkit.json", "Megatron's config.json", "generation_config.json"),
        *("tracker", "tracker of a run"),
    ),
    "checkpoint/layouts/torch_dist.py": (".metadata", "distcp", "common.pt"),
    "checkpoint/layouts/torch_dist_index.py": (".metadata", ".metadata of a run"),
    "checkpoint/layouts/mapped.py": ("safetensors", "distcp", "distcp of a run"),
    "checkpoint/original.py": ("mtpkit_original.json",),
    "checkpoint/layouts/torch_dist_write.py": (),  # opens what it writes
    "checkpoint/run.py": (
        "trainer state",
        "metadata.json",
        ".metadata of a run",
        "distcp of a run",
    ),
    "checkpoint/hub.py": (),  # opens its lock
    "cli/data.py": ("chat template",),
    "cli/errors.py": (),  # a place for output that nobody reads
    "cli/generate.py": ("stdin",),
    "config/checked.py": (),  # for the others
    "data/cells.py": ("chat data",),
    "data/chat.py": ("chat data",),
    "data/conversations.py": ("chat data",),
    "data/draft_vocab.py": ("draft vocabulary",),
    "data/prepare.py": (),  # its own samples on their way to another process
    "data/prepared.py": (
        "manifest of prepared data",
        "dataset_info.json",
        "state.json",
        "prepared sequences",
    ),
    "data/regenerate.py": ("journal",),
    "data/rows.py": (
        *("text data", "jsonl data", "json data", "parquet data", "csv data", "regenerated data"),
        "data of no known kind",
    ),
    "data/tokenizer.py": ("tokenizer.json", "tokenizer_config.json"),
    "engine/ranks/follow.py": (),  # what rank 0 sent
    "engine/ranks/join.py": (),  # both ends of a model's files, for a hash
    "engine/requests/structured.py": (),  # JSON that is a parameter's value
    "files.py": (),  # for the others
    "server/answers/formats.py": (),  # what models wrote
    "server/page.py": (),  # the page of the package
    "server/run.py": ("chat template",),
    "training/cache.py": ("manifest of hidden states", "hidden states"),
    "training/cache_write.py": (),  # opens its lock
    "training/config/reading.py": ("settings", "overrides", "settings of a run"),
    "training/metrics.py": ("metrics.jsonl",),
    "training/run.py": ("tracker of a run", "settings of a run"),
}
"""Each module that reads files, below `mtpkit`, and the kinds that it reads."""

MOST = 40
"""Cases of a kind, beside its controls."""


def chosen(kind: Kind, world: Path, all_of_them: bool = False) -> list[Case]:
    """The controls, and of the others as many from each class of damage, in an order that new cases
    do not change."""
    cases = list(kind.cases(world))
    controls = [case for case in cases if case.mutation is CONTROL]
    classes = defaultdict(list)
    for case in sorted((case for case in cases if case.mutation is not CONTROL), key=_digest):
        classes[_class_of(case.mutation.name)].append(case)
    rounds = [
        (place, _digest(case), case) for one in classes.values() for place, case in enumerate(one)
    ]
    ordered = [case for *_, case in sorted(rounds, key=lambda entry: entry[:2])]
    return controls + ordered[: None if all_of_them else MOST]


def _digest(case: Case) -> bytes:
    return blake2b(case.name.encode("utf-8", "replace"), digest_size=8).digest()


def _class_of(name: str) -> str:
    """The damage in the name of a mutation, without the key."""
    return name.partition("=")[2] or name.rpartition(" ")[2]
