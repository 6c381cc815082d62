import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    """Each test draws the same numbers, whichever ran before it."""
    torch.manual_seed(0)
