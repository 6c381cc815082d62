"""Serve a model over HTTP: `python infer/serve.py DIR`."""

from mtpkit.cli import run
from mtpkit.cli.serve import app

if __name__ == "__main__":
    run(app)
