"""Lines of a family's `config.json`; each translates between keys of the file and fields of
`ModelConfig`."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from mtpkit.checkpoint.recipe import read_recipe
from mtpkit.checkpoint.values import Values
from mtpkit.config import ModelConfig, MtpConfig
from mtpkit.errors import UserError, shown

Settings = Mapping[str, object]
"""Keys of a `config.json` or fields of a `ModelConfig`, with their values."""

UNSET: Final = object()
"""Marks the absence of a value."""


RULE_KEYS: Final = tuple(MtpConfig().rules)
"""Keys of the rules for head inputs, the same under `mtpkit` in a file and in `ModelConfig.of`."""


@dataclass(frozen=True)
class Nested:
    """Settings of the text model that lie under a key of `config.json`, beside those of a vision
    tower."""

    key: str
    model_type: str
    """The `model_type` among the settings under `key`."""
    at_both_levels: tuple[str, ...] = ()
    """Keys that may also be at the top level, with the same value."""

    def settings(self, hf: Settings, where: object = "config.json") -> dict[str, object]:
        """All settings of the text model in one dictionary, with `mtpkit` from the top level.

        Raises:
            UserError: the settings are missing, or a key has different values at the two levels.
        """
        inner = hf.get(self.key)
        if not isinstance(inner, Mapping):
            raise UserError(
                f"{where}: {self.key} {shown(inner)} is not an object with the text model's"
                " settings"
            )
        for key in self.at_both_levels:
            top = hf.get(key)
            own = inner.get(key)
            if top is not None and own is not None and top != own:
                raise UserError(
                    f"{where}: {key} is {shown(top)} but {self.key}.{key} is {shown(own)}; make"
                    " them agree"
                )
        outer = {
            key: hf[key] for key in (*self.at_both_levels, "mtpkit") if hf.get(key) is not None
        }
        return {
            **outer,
            **inner,
            **{key: value for key, value in outer.items() if inner.get(key) is None},
        }

    def around(self, inner: Settings, outer: Settings) -> dict[str, object]:
        """A `config.json` with the text model's settings `inner` under `key`, beside the settings
        `outer`."""
        whole = {**outer, self.key: {key: value for key, value in inner.items() if key != "mtpkit"}}
        whole |= {key: inner[key] for key in self.at_both_levels if key in inner}
        return whole | ({"mtpkit": inner["mtpkit"]} if "mtpkit" in inner else {})


class Line:
    """One line of a family's config, which may stand for several keys.

    Attributes:
        kind: name of a layer kind; the line applies to models that have such layers. Empty: to all
            models.
        counts_heads: whether the line is about the heads alone, and so is rewritten when a file
            gets other heads.
    """

    kind: str = ""
    counts_heads: ClassVar[bool] = False

    def names(self) -> Mapping[str, str]:
        """Field of `ModelConfig` -> key of the file, so that messages can name the key."""
        return {}

    def fields(self) -> Collection[str]:
        """The fields of `ModelConfig` that the line reads and writes, or refuses."""
        return self.names().keys()

    def read(self, file: Values) -> Settings:
        """Fields of `ModelConfig` read from a file. Wrong values are added to the file's list of
        problems."""
        return {}

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        """Keys of the file with their values. `original` is the config that the model came with, if
        any."""
        return {}

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        """Yield one clause for each setting of a model that the line's keys cannot express."""
        yield from ()


@dataclass(frozen=True)
class Key(Line):
    """A key of the file that holds the value of one field."""

    key: str
    field: str
    kind: str = ""
    default: object = UNSET
    """Value if the file lacks the key. Without a default, a missing key is an error."""
    older: str = ""
    """Name of the key in earlier releases."""
    null: object = UNSET
    """The field's value that is written as null."""

    def names(self) -> Mapping[str, str]:
        return {self.field: self.key}

    def read(self, file: Values) -> Settings:
        key = file.first(self.key, self.older)
        if key is None and self.default is UNSET:
            file.problems.append(f"missing key {self.key}")
        return {self.field: self.default if key is None else file.get(key)}

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        value = config.value(self.field)
        return {self.key: None if value == self.null else value}


