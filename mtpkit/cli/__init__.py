"""The command line. `run` is the error boundary of every entry point, the scripts outside the package included."""

from mtpkit.cli.errors import run

__all__ = ["run"]
