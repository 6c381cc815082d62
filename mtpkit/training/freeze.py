"""The base stays as it is, to the bit: only `mtp.*` is trained."""

import torch
from torch import Tensor, nn

from mtpkit.errors import MtpkitError, listed

HEAD_PREFIX = "mtp."


def freeze_base(model: nn.Module) -> dict[str, nn.Parameter]:
    """Stop gradients and training behaviour everywhere but in the heads.

    Returns:
        The heads' parameters by name, the only ones that require a gradient.
    """
    model.requires_grad_(False)
    model.eval()
    heads = {name: parameter for name, parameter in model.named_parameters() if name.startswith(HEAD_PREFIX)}
    for parameter in heads.values():
        parameter.requires_grad_(True)
    return heads


def fingerprint(model: nn.Module) -> dict[str, int]:
    """One integer for every tensor that training must not change: the sum of its bit patterns.

    These are the base's parameters and persistent buffers, and the router biases of the heads (`expert_bias`), which
    have no gradient but are adjusted by trainers that balance experts.
    """
    return {name: _bit_sum(tensor) for name, tensor in model.state_dict().items() if _is_frozen(name, tensor)}


def check_unchanged(model: nn.Module, before: dict[str, int]) -> None:
    """Compare with an earlier `fingerprint`.

    Raises:
        MtpkitError: frozen tensors changed, all of them named.
    """
    after = fingerprint(model)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise MtpkitError(f"training changed tensors of the frozen base: {listed(changed)}")


def _is_frozen(name: str, tensor: object) -> bool:
    trained = name.startswith(HEAD_PREFIX) and not name.endswith("expert_bias")
    return isinstance(tensor, Tensor) and not trained


def _bit_sum(tensor: Tensor) -> int:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(integer).sum(dtype=torch.int64))