@dataclass(frozen=True)
class Fixed(Line):
    """A setting of which only one value is supported.

    Attributes:
        key: key of the file; empty if the family has no such key, as in `Fixed("", None,
            "layernorm_zero_centered_gamma", True)`.
        value: supported value of the key; None is not written.
        field: field of `ModelConfig`; empty if it has none.
    """

    key: str
    value: object = None
    field: str = ""
    field_value: object = None
    kind: str = ""

    def fields(self) -> Collection[str]:
        return (self.field,) if self.field else ()

    def read(self, file: Values) -> Settings:
        if self.key:
            file.require(self.key, self.value)
        return {self.field: self.field_value} if self.field else {}

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        return {} if self.value is None else {self.key: self.value}

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        if self.field and (value := config.value(self.field)) != self.field_value:
            yield f"{self.field} {value}"


@dataclass(frozen=True)
class Quantization(Line):
    """`quantization_config`: absent or of a supported kind, see `mtpkit.checkpoint.recipe`. It says
    how weights are stored, so that an export writes it beside weights that are stored so."""

    def read(self, file: Values) -> Settings:
        read_recipe(file)
        return {}


@dataclass(frozen=True)
class EndTokens(Line):
    """`eos_token_id`, which is one token, a list of them or null."""

    key: str = "eos_token_id"

    def names(self) -> Mapping[str, str]:
        return {"eos_token_ids": self.key}

    def read(self, file: Values) -> Settings:
        return {"eos_token_ids": as_token_ids(file.get(self.key))}

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        eos = list(config.eos_token_ids)
        return {self.key: eos[0] if len(eos) == 1 else eos or None}


def as_token_ids(value: object) -> tuple[object, ...]:
    """Token ids under a key of a Hugging Face config, whose value may be one id, a list of ids or
    null."""
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


@dataclass(frozen=True)
class Heads(Line):
    """The number of MTP layers, the number of depths that they were trained for, and the rules for
    their inputs.

    `key` counts physical layers. The key `mtpkit` holds the number of depths that a repeated head
    was trained for; without it, one physical layer counts as a repeated head with an unknown number
    of depths, and several count as distinct heads. `mtpkit` also holds rules for head inputs that
    differ from the family's (`Family.head_rules`).
    """

    counts_heads = True

    key: str = "num_nextn_predict_layers"
    pattern_key: str = ""
    """Key for the layer pattern of a depth; empty if the family has none."""
    default: int = 0
    """Number of physical layers if the file lacks the key."""

    def names(self) -> Mapping[str, str]:
        return {name: f"mtpkit.{name}" for name in ("mtp_num_depths", *RULE_KEYS)}

    def read(self, file: Values) -> Settings:
        physical = file.typed(self.key, self.default)
        own = file.get("mtpkit", {})
        if not isinstance(own, dict):
            file.problems.append(f"mtpkit {shown(own)} is not an object")
            own = {}
        repeated = own.get("mtp_use_repeated_layer", physical <= 1)
        depths = own.get("mtp_num_depths", None if repeated else physical)
        unknown = sorted(own.keys() - {"mtp_num_depths", "mtp_use_repeated_layer", *RULE_KEYS})
        problems = [f"mtpkit.{key} is unknown" for key in unknown]
        if type(repeated) is not bool:
            problems.append(f"mtpkit.mtp_use_repeated_layer {shown(repeated)} is not true or false")
        if type(depths) is not int and "mtp_num_depths" in own:
            problems.append(f"mtpkit.mtp_num_depths {shown(depths)} is not a whole number")
        if not problems and physical and physical != (1 if repeated else depths):
            problems.append(f"{self.key} {shown(physical)} contradicts mtpkit {shown(own)}")
        file.problems.extend(problems)
        rules = {key: own[key] for key in RULE_KEYS if key in own}
        if problems or not physical:
            return rules | {"mtp_num_depths": 0}
        return rules | {
            "mtp_num_depths": 1 if depths is None else depths,
            "mtp_depths_known": depths is not None,
            "mtp_use_repeated_layer": repeated,
        }

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        hf: dict[str, object] = {self.key: config.mtp.num_layers}
        if config.mtp.num_depths and self.pattern_key:
            hf[self.pattern_key] = config.mtp.pattern
        if config.mtp.num_depths and config.mtp.depths_known:
            depths = config.mtp.num_depths
            repeated = config.mtp.repeated
            hf["mtpkit"] = {"mtp_num_depths": depths, "mtp_use_repeated_layer": repeated}
        return hf
