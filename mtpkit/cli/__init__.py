"""The command line. `run` is the error boundary of every entry point, including the scripts outside
the package."""

from mtpkit.cli.errors import run

__all__ = ["run"]
