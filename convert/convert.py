"""Convert checkpoints: python convert/convert.py {import,export,stitch,lint,verify} SOURCE
DESTINATION ..."""

from mtpkit.cli import run
from mtpkit.cli.convert import app

if __name__ == "__main__":
    run(app)
