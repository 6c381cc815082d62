"""Which base a model directory holds, whatever its layout and wherever it lies."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

from mtpkit.checkpoint.directory import detect_layout, find_torch_dist, open_weights
from mtpkit.checkpoint.tensors import TensorSource
from mtpkit.config import ModelConfig

Files = dict[str, list[int]]
"""Size and time of change (ns) of each file that weights lie in."""

_WITHOUT_EFFECT = ("max_position_embeddings", "init_std")
"""Settings that the base's hidden states do not depend on."""
_READERS = 4
"""How many tensors are read and hashed at once."""


def fingerprint_base(directory: Path, known: tuple[Path, str, Files] | None = None) -> tuple[str, Files]:
    """32 hexadecimal digits that are equal for equal weights of the base, heads left out; and the files they lie in.

    All weights are read, with a progress bar, unless they lie in the files for which the digits are known.

    Args:
        known: directory, digits and files of an earlier call.

    Raises:
        UserError: there are no weights, or damaged ones.
    """
    place = find_torch_dist(directory) if detect_layout(directory) == "megatron" else directory
    paths = sorted([*place.glob("*.safetensors"), *place.glob("*.distcp")])
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
    if known is not None and (known[0], known[2]) == (directory.resolve(), files):
        return known[1], files
    return _digest(open_weights(directory)), files


def fingerprint_config(config: ModelConfig) -> str:
    """32 hexadecimal digits, equal for configs whose bases compute the same: heads and token ids do not count."""
    told = {
        key: value
        for key, value in config.to_dict().items()
        if not key.startswith("mtp_") and not key.endswith(("_token_id", "_token_ids")) and key not in _WITHOUT_EFFECT
    }
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()


def _digest(source: TensorSource) -> str:
    names = sorted(name for name in source.tensors if not name.startswith("mtp."))

    def one(name: str) -> str:
        tensor = source.read(name).contiguous()
        content = hashlib.blake2b(f"{name} {list(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
        content.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        bar.update(tensor.nbytes)
        return content.hexdigest()

    total = sum(source.tensors[name].nbytes for name in names)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="reading the base", disable=None, leave=False)
    with bar, ThreadPoolExecutor(_READERS) as pool:
        return hashlib.blake2b("".join(pool.map(one, names)).encode(), digest_size=16).hexdigest()
