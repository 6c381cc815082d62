from pathlib import Path

import pytest

from tests.checkpoint.builders import add_heads, write_base


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    """A base with all four kinds of layers and a repeated head."""
    write_base(tmp_path / "hf")
    add_heads(tmp_path / "hf")
    return tmp_path / "hf"
