"""The tokenizer in a model directory."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpkit.errors import UserError, listed
from mtpkit.files import is_there, require_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Tokenizer = PreTrainedTokenizerBase
"""A tokenizer of transformers, which is imported when one is loaded."""

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TOKENIZER_FILES = (*VOCABULARIES, "tokenizer_config.json")
BESIDE = ("config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Other files that transformers reads if they exist."""


def lacks_vocabulary(directory: Path) -> str:
    """An error message for a tokenizer without a vocabulary; "" if there is no tokenizer, or a
    complete one."""
    if not (directory / "tokenizer_config.json").is_file() or any(
        (directory / n).is_file() for n in VOCABULARIES
    ):
        return ""
    return f"{directory} has no tokenizer.json; copy it there"


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Load the transformers tokenizer of a model directory of either layout. Code in the directory
    is never run.

    Raises:
        UserError: the directory does not exist, has no tokenizer, or has one that transformers
            cannot read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"model directory {directory} does not exist")
    if not any(is_there(directory / name) for name in TOKENIZER_FILES):
        raise UserError(
            f"{directory} has no tokenizer; copy its tokenizer.json and tokenizer_config.json there"
        )
    for name in (*TOKENIZER_FILES, *BESIDE):
        if is_there(directory / name):
            require_file(directory / name)
    from transformers import AutoTokenizer

    try:
        with _without_config_warnings():
            # By default transformers asks in a terminal whether to run the code that MiMo's
            # `auto_map` names.
            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        # settings of a wrong type fail only here
        tokenizer.decode(tokenizer("a", verbose=False)["input_ids"])
        return tokenizer
    except Exception as error:  # transformers passes on exceptions of many kinds
        reason = listed([" ".join(str(error).split())])
        raise UserError(
            lacks_vocabulary(directory) or f"the tokenizer in {directory} cannot be read: {reason}"
        ) from error


@contextmanager
def _without_config_warnings() -> Iterator[None]:
    """Silence transformers' warning about a `config.json` of a model type that it does not know,
    such as `mimo`. It needs that file only for the tokenizer's class, and only if the tokenizer's
    own files do not name the class."""
    logger = logging.getLogger("transformers.configuration_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def without_second_bos(token_ids: Sequence[int], text: str, tokenizer: Any) -> list[int]:
    """Drop the BOS token that a tokenizer put before a text that begins with its own, as rendered
    chats do."""
    bos = getattr(tokenizer, "bos_token_id", None)
    twice = (
        bos is not None
        and list(token_ids[:2]) == [bos, bos]
        and text.startswith(tokenizer.bos_token)
    )
    return list(token_ids[1:] if twice else token_ids)


def fingerprint(tokenizer: Tokenizer) -> str:
    """32 hexadecimal digits that are equal for tokenizers that split texts in the same way,
    wherever they are stored.

    The chat template does not count: it changes the text, not its tokens.
    """
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        # The backend also stores truncation and padding of the last batch, which do not count.
        rules = {key: value for key, value in rules.items() if key not in ("truncation", "padding")}
    else:
        added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        rules = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab(), "added": added}
    content = json.dumps([rules, tokenizer.eos_token_id, tokenizer.bos_token_id], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
