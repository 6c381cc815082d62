"""Set-up that all tests share: one thread, no network, uninitialised memory full of NaN, and a tiny
tokenizer."""

import atexit
import gc
import os
import sys

# Before torch, Triton and the Hugging Face libraries are imported; each pytest worker has one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The GPU is for `pytest -m gpu` alone: the other tests are about the CPU, also on a machine that
# has one, and run Triton's kernels in its interpreter. Workers inherit what the command line said.
if os.environ.setdefault("MTPKIT_TEST_GPU", str(int("-m gpu" in " ".join(sys.argv)))) == "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import tiers
from tests.shared import TIER, look_at_new_objects

torch.set_num_threads(1)
# Under it torch.empty is filled with NaN.
torch.use_deterministic_algorithms(True, warn_only=True)

atexit.register(gc.unfreeze)  # as `LLM` does
look_at_new_objects()
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests import interpreter

    interpreter.hasten()

settings.register_profile("mtpkit", deadline=None, derandomize=True)
settings.load_profile("mtpkit")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[TIER] = config.getoption("--tier")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Each test draws the same numbers, whichever ran before it."""
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=["fast", "all"],
        default="all",
        help="fast: of each test function the first and the last case, and few processes",
    )


def pytest_collection_finish() -> None:
    """Spare collections the look at all that was imported."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none, and leave out what the tier does not have."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device and `pytest -m gpu`")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)

    chosen = items
    if not any("::" in argument for argument in config.args):  # by hand, the whole of a function
        chosen = tiers.thinned(chosen)
    if config.getoption("--tier") == "fast":
        chosen = tiers.fast(chosen)
    left_out = set(items) - set(chosen)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        config.stash[LEFT_OUT] = f"{len(left_out)} of {len(items)} cases left out"
        items[:] = chosen


LEFT_OUT = pytest.StashKey[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Take over what a worker left out; each of them collects the same."""
    if "left_out" in getattr(node, "workeroutput", {}):
        node.config.stash[LEFT_OUT] = node.workeroutput["left_out"]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput") and LEFT_OUT in session.config.stash:
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if LEFT_OUT in config.stash:
        tier = config.getoption("--tier")
        terminalreporter.write_line(f"tier {tier}: {config.stash[LEFT_OUT]}, see tests/tiers.py")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, and under `pytest -m gpu` the GPU."""
    return request.param


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level BPE tokenizer of 300 tokens; its eos token is `<eos>`, id 0."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    text = ["the cat sat on the mat\n", "def add(left, right):\n    return left + right\n"] * 8
    tokenizer.train_from_iterator(
        text, vocab_size=300, min_frequency=2, special_tokens=["<eos>"], show_progress=False
    )
    directory = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<eos>")
    fast.save_pretrained(directory)
    return directory
