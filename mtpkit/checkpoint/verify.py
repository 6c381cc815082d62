"""Compare checkpoints of either layout: tensor by tensor, by their outputs, and bases by
fingerprints."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor
from tqdm import tqdm

from mtpkit.checkpoint.compared import Compared, compared, differing_settings
from mtpkit.checkpoint.directory import open_directory
from mtpkit.checkpoint.load import load_model
from mtpkit.checkpoint.run import stored_base
from mtpkit.checkpoint.tensors import (
    TensorSource,
    bits_equal,
    is_finite,
)
from mtpkit.config import ModelConfig
from mtpkit.errors import UserError
from mtpkit.model import SequenceInput, base_forward, compute_logits, normed_states, unroll_depths
from mtpkit.model.formats import Format

Files = dict[str, list[int]]
"""File name -> size (bytes) and modification time (ns), for each file that holds weights."""

_WITHOUT_EFFECT = ("max_position_embeddings", "init_std")
"""Settings that the base's hidden states do not depend on."""
_READERS = 4
"""Number of tensors that are read and hashed at once."""


@dataclass
class Comparison:
    """Tensor names, grouped by the result of comparing two checkpoints. They are Hugging Face's if
    both have that layout and store their tensors alike, else Megatron's as on disk. Matrices that
    both have quantised in one format are compared by their parts, others under one name."""

    equal: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    """Names, each with how the tensors differ."""
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    """Tensors in both checkpoints that hold NaN or infinity in at least one of them, equal or
    not."""
    heads: set[str] = field(default_factory=set)
    """Names that belong to heads."""
    settings: list[str] = field(default_factory=list)
    """Clauses about settings of the quantisation that differ, see `differing_settings`."""

    @property
    def identical(self) -> bool:
        """Whether nothing differs and every value is finite."""
        odd = self.different or self.only_first or self.only_second or self.not_finite
        return not (odd or self.settings)

    @property
    def parts(self) -> str:
        """Whether base and heads are equal or differ, such as `base equal, heads differ`."""
        odd = {
            text.partition(" ")[0]
            for text in (*self.different, *self.only_first, *self.only_second)
        }
        base = "differs" if odd - self.heads else "equal"
        heads = "differ" if odd & self.heads else "equal"
        return f"base {base}, heads {heads}" if self.heads else f"base {base}, no heads"


def compare_weights(first: Path | str, second: Path | str) -> Comparison:
    """Compare every tensor bitwise, shape and dtype included, with two tensors in memory at a time.

    Quantised matrices are compared as they are stored, part by part. If one checkpoint has a matrix
    quantised and the other does not, the first is widened to the dtype of the other.

    Tensors that hold NaN or infinity are reported in `not_finite` even if they are equal.

    Raises:
        UserError: a directory is no checkpoint or is damaged.
    """
    one, other = (open_directory(directory) for directory in (first, second))
    a, b = compared([one, other])
    result = Comparison(
        only_first=sorted(a.formats.keys() - b.formats.keys()),
        only_second=sorted(b.formats.keys() - a.formats.keys()),
        settings=differing_settings(one, other),
    )
    heads = a.heads | b.heads
    result.heads |= heads
    for name in tqdm([n for n in a.formats if n in b.formats], desc="comparing", disable=None):
        told = [_as_told(each) for each in (a.formats[name], b.formats[name]) if each is not None]
        if len({*told}) > 1:
            result.different.append(f"{name} (stored as {' and '.join(told)})")
            continue
        ones = _stored(a, b, name)
        others = _stored(b, a, name)
        if name in heads:
            result.heads |= ones.keys() | others.keys()
        result.only_first += sorted(ones.keys() - others.keys())
        result.only_second += sorted(others.keys() - ones.keys())
        for part in (part for part in ones if part in others):
            _compare(result, part, ones[part], others[part], name in a.apart)
    return result


def _stored(side: Compared, other: Compared, name: str) -> dict[str, Tensor]:
    """What one checkpoint stores of a tensor, or the tensor alone if the other has it in no
    format."""
    if other.formats[name] is None:
        return {name: side.read(name, other.dtype(name))}
    if side.formats[name] is None:
        return {name: side.read(name, side.dtype(name))}
    return side.stored(name)


def _compare(result: Comparison, name: str, one: Tensor, other: Tensor, any_values: bool) -> None:
    """Compare two tensors and note the result.

    Args:
        any_values: whether they may be not finite.
    """
    difference = _difference(one, other)
    # Equal tensors need one look.
    if not any_values and not (is_finite(one) and (not difference or is_finite(other))):
        result.not_finite.append(name)
    if difference:
        result.different.append(f"{name} ({difference})")
    else:
        result.equal.append(name)


def _as_told(kind: Format) -> str:
    """A format in words, with how inputs are quantised."""
    rule = kind.inputs.rule
    return kind.name if rule == "none" else f"{kind.name} with inputs by {rule}"


