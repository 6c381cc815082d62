"""Train the tiny base's byte-level BPE tokenizer on the training part of the corpus.

python examples/tiny_base/make_tokenizer.py CORPUS_DIR MODEL_DIR
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
END = "<|endoftext|>"


def main(corpus: Path, out: Path) -> None:
    """Read CORPUS_DIR/train.jsonl and write the tokenizer files into MODEL_DIR."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with (corpus / "train.jsonl").open() as lines:
        tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END
    )
    wrapped.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
