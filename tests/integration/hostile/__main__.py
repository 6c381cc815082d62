"""Runs hostile files by hand: `python -m tests.integration.hostile NAME ...`.

A name is `KIND/MUTATION/COMMAND`, as failures give it; a part of it names all cases that begin so.
Options: --list only names the cases; --all takes all, not only those that the test does; --keep=DIR
leaves the files of the last one there; --seconds=5 ends a case earlier.
"""

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


def main(folder: Path) -> None:
    from tests.integration.hostile import kinds
    from tests.integration.hostile.cases import LONGEST_RUN, judge
    from tests.integration.hostile.runner import build_world, load_commands, prepare, run_cases

    options = dict(
        argument[2:].partition("=")[::2] for argument in sys.argv[1:] if argument.startswith("--")
    )
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    load_commands()
    world = folder / "world"
    build_world(world)
    every = "all" in options or any(name.count("/") > 1 for name in names)
    cases = [case for kind in kinds.KINDS for case in kinds.chosen(kind, world, every)]
    cases = [
        case for case in cases if not names or any(case.name.startswith(name) for name in names)
    ]
    if "list" in options:
        print("\n".join(case.name for case in cases))
        return
    counts = Counter()
    red = Counter()
    seconds = Counter()
    for case, outcome in run_cases(
        cases, world, folder / "work", longest=float(options.get("seconds", LONGEST_RUN))
    ):
        verdict = judge(case, outcome)
        counts[case.kind.name] += 1
        seconds[case.kind.name] += outcome.seconds
        if verdict.problems:
            red[case.kind.name] += 1
            print(verdict, flush=True)
        elif len(cases) < 20:
            print(
                f"{case.name}: right, exit code {outcome.code}\n    |"
                f" {outcome.stderr.strip()[:300]}"
            )
    if "keep" in options and cases:
        prepare(cases[-1], world, Path(options["keep"]))
    for kind, count in counts.items():
        print(f"{kind}: {count} cases, {red[kind]} red, {seconds[kind]:.1f} s")


with tempfile.TemporaryDirectory(prefix="mtpkit-hostile-") as place:
    main(Path(place))
