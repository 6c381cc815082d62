"""Continue prompts: `python infer/generate.py --model DIR "def add("`."""

from mtpkit.cli import run
from mtpkit.cli.generate import app

if __name__ == "__main__":
    run(app)
