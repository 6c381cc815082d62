"""Masters and moments on the host: the same updates, however late they end."""

import shutil
from functools import partial

import pytest
import torch

from mtpkit.checkpoint import load_model
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model import build_model
from mtpkit.training import offload as offloading
from mtpkit.training import optimizer as optimizers
from mtpkit.training.config.settings import OptimizerConfig
from mtpkit.training.heads import freeze_base
from mtpkit.training.offload import HostState
from mtpkit.training.optimizer import HeadOptimizer
from mtpkit.training.step import train_step
from tests.training.streams import Device
from tests.training.test_run import metrics, run, settings  # noqa: F401  (a fixture)
from tests.training.test_step import toy_config
from tests.training.toy import CONFIG, toy_batch, toy_model

SHAPES = [(64, 70_001), (33,), (5, 7)]
PIECE = 100_000
assert SHAPES[0][0] * SHAPES[0][1] > 2 * offloading.PIECES * PIECE


@pytest.fixture
def late(monkeypatch):
    """Whatever an update does begins long after it could; of the larger tensors there are many
    pieces."""

    def slowly(function):
        def slow(*args, **kwargs):
            torch.cuda._sleep(1_000_000)
            function(*args, **kwargs)

        return slow

    monkeypatch.setattr(optimizers, "adamw_", slowly(optimizers.adamw_))
    monkeypatch.setattr(offloading, "_copy", slowly(offloading._copy))
    monkeypatch.setattr(offloading, "PIECE", PIECE)


@pytest.mark.gpu
def test_updates_are_those_of_state_on_the_device(late):
    toy_model()  # process groups
    generator = torch.Generator("cuda").manual_seed(0)
    values = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in SHAPES]
    found = []
    for offload in (False, True):
        parameters = [torch.nn.Parameter(value.clone()) for value in values]
        optimizer = HeadOptimizer(parameters, OptimizerConfig(offload=offload))
        generator.manual_seed(1)
        for _ in range(3):
            for parameter in parameters:
                parameter.main_grad.normal_(generator=generator)
            optimizer.step(1e-2)
            optimizer.begin()
            torch.full((2**26,), torch.nan, device="cuda")  # in whatever memory is free meanwhile
            optimizer.finish()
        torch.cuda.synchronize()
        tensors = [
            tensor for region in optimizer.buffers[0].regions for tensor in region.tensors.values()
        ]
        assert len(tensors) == 6 and all(tensor.is_cuda != offload for tensor in tensors)
        assert all(tensor.is_pinned() == offload for tensor in tensors)
        found.append([*parameters, *(tensor.cpu() for tensor in tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
def test_heads_wait_for_the_update(late):
    found = []
    for offload in (False, True):
        model = build_model(CONFIG, device="cuda", seed=1)
        heads = freeze_base(model)
        optimizer = HeadOptimizer(heads.values(), OptimizerConfig(offload=offload))
        for seed in range(3):
            train_step(
                model, [toy_batch([[9, 11]], seed=seed).to("cuda")], optimizer, toy_config(), 1e-2
            )
        optimizer.finish()
        found.append([parameter.detach().clone() for parameter in heads.values()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_the_streams_gives_the_same(monkeypatch, seed):
    """What is asked of streams is done late and in any order that they allow, in memory that had
    another use before and has another one after."""
    device = Device(seed)
    copy = offloading._copy
    empty = torch.empty
    device.install(monkeypatch, torch.cuda)
    monkeypatch.setattr(
        offloading, "_copy", lambda *tensors: device.current().ask(lambda: copy(*tensors))
    )
    monkeypatch.setattr(offloading, "PIECE", 4)
    room = torch.empty(offloading.PIECES, 2, 4)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **where: room[tuple(map(slice, sizes))])

    def ask(grad, total, last):
        def update():
            total.add_(grad)
            last.copy_(grad)
            grad.mul_(2)

        device.current().ask(update)

    host = HostState()
    grads = [torch.zeros(50), torch.zeros(3), torch.zeros(0)]
    seen = []
    parts = [offloading.Part(ask, grad, torch.zeros(2, len(grad))) for grad in grads]
    values = [[torch.randn(len(grad)) for grad in grads] for _ in range(3)]
    for step in values:
        device.main.ask(lambda: room.fill_(torch.nan))
        for grad, value in zip(grads, step, strict=True):
            device.main.ask(partial(grad.copy_, value))
        host.start(parts)
        host.finish()
        device.main.ask(
            lambda: (room.fill_(torch.nan), seen.append([grad.clone() for grad in grads]))
        )
    host.synchronize()
    for part, *step in zip(parts, *values, strict=True):
        torch.testing.assert_close(part.state, torch.stack([sum(step), step[-1]]))
    device.main.synchronize()
    monkeypatch.setattr(torch, "empty", empty)
    for found, step in zip(seen, values, strict=True):
        torch.testing.assert_close(found, [2 * value for value in step])


def test_what_an_update_raises_is_raised(monkeypatch):
    def fail(*tensors):
        raise MtpkitError("out of memory")

    Device(0).install(monkeypatch, torch.cuda)
    host = HostState()
    host.start([offloading.Part(fail, torch.zeros(3), torch.zeros(2, 3))])
    for _ in range(2):
        with pytest.raises(MtpkitError, match="out of memory"):
            host.finish()


def test_a_run_may_go_on_with_the_other(settings, device, tmp_path):  # noqa: F811
    """After an evaluation and after a checkpoint, which both wait for the update."""
    often = ["save_interval=3", "eval_interval=2"]
    saved: list[dict] = []
    whole = run(settings, *often, f"output={tmp_path / 'whole'}")
    for first in ("true", "false"):
        output = tmp_path / first
        run(settings, f"output={output}", f"optimizer.offload={first}", *often)
        shutil.rmtree(output / "iter_0000006")
        (output / "latest_checkpointed_iteration.txt").write_text("3")
        saved.append(load_model(output).state_dict())
        other = "false" if first == "true" else "true"
        run(settings, f"output={output}", f"optimizer.offload={other}", *often)
        for kind in ("train", "eval"):
            found, wanted = (
                {step: line["loss"] for step, line in metrics(path, kind).items()}
                for path in (output, whole)
            )
            assert (
                found == pytest.approx(wanted, rel=0 if device == "cpu" else 1e-4)
                and len(found) >= 4
            )
    for name, value in saved[0].items():
        if value is not None:
            torch.testing.assert_close(value, saved[1][name], rtol=1e-4, atol=1e-6)


def test_muon_has_no_state_on_the_host():
    with pytest.raises(
        UserError, match=r"optimizer\.offload is for AdamW, not optimizer\.kind=muon"
    ):
        toy_config("optimizer.offload=true", "optimizer.kind=muon")
