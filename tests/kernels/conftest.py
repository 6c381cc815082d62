import importlib
from dataclasses import dataclass
from types import ModuleType

import pytest


@dataclass(frozen=True)
class Twin:
    """One implementation of the ops: `twin("ssm_update").ssm_replay_update(...)` with tensors on
    `twin.device`."""

    name: str
    device: str

    def __call__(self, op: str) -> ModuleType:
        return importlib.import_module(
            f"mtpkit.kernels.{op}.{'reference' if self.name == 'reference' else 'triton'}"
        )


@pytest.fixture(params=["reference", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def twin(request: pytest.FixtureRequest) -> Twin:
    """Plain PyTorch, the Triton kernel in its interpreter on the CPU, and under `pytest -m gpu` the
    compiled kernel."""
    return Twin(request.param, "cuda" if request.param == "cuda" else "cpu")
