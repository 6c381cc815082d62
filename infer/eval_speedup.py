"""The speedup report: `python infer/eval_speedup.py --model DIR --prompts FILE --k 0 1 2 3 --batch-size 1 8`."""

from mtpkit.cli import run
from mtpkit.cli.speedup import app

if __name__ == "__main__":
    run(app)
