"""A wheel built from the tree has the package and nothing else, and runs without the tree."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mtpkit
from mtpkit.version import __version__

ROOT = Path(mtpkit.__file__).parent.parent
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "mtpkit", "tests", "benchmarks", "examples")
"""What lies in a checkout, of which the build may take what it should not."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of a copy of the tree, so that the build leaves nothing in the tree and finds nothing
    of an earlier build."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            no_caches = shutil.ignore_patterns("__pycache__", "*.safetensors", "golden")
            shutil.copytree(ROOT / name, tree / name, ignore=no_caches)
        else:
            shutil.copy(ROOT / name, tree / name)

    # The build's own requirements are installed already: a test downloads nothing.
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tree / "dist"]
    command = [sys.executable, "-m", "pip", "wheel", *options, tree]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = (tree / "dist").iterdir()
    return path


def test_it_has_all_modules_and_nothing_else(wheel):
    assert wheel.name == f"mtpkit-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    info = f"mtpkit-{__version__}.dist-info/"
    files = (path for path in (ROOT / "mtpkit").rglob("*") if path.is_file())
    package = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}
    assert {name for name in names if not name.startswith(info)} == package
    assert f"{info}licenses/LICENSE" in names

    entries = zipfile.ZipFile(wheel).read(f"{info}entry_points.txt").decode()
    assert "mtpkit = mtpkit.cli.main:main" in entries
    assert "mtpkit = mtpkit.cli.torchrun:handler" in entries


@pytest.mark.parametrize("command", [["--help"], ["bench", "roofline", "--model", "nemotron-h-8b"]])
def test_its_commands_run_outside_of_the_tree(wheel, tmp_path, command):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    # -I: no PYTHONPATH and no current directory, where the tree would be found. The packages that
    # mtpkit needs are those of the tests.
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import mtpkit.cli.main; "
        "print(mtpkit.__file__, file=sys.stderr); mtpkit.cli.main.main()"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, tmp_path / "site", *command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == str(tmp_path / "site" / "mtpkit" / "__init__.py")
    assert "generate" in done.stdout or "tokens/s" in done.stdout
