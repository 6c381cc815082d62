"""Work of the processes of `test_parallel`: gradients, streams and whole runs at one layout after
another."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from megatron.core import parallel_state

from mtpkit.checkpoint.shards import global_shape, local_slice, targets_of
from mtpkit.model import build_model
from mtpkit.training.config.reading import load_config
from mtpkit.training.config.settings import OptimizerConfig
from mtpkit.training.heads import freeze_base
from mtpkit.training.loop import train
from mtpkit.training.optimizer import HeadOptimizer
from mtpkit.training.parallel import stream_base
from mtpkit.training.step import train_step
from tests.model.toy import MLA
from tests.toy_config import DELTA
from tests.training.toy import CONFIG, cut, toy_batch

EXPERTS = dict(
    num_moe_experts=4,
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=16,
    ffn_hidden_size=48,
)
BEFORE = "before_final_norm"
PACKED = [[7, 10, 7], [4, 18, 2], [11, 2, 11], [1, 22, 1]]
WHOLE = [[24]] * 4
LEARNING = ["model=base", "output=run", "data.train=[a.txt]", "loss.chunk_size=16"]


@dataclass(frozen=True)
class Case:
    """A model, its data and what it learns."""

    model: dict
    lengths: list
    settings: list = field(default_factory=list)

    def config(self):
        return CONFIG.replace(
            **{"mtp_num_depths": 2, "qk_layernorm": True, **EXPERTS, **self.model}
        )


CASES = {
    "experts": Case(
        dict(pattern="M*E-", mtp_pattern="*E", moe_latent_size=8),
        PACKED,
        ["heads.attention=serving", "loss.kind=kl"],
    ),
    "experts_whole": Case(
        dict(
            pattern="*EM",
            mtp_pattern="E*",
            mtp_reads_of_base=BEFORE,
            mtp_reads_of_depth=BEFORE,
            mtp_zero_first_embedding=True,
        ),
        WHOLE,
        ["heads.attention=serving", "loss.kind=tv"],
    ),
    "recurrent": Case(
        dict(
            pattern="M*-G",
            mtp_pattern="MG-",
            activation="swiglu",
            tie_word_embeddings=True,
            **DELTA,
        ),
        PACKED,
        ["heads.attention=serving", "loss.kind=ce"],
    ),
    "distinct": Case(
        dict(
            pattern="M-*",
            mtp_pattern="*M-",
            mtp_use_repeated_layer=False,
            position_embedding_type="rope",
            attention_output_gate=True,
            add_qkv_bias=True,
            layernorm_zero_centered_gamma=True,
            mtp_reads_of_depth=BEFORE,
        ),
        WHOLE,
        ["heads.attention=per_depth", "loss.kind=kl", "loss.top_k=5"],
    ),
    "latent": Case(
        dict(pattern="+E", mtp_pattern="+E", **MLA),
        PACKED,
        ["heads.attention=serving", "loss.kind=kl"],
    ),
    "mixed": Case(
        dict(pattern="M-", mtp_pattern="*-", mtp_reads_of_base=BEFORE),
        PACKED,
        ["heads.attention=serving", "loss.kind=kl", "loss.hidden_mix=0.5"],
    ),
}


class Recorder(HeadOptimizer):
    """Puts the summed gradients in the parameters' place, instead of a step."""

    def step(self, lr):
        norm = self.reduce() if self.buffers else 0.0
        for buffer in self.buffers:
            buffer.gather()
            for parameter, grad in zip(buffer.parameters, buffer.grads, strict=True):
                parameter.data.copy_(grad)
        return norm


def gradients(case, layout, distributed=True, device="cpu", batch=None):
    """(losses, norm, {name: (shape of the whole, [(place, part)])}) of a step over the case's
    sequences, or `batch`."""
    tensor = layout.get("tensor_parallel", 1)
    model = build_model(
        case.config(), device=device, seed=3, sequence_parallel=tensor > 1, **layout
    )
    optimizer = Recorder(freeze_base(model).values(), OptimizerConfig(distributed=distributed))
    group = parallel_state.get_data_parallel_group()
    if batch is None:
        batch = toy_batch(case.lengths)
        batch.loss_mask[1, 5:] = False  # sequences have different numbers of targets
    batch = batch.to(device)
    rows, length = batch.token_ids.shape
    share = rows // group.size()
    own = range(group.rank() * share, (group.rank() + 1) * share)
    config = load_config(None, [*LEARNING, "heads.num_depths=2", *case.settings])
    sums, norm = train_step(
        model, [cut(batch, row, 0, length) for row in own], optimizer, config, 0.0
    )
    parts = {
        name: (
            global_shape(shards[0]),
            [(local_slice(shard), shard.data.cpu().clone()) for shard in shards],
        )
        for name, shards in targets_of(model).items()
        if name.startswith("mtp.") and not name.endswith("expert_bias")
    }
    return sums.losses(), norm, parts


def stream(out: Path, device: str) -> None:
    """The last of two stages does not finish with the first micro-batch before the other one is at
    the third."""
    model = build_model(CONFIG, device=device, pipeline_parallel=2)
    batches = [toy_batch([[24]], seed=seed).to(device) for seed in range(5)]
    flag = out / "third"
    seen = []

    def watched():
        for number, batch in enumerate(batches):
            if number == 2 and model.pre_process:
                flag.touch()
            yield batch

    for batch, _ in stream_base(model, watched()):
        seen.append(batch)
        deadline = time.monotonic() + 20
        while not flag.exists():
            assert time.monotonic() < deadline, "the first stage waits for the last one"
            time.sleep(0.01)
    assert len(seen) == (0 if model.pre_process else len(batches))


def work(rank: int, out: Path, jobs: list) -> None:
    """Every job in turn: ("gradients", name, arguments), ("train", overrides) or ("stream",
    device)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    groups = None
    start = time.monotonic()
    for kind, *what in jobs:
        print(
            f"rank {rank}, {time.monotonic() - start:.0f} s: {kind} {str(what[0])[-60:]}",
            flush=True,
        )
        layout = what[1][1] if kind == "gradients" else None
        if layout is None or layout != groups:  # new process groups take NCCL seconds
            parallel_state.destroy_model_parallel()
        groups = layout
        if kind == "train":
            train(load_config(None, what[0]))
        elif kind == "stream":
            stream(out, *what)
        else:
            name, (case, *rest) = what
            torch.save(gradients(CASES[case], *rest), out / f"{name}.{rank}.pt")
