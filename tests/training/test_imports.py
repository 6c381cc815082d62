"""What the modules of training import, and when."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mtpkit.training

MODULES = sorted(Path(mtpkit.training.__file__).parent.rglob("*.py"))

REFUSED = """
import sys
from mtpkit.cli.main import app
from mtpkit.errors import UserError
try:
    command = ["train", "model=base", "output=run", "data.train=[a.txt]", {override!r}]
    app(command, standalone_mode=False)
except UserError as error:
    print(error)
print({{"torch", "megatron"}} & sys.modules.keys())
"""


@pytest.mark.parametrize("override", ["stepz=3", "loss.kind=huber", "heads.num_depths=0"])
def test_wrong_settings_are_refused_before_torch_is_imported(override):
    command = [sys.executable, "-c", REFUSED.format(override=override)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    message, imported = result.stdout.splitlines()
    assert message.startswith(f"override {override}: ") and imported == "set()"


def test_the_settings_are_listed_without_torch():
    code = "import sys; from mtpkit.training.config import describe; describe.describe_settings(); "
    result = subprocess.run(
        [sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], check=False
    )
    assert result.returncode == 0


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_the_platform_is_imported_before_megatron_core(path):
    """A program may import any module first, and megatron-core's import is slow without what the
    platform prepares."""
    imports = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = [getattr(node, "module", None) or node.names[0].name for node in imports]
    if any(name.startswith("megatron") for name in names):
        assert names[0] == "mtpkit.platform"
