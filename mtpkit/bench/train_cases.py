"""The trainer's settings for `mtpkit bench train`, which command lines give by the trainer's keys.

Torch is not imported here, so that wrong settings are refused at once.
"""

import itertools
from collections.abc import Iterator, Sequence

from mtpkit.errors import UserError, listed
from mtpkit.training.config.reading import load_config
from mtpkit.training.config.settings import TrainConfig

ON_CPU = ("data.sequence_length=128",)
"""Settings that the command starts with on a CPU, which would need a minute for the defaults."""

SEVERAL = ("data.sequence_length", "loss.kind")
"""Settings that may have several values: each row of the result names its own."""

_RANDOM = ("model=random", "output=none", "data.train=[random]", "heads.init=fresh")
"""Settings that stand for random weights and tokens. Heads are `fresh` unless the user sets
`heads.init`: copies of random layers are random, too, but take time to make and to fit."""

OWN = {
    "model": "--model names the shape",
    "output": "--output names the directory of the result",
    "data.train": "tokens are random",
    "data.eval": "nothing is evaluated",
    "steps": "--steps and --warm-up-steps say how many steps are taken",
}
"""Settings that the benchmark sets itself, and why."""


def training_cases(overrides: Sequence[str]) -> list[TrainConfig]:
    """Read the trainer's settings for each pair of a sequence length and a loss.

    Example: `data.sequence_length=4096,8192 loss.kind=ce,kl` makes four cases.

    Args:
        overrides: `key=value` as for `load_config`; the keys in `SEVERAL` may have several values,
            separated by commas.

    Raises:
        UserError: the benchmark sets a key itself, or any error of `load_config`.
    """
    keys = [override.partition("=")[0] for override in overrides]
    refused = [f"{key} is not set here, since {OWN[key]}" for key in keys if key in OWN]
    if refused:
        raise UserError(listed(refused, separator="; "))
    choices = itertools.product(*map(_alternatives, overrides))
    return [load_config(None, [*_RANDOM, *chosen]) for chosen in choices]


def small_settings(overrides: Sequence[str]) -> list[str]:
    """The settings in `ON_CPU` whose keys are not among the overrides."""
    keys = {override.partition("=")[0] for override in overrides}
    return [setting for setting in ON_CPU if setting.partition("=")[0] not in keys]


def _alternatives(override: str) -> Iterator[str]:
    """Yield an override once for each of its values."""
    key, equals, value = override.partition("=")
    if key not in SEVERAL:
        yield override
        return
    for one in value.split(","):
        yield f"{key}{equals}{one}"
