"""`--help` answers at once: it imports neither torch nor numpy, nor what only models need."""

import subprocess
import sys

import pytest

from mtpkit.cli.main import COMMANDS


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        ("", ["numpy", "torch", "transformers", "mtpkit.config.model"]),
        ("generate", ["numpy", "torch", "transformers", "mtpkit.config.model"]),
        ("train", ["numpy", "torch", "transformers", "mtpkit.config.model"]),
        ("speedup", ["numpy", "torch", "transformers", "mtpkit.config.model", "mtpkit.training"]),
        (
            "bench decode",
            ["numpy", "torch", "transformers", "mtpkit.config.model", "mtpkit.training"],
        ),
    ],
)
def test_help_imports_nothing_heavy(command, heavy):
    code = (
        "import sys\n"
        "from mtpkit.cli.main import main\n"
        f"sys.argv[1:] = {[*command.split(), '--help']!r}\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print('IMPORTED', *sorted(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = done.stdout.splitlines()[-1].split()
    assert imported[0] == "IMPORTED" and "mtpkit.cli.command" in imported
    heavy = [*heavy, "mtpkit.engine.requests.config"]
    assert [name for name in heavy if name in imported] == []


def test_modules_of_commands_import_neither_torch_nor_numpy():
    """Nor transformers: what a command needs of them, it imports when it runs."""
    code = (
        "import sys\n"
        "from importlib import import_module\n"
        "from mtpkit.cli.main import COMMANDS\n"
        "for name in COMMANDS:\n"
        "    import_module(f'mtpkit.cli.{name}')\n"
        "    print(name, *{'torch', 'numpy', 'transformers'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*COMMANDS]
