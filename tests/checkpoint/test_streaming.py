"""Large checkpoints pass through little memory: mapped files, threads with a budget, several
files."""

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mtpkit.checkpoint import load_checkpoint, load_config
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.layouts import mapped, parallel, torch_dist_write
from mtpkit.checkpoint.layouts.huggingface import HFReader
from mtpkit.checkpoint.layouts.mapped import Mappings
from mtpkit.checkpoint.layouts.parallel import THREADS, Budget, Stopped, write_all
from mtpkit.checkpoint.layouts.torch_dist import MegatronReader
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.errors import UserError
from mtpkit.model import build_model
from tests.checkpoint.builders import GOLDEN, edit


def resident_kilobytes() -> int:
    """What of mapped files this process has in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssFile")))


def test_little_of_a_file_stays_resident(tmp_path, monkeypatch):
    piece = 2**22
    pieces = 24
    with (tmp_path / "file").open("wb") as file:
        file.truncate(piece * pieces)

    def read_all() -> int:
        maps = Mappings(tmp_path)
        before = resident_kilobytes()
        kept = [maps.tensor("file", at * piece, (piece,), torch.uint8) for at in range(pieces)]
        for at in range(pieces):
            assert not maps.tensor("file", at * piece, (piece,), torch.uint8).any()
        assert len(kept) == pieces
        return resident_kilobytes() - before

    assert read_all() > piece * pieces // 2048
    monkeypatch.setattr(mapped, "RESIDENT_BYTES", 2 * piece)
    assert read_all() < 4 * piece // 1024


def test_a_reader_gives_back_what_it_read(tmp_path):
    save_file({"a": torch.ones(2**25, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    reader = HFReader(tmp_path)
    before = resident_kilobytes()
    tensor = reader.read("a")
    assert tensor.all() and resident_kilobytes() - before > 30_000
    reader.give_back()
    assert resident_kilobytes() - before < 16_000 and tensor[-1] == 1


def test_views_stay_valid_when_pages_are_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "RESIDENT_BYTES", 1)
    values = torch.arange(5000, dtype=torch.int32)
    (tmp_path / "file").write_bytes(values.numpy().tobytes())
    maps = Mappings(tmp_path)
    parts = [
        maps.tensor("file", start * 4, (5000 - start,), torch.int32)
        for start in range(0, 5000, 100)
    ]
    assert all(torch.equal(part, values[100 * number :]) for number, part in enumerate(parts))
    odd = maps.tensor("file", 3, (10,), torch.int16)  # not aligned
    assert odd.numpy().tobytes() == values.numpy().tobytes()[3:23]
    assert maps.tensor("file", 8, (0, 3), torch.float32).shape == (0, 3)


def test_threads_hold_no_more_than_the_budget():
    held = 0
    most = []
    lock = threading.Lock()

    def write(sizes: list[int], budget: Budget) -> int:
        nonlocal held
        for size in sizes:
            with budget.hold(size):
                with lock:
                    held += size
                    most.append(held)
                time.sleep(0.001)
                with lock:
                    held -= size
        return sum(sizes)

    parallel_budget = Budget(100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "Budget", lambda: parallel_budget)
        jobs = [[40, 10, 30, 60, 5], [70, 70], [100, 1, 1], [20] * 8, [33, 66], [250]]
        assert write_all(write, jobs) == [sum(job) for job in jobs]
    assert 60 < max(size for size in most if size != 250) <= 100 and 250 in most
    alone = most.index(250)
    assert held == 0 and most[alone] == 250


@pytest.mark.timeout(30)
def test_the_first_failure_stops_all_threads():
    done = []

    def write(number: int, budget: Budget) -> None:
        for step in range(1000):
            with budget.hold(2**30 if number == 3 else 10):
                if number == 2 and step == 3:
                    raise UserError("the second job fails")
                time.sleep(0.001)
        done.append(number)

    with pytest.raises(UserError, match="the second job fails"):
        write_all(write, range(3 * THREADS))
    assert done == []


def test_what_waits_for_memory_is_stopped():
    budget = Budget(10)
    with budget.hold(10):

        def want() -> None:
            with pytest.raises(Stopped), budget.hold(1):
                pass

        waiting = threading.Thread(target=want)
        waiting.start()
        budget.stop()
        waiting.join(10)
        assert not waiting.is_alive()


@pytest.fixture
def small_files(monkeypatch):
    """Several files of a `torch_dist` checkpoint for little."""
    monkeypatch.setattr(torch_dist_write, "FILE_BYTES", 50_000)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("case", ["tp2/moe", "tp1/mamba_attention_mlp"])
def test_several_files_hold_one_checkpoint(tmp_path, case):
    """Fused and split tensors lie on both sides of their edges; megatron-core loads them."""
    export_checkpoint(GOLDEN / case, tmp_path / "hf", max_shard_bytes=60_000)
    import_checkpoint(tmp_path / "hf", tmp_path / "back")
    files = sorted(path.name for path in (tmp_path / "back" / "release").glob("*.distcp"))
    assert files == [f"__0_{number}.distcp" for number in range(THREADS)]
    result = compare_weights(GOLDEN / case, tmp_path / "back")
    assert result.identical and len(result.equal) > 20
    model = build_model(load_config(tmp_path / "back"), seed=2)
    model.load_state_dict(
        load_checkpoint(tmp_path / "back", {"model": model.sharded_state_dict()})["model"]
    )


@pytest.mark.usefixtures("small_files")
def test_tensors_are_mapped_without_a_copy(tmp_path):
    export_checkpoint(GOLDEN / "tp1/moe", tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "back")
    reader = MegatronReader(tmp_path / "back/release")
    places = {name: [reader.read(name) for _ in range(2)] for name in reader.tensors}
    assert len(places) > 20 and all(
        one.data_ptr() == other.data_ptr() for one, other in places.values()
    )


@pytest.mark.usefixtures("small_files")
def test_a_failing_thread_leaves_nothing(hf_dir, tmp_path):
    edit(hf_dir, lambda tensors: tensors["lm_head.weight"][3].fill_(float("inf")))
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        import_checkpoint(hf_dir, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
