"""docs/run-directory.md names what a run really writes."""

import json
import re
from pathlib import Path

from mtpkit.training.config.reading import load_config
from mtpkit.training.loop import train

PAGE = Path(__file__).parents[2] / "docs" / "run-directory.md"
OF_OTHER_RUNS = {
    "files": {
        "config.json",
        "mtpkit_original.json",
        "carried.safetensors",
        "wandb_id.txt",
    },
    "keys": {"mfu"},
}
"""What a run of the toy base on a CPU lacks."""


def rows(heading):
    """Cells of the table under a heading of the page."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def test_the_page_names_the_files_and_keys_of_a_run(run_settings):
    short = run_settings(steps=2, log_interval=1, eval_interval=2, save_interval=2)
    run = train(load_config(None, short))

    found = {path.name for path in run.iterdir()}
    found = {re.sub(r"^iter_\d+$", "iter_0000200", name) for name in found}
    named = {name.rstrip("/") for row in rows("Files") for name in re.findall("`([^`]+)`", row[0])}
    assert found == named - OF_OTHER_RUNS["files"]

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for kind in ("train", "eval"):
        keys = {key for line in lines if line["kind"] == kind for key in line}
        named = {
            key.strip("`") for key, of, _ in rows("Lines of metrics.jsonl") if of in ("all", kind)
        }
        assert keys == named - OF_OTHER_RUNS["keys"], kind

    (source,) = lines[-1]["sources"].values()
    assert [*source] == [key for key in lines[-1] if key in source]
    assert {"loss", "acceptance_length_interval"} <= source.keys()
