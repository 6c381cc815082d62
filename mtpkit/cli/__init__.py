"""The command line. `run` is the error boundary of every entry point, the scripts outside the package included."""

from mtpkit.cli.errors import run
from mtpkit.cli.options import ListCommand

__all__ = ["ListCommand", "run"]