def _difference(a: Tensor, b: Tensor) -> str:
    """A description of how two tensors differ; empty if they are bitwise equal."""
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and {list(b.shape)}"
    if a.dtype != b.dtype:
        return f"{a.dtype} and {b.dtype}".replace("torch.", "")
    if bits_equal(a, b):
        return ""
    return f"differs by up to {(a.double() - b.double()).abs().max().item():.3g}"


class Agreement(NamedTuple):
    """Agreement between the outputs of two models."""

    difference: float
    """Largest difference of logits, relative to the largest logit."""
    same_token: float
    """Fraction of positions at which both models choose the same token, as the base's output or as
    a draft."""


@torch.no_grad()
def compare_logits(
    first: Path | str, second: Path | str, length: int = 64, seed: int = 0
) -> dict[str, Agreement]:
    """Compare logits and greedy tokens, in fp32, on random tokens: `base` and `depth 1` to `depth
    K`.

    K is the larger of the two models' numbers of depths, to which a repeated head is unrolled, but
    at most the number of distinct heads of either model; 0 if a model has no heads.

    Raises:
        UserError: the two have different vocabularies.
    """
    directories = [open_directory(directory) for directory in (first, second)]
    configs = [directory.config for directory in directories]
    if configs[0].vocab_size != configs[1].vocab_size:
        raise UserError(
            f"{first} and {second} differ in vocabulary; their logits cannot be compared"
        )
    heads = [config.mtp for config in configs]
    # A repeated head can be unrolled to any depth, a distinct one only to its own.
    most = max(one.num_depths for one in heads)
    depths = min(most if one.num_depths and one.repeated else one.num_depths for one in heads)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(configs[0].vocab_size, (1, length), generator=generator)
    a, b = (_all_logits(load_model(directory), tokens, depths) for directory in directories)
    return {name: _agreement(logits, b[name]) for name, logits in a.items()}


def _agreement(a: Tensor, b: Tensor) -> Agreement:
    same = (a.argmax(-1) == b.argmax(-1)).float().mean()
    return Agreement(((b - a).abs().max() / a.abs().max()).item(), same.item())


def _all_logits(model: HybridModel, tokens: Tensor, depths: int) -> dict[str, Tensor]:
    """Logits [s, 1, v] of the base and of each depth; a depth's last positions, which lack tokens,
    are cut off."""
    hidden = base_forward(model, tokens, SequenceInput())
    logits = {"base": compute_logits(model, normed_states(model, hidden))}
    for depth, g in enumerate(unroll_depths(model, hidden, tokens, depths), start=1):
        logits[f"depth {depth}"] = compute_logits(model, g)[: tokens.shape[1] - depth]
    return logits


def fingerprint_base(
    directory: Path, known: tuple[Path, str, Files] | None = None
) -> tuple[str, Files]:
    """Fingerprint of the base's weights as they are stored, without heads, as 32 hexadecimal
    digits; and the files that hold the weights.

    All weights are read, with a progress bar, unless the files are those for which the digits are
    known.

    Args:
        known: directory, digits and files of an earlier call.

    Raises:
        UserError: there are no weights, or damaged ones.
    """
    opened = open_directory(directory)
    place = opened.weights_place
    paths = sorted([*place.glob("*.safetensors"), *place.glob("*.distcp")])
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
    # Size and time of change suffice here: the digits come from the same directory.
    if known is not None and (known[0], known[2]) == (directory.resolve(), files):
        return known[1], files
    return _digest(stored_base(opened)), files


def fingerprint_config(config: ModelConfig) -> str:
    """Fingerprint of a config, as 32 hexadecimal digits: equal if the bases compute the same. Heads
    and token ids are ignored."""
    told = {
        key: value
        for key, value in config.to_dict().items()
        if not key.startswith("mtp_")
        and not key.endswith(("_token_id", "_token_ids"))
        and key not in _WITHOUT_EFFECT
    }
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()


def _digest(source: TensorSource) -> str:
    # Sorted, since the two layouts list the same tensors in different orders.
    names = sorted(name for name in source.tensors if not name.startswith("mtp."))

    def one(name: str) -> str:
        tensor = source.read(name).contiguous()
        content = hashlib.blake2b(
            f"{name} {list(tensor.shape)} {tensor.dtype}".encode(), digest_size=16
        )
        content.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        bar.update(tensor.nbytes)
        return content.hexdigest()

    # Hashing releases the interpreter's lock, so that threads use several cores.
    total = sum(source.tensors[name].nbytes for name in names)
    bar = tqdm(
        total=total, unit="B", unit_scale=True, desc="reading the base", disable=None, leave=False
    )
    with bar, ThreadPoolExecutor(_READERS) as pool:
        return hashlib.blake2b("".join(pool.map(one, names)).encode(), digest_size=16).hexdigest()
