"""Valid files of every kind, small and always the same: what cases are copies of before one file is
damaged."""

import contextlib
import json
import os
import shutil
from pathlib import Path

from tests.integration.hostile.runner import run_mtpkit

SENTENCES = ["the cat sat on the mat\n", "def add(left, right):\n    return left + right\n"]
TEXT = "".join(SENTENCES) * 8
TURNS = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token"
    " }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
VOCAB = 300
GOLDEN = Path(__file__).parents[2] / "golden" / "tp1" / "moe"
TRAINING = {
    "model": "hf8",
    "output": "run5",
    "data": {
        "train": ["data3/text.txt"],
        "eval": ["data3/rows.jsonl"],
        "sequence_length": 32,
        "global_batch_size": 2,
        "eval_sequences": 2,
    },
    "heads": {"num_depths": 2},
    "optimizer": {"lr": 1e-3, "warmup_steps": 1},
    "steps": 2,
    "log_interval": 1,
}
"""Settings of a short run; those of `train0.yaml` and of the run in `run5`."""


def build(world: Path) -> None:
    """Fill a directory.

    hf8        Hugging Face layout, one file      shards8    the same in several files with an index
    meg7       Megatron layout, imported          bare7      Megatron's own, config.json beside it
    args7      Megatron-LM's, all in common.pt    run5       a training run of two steps
    data3      data of every kind                 prep6      prepared data
    cache4     hidden states                      the rest   prompts, settings, a draft vocabulary
    """
    world.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(world)
    try:
        _models()
        _data()
        _call(
            "data prepare --model hf8 --data data3/text.txt data3/rows.jsonl --sequence-length 32"
            " --output prep6"
        )
        _call("data draft-vocab --model hf8 --data data3/text.txt --size 40 --output vocab2.json")
        Path("train0.yaml").write_text(json.dumps(TRAINING, indent=1))
        _call("train --config train0.yaml")
        _call("data cache --config train0.yaml cache=cache4")
        _journal()
    finally:
        os.chdir(before)


def _call(command: str) -> None:
    # in any case; whether it was well is what the controls of all kinds show
    with contextlib.suppress(SystemExit):
        run_mtpkit(command.split())


def _models() -> None:
    import torch

    from mtpkit.checkpoint import save_hf_model
    from mtpkit.model import build_model
    from tests.toy_config import toy_config

    torch.manual_seed(0)
    config = toy_config(
        vocab_size=VOCAB,
        pattern="M*-E",
        mtp_num_depths=2,
        mamba_chunk_size=8,
        eos_token_ids=(0,),
        max_position_embeddings=256,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=24,
        moe_shared_expert_intermediate_size=16,
        moe_router_topk_scaling_factor=2.5,
    )
    model = build_model(config, device="cpu", seed=3)
    for name, size in (("hf8", 10**9), ("shards8", 60_000)):
        Path(name).mkdir()
        _tokenizer(Path(name))
        save_hf_model(model, Path(name), size)
        Path(name, "generation_config.json").write_text(
            json.dumps({"eos_token_id": [0, 7], "do_sample": False})
        )
    _call("convert import hf8 meg7")
    kept = {"ways": {"mtp.layers.1.mixer.experts": "packed"}, "lacking": ["mtp.head.weight"]}
    Path("meg7/mtpkit_original.json").write_text(json.dumps(kept, indent=2))
    shutil.copytree(GOLDEN, "bare7", ignore=shutil.ignore_patterns("golden.safetensors"))
    args = {**json.loads((GOLDEN / "config.json").read_text())["config"], "squared_relu": True}
    shutil.copytree(GOLDEN / "checkpoint", "args7")
    from argparse import Namespace

    torch.save({"args": Namespace(**args), "checkpoint_version": 3.0}, "args7/common.pt")


def _tokenizer(directory: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        SENTENCES * 8,
        vocab_size=VOCAB,
        min_frequency=2,
        special_tokens=["<eos>"],
        show_progress=False,
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<eos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def _data() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mtpkit.data.tokenizer import fingerprint, load_tokenizer

    Path("data3").mkdir()
    rows = [{"text": TEXT, "id": number} for number in range(3)]
    turns = [{"messages": TURNS * 3, "id": number} for number in range(4)]
    answers = [
        {
            "index": number,
            "prompt": "the cat",
            "completion": " sat on the mat",
            "finish_reason": "stop",
            "tokenizer": fingerprint(load_tokenizer("hf8")),
            "prompt_token_ids": [5, 6, 7],
            "completion_token_ids": [*range(20, 40), 0],
        }
        for number in range(12)
    ]
    prompts = [{"prompt": "the cat"}, {"prompt_token_ids": [5, 6, 7]}, {"prompt": "def add"}]
    files = {
        "data3/rows.jsonl": rows,
        "data3/chat.jsonl": turns,
        "data3/answers.jsonl": answers,
        "prompts1.jsonl": prompts,
    }
    for name, lines in files.items():
        Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("data3/rows.json").write_text(json.dumps(rows))
    Path("data3/text.txt").write_text(TEXT)
    Path("data3/rows.csv").write_text(
        "id,text\n" + "".join(f'{row["id"]},"{TEXT}"\n' for row in rows)
    )
    pq.write_table(pa.Table.from_pylist(rows), "data3/rows.parquet")
    Path("prompts1.txt").write_text("the cat\n\ndef add\n")
    Path("template1.jinja").write_text(TEMPLATE)
    Path("tokens1.jsonl").write_text(json.dumps({"prompt_token_ids": [5, 6, 7]}) + "\n")
    Path("stdin").write_text("the cat sat\n")


def _journal() -> None:
    """The journal of regenerated answers as a stop after the first two leaves it."""
    from mtpkit.data import regenerate

    publish = regenerate.Journal.publish
    regenerate.Journal.publish = lambda self: None
    try:
        _call(REGENERATE)
    finally:
        regenerate.Journal.publish = publish
    path = Path("answers1.jsonl.partial")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))


REGENERATE = (
    "data regenerate --model hf8 --data data3/text.txt --prompt-length 8 --limit 3 --max-tokens 3 "
    "--output answers1.jsonl"
)
