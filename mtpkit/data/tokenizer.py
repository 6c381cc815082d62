"""The tokenizer that lies beside a model's weights."""

from pathlib import Path
from typing import TYPE_CHECKING

from mtpkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(directory: str | Path) -> "PreTrainedTokenizerBase":
    """The transformers tokenizer of a model directory of either layout.

    Raises:
        UserError: no such directory, no tokenizer in it, or one that transformers cannot read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"model directory {directory} does not exist")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{directory} has no tokenizer; copy its tokenizer.json and tokenizer_config.json there")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises whatever its readers do
        raise UserError(f"the tokenizer in {directory} cannot be read: {error}") from error
