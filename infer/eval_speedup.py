"""The speedup report: `python infer/eval_speedup.py --model DIR --prompts FILE --batch-size 1
8`."""

from mtpkit.cli import run
from mtpkit.cli.speedup import app

if __name__ == "__main__":
    run(app)
