"""Models that are named by their id in the Hugging Face hub."""

import fcntl
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

from mtpkit.errors import UserError

_logger = logging.getLogger(__name__)

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
"""Weights, settings, and the files of tokenizers and chat templates."""
_NOT_FILES = ("original/*", "consolidated*")
"""Second copies of the weights, under other names."""
_MOST = 200
"""Most characters of the hub's reason, which may be a page long."""


def find_model(
    model: str | Path, revision: str | None = None, download_dir: str | Path | None = None
) -> Path:
    """The directory of a model. One that exists is taken as it is; the id of a model in the Hugging
    Face hub, such as `org/name`, is looked up in the hub's cache, and downloaded if the cache lacks
    it and there is a network. Of the processes of a host one downloads, and the others wait.

    Args:
        revision: branch, tag or commit; None: the main branch.
        download_dir: the cache; None: that of huggingface_hub (`HF_HOME`).

    Returns:
        A directory; or a path that neither exists nor can be an id, about which whoever opens it
        raises an error.

    Raises:
        UserError: the model is neither here nor can it be had from the hub.
    """
    path = Path(model)
    if not _ID.fullmatch(str(model)) or path.exists():
        if revision is not None:
            _logger.warning("revision %s has no effect: %s is a directory", revision, model)
        return path
    from huggingface_hub import constants, snapshot_download

    try:
        with _alone(f"{model} {download_dir}"):
            return Path(
                snapshot_download(
                    str(model),
                    revision=revision,
                    cache_dir=download_dir,
                    allow_patterns=list(_FILES),
                    ignore_patterns=list(_NOT_FILES),
                    # Else version 1.31 asks for the list of a commit's files all the same.
                    local_files_only=constants.HF_HUB_OFFLINE,
                )
            )
    except Exception as error:  # huggingface_hub passes on those of its HTTP library
        if isinstance(error, OSError) and error.errno is not None:
            raise  # such as a full disk
        reason = shorten(str(error), _MOST, placeholder=" ...") or type(error).__name__
        raise UserError(
            f"{model} is no directory here, and the Hugging Face hub cannot give it: {reason};"
            f" check path, id and revision, or run `hf download {model}` where there is a network"
        ) from error


@contextmanager
def _alone(what: str) -> Iterator[None]:
    """Wait until no other process of this host is in here for the same thing."""
    digest = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
    lock = Path(tempfile.gettempdir()) / f"mtpkit-hub-{os.getuid()}-{digest}.lock"
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file unlocks it
        yield
