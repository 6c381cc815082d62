"""Train MTP heads: `torchrun --nproc-per-node N train/train_mtp.py --config FILE [key=value
...]`."""

from mtpkit.cli import run
from mtpkit.cli.train import app

if __name__ == "__main__":
    run(app)
