"""The frozen description of a model, the same for all checkpoint layouts."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator

from mtpkit.config.checked import WrongValues, attempt, checked, field_clauses, fields_of, keys_of
from mtpkit.config.sections import (
    SECTIONS,
    AttentionConfig,
    GatedDeltaNetConfig,
    HeadPattern,
    Mamba2Config,
    MlaConfig,
    MlpConfig,
    MoeConfig,
    Number,
    Part,
    Pattern,
    Section,
    sections_of,
    up_to,
)
from mtpkit.config.words import LARGEST_COUNT, HiddenState
from mtpkit.errors import listed, shown
from mtpkit.files import JsonObject

_WHAT = "model config"

_UNKNOWN_DEPTHS_DEFAULT = 3
_UNKNOWN_DEPTHS_MOST = 7
"""Default K, and the largest K of `auto`, for a repeated head if it is unknown for how many depths
it was trained."""

HEAD_RULES = (
    "reads_of_base",
    "reads_of_depth",
    "zero_first_embedding",
    "attention_window",
    "attention_sinks",
)
"""Fields of `MtpConfig` in which implementations of one model differ; the right values are those of
the training."""


@checked("model config", prefix="mtp_")
class MtpConfig(Part):
    """Layers of an MTP depth, number of depths, and inputs of each depth."""

    pattern: HeadPattern = ""
    """Layers of one MTP depth; empty when the model has no heads."""
    num_depths: Annotated[int, up_to(64)] = 0
    """K, the number of depths the heads are trained for. A repeated head may be unrolled further
    when serving."""
    depths_known: bool = True
    """Whether it is known for how many depths a repeated head was trained; if not, `num_depths` is
    1."""
    repeated: bool = Field(default=True, validation_alias="mtp_use_repeated_layer")
    """One physical layer shared by all depths (Nemotron 3), rather than one per depth
    (DeepSeek-V3)."""
    reads_of_base: HiddenState = "after_final_norm"
    """The hidden state of the base that depth 1 reads. lm_head always reads the one after the final
    norm."""
    reads_of_depth: HiddenState = "after_final_norm"
    """The hidden state of a depth that the next depth reads: after or before the depth's own final
    norm."""
    zero_first_embedding: bool = False
    """Whether a depth reads zeros in place of the embedding at position 0 of a document. In
    decoding, a repeated head is at position 0 only at depth 1, whose first entry then lacks the
    document's second token."""
    attention_window: Annotated[int, up_to(LARGEST_COUNT)] = 0
    """Positions up to its own that a query of the heads' attention layers sees, its own among them.
    0: all of its document."""
    attention_sinks: Annotated[int, up_to(LARGEST_COUNT)] = 0
    """With a window: first positions of the document that each query sees as well."""

    def problems(self) -> Iterator[str]:
        """Yield one clause for every setting that cannot be built."""
        if self.attention_sinks and not self.attention_window:
            yield (
                f"mtp_attention_sinks {self.attention_sinks} without mtp_attention_window: every"
                " query sees the whole document"
            )
        if 0 < self.attention_window < self.num_depths:
            yield (
                f"mtp_attention_window {self.attention_window} must not be less than mtp_num_depths"
                f" {self.num_depths}: a depth sees the entries of all depths before it"
            )
        if bool(self.pattern) != bool(self.num_depths):
            yield (
                f"mtp_pattern {shown(self.pattern)} and mtp_num_depths {self.num_depths} must be"
                " set together"
            )
        if not self.depths_known and not (self.num_depths == 1 and self.repeated):
            yield "mtp_depths_known false is for one repeated head with mtp_num_depths 1"

    @property
    def rules(self) -> dict[str, object]:
        """The `HEAD_RULES`, by their keys in files."""
        return {f"mtp_{name}": getattr(self, name) for name in HEAD_RULES}

    def hands_on_normed(self, depth: int) -> bool:
        """Whether the next depth reads the state of this depth (0: the base) after its final norm,
        not before it."""
        return (self.reads_of_depth if depth else self.reads_of_base) == "after_final_norm"

    @property
    def num_layers(self) -> int:
        """Number of physical MTP layers: 1 when repeated, one per depth otherwise, 0 without
        heads."""
        return min(1, self.num_depths) if self.repeated else self.num_depths

    @property
    def default_drafts(self) -> int:
        """Default K: the number of depths the heads are trained for, or 3 if that is unknown."""
        return self.num_depths if self.depths_known else _UNKNOWN_DEPTHS_DEFAULT

    @property
    def most_adaptive_drafts(self) -> int:
        """The largest K that `auto` tries: the number of depths the heads are trained for, or 7 if
        that is unknown."""
        most = self.num_depths if self.depths_known else _UNKNOWN_DEPTHS_MOST
        return min(most, self.attention_window or most)


@checked(_WHAT)
class ModelConfig:
    """Sizes and switches of a hybrid language model with multi-token-prediction (MTP) heads.

    Field names are megatron-core's where it has such a field. Instances are checked on
    construction; `UserError` names every offending field. Files, `of` and `replace` have the fields
    of all parts side by side under the keys of `keys_of`, such as `mamba_num_heads` for
    `mamba2.num_heads`.
    """

    family: str
    """Name of the family in `mtpkit.checkpoint.families` that the model is written as in the
    Hugging Face layout; empty if unknown."""
    vocab_size: Annotated[int, Field(ge=1, le=2**24)]
    hidden_size: Annotated[int, Field(ge=1, le=2**20)]
    pattern: Pattern
    """One letter per base layer, see `SECTIONS`."""
    max_position_embeddings: Annotated[int, Field(ge=1, le=2**30)] = 4096
    mtp: MtpConfig = MtpConfig()
    sections: tuple[Section, ...] = ()
    """Sections of layer kinds that differ from their defaults, at most one of each kind."""
    layernorm_epsilon: Annotated[Number, Field(ge=1e-20, le=1)] = 1e-5
    layernorm_zero_centered_gamma: bool = False
    """Whether all norms except those inside recurrent mixers multiply by 1 + their weights (Gemma,
    Qwen3-Next)."""
    tie_word_embeddings: bool = False
    init_std: Annotated[Number, Field(ge=0, le=1e3)] = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @field_validator("sections")
    @classmethod
    def _keep_what_differs(cls, sections: tuple[Section, ...]) -> tuple[Section, ...]:
        # Configs of one model are equal, whether its file wrote the defaults or left them out.
        given = {section.letter: section for section in sections}
        assert len(given) == len(sections), "at most one section of a layer kind"
        kept = (given[letter] for letter in SECTIONS if letter in given)
        return tuple(section for section in kept if section != type(section).default())

    @field_validator("bos_token_id", "eos_token_ids", "pad_token_id")
    @classmethod
    def _check_vocabulary[T: int | tuple[int, ...] | None](
        cls, tokens: T, info: ValidationInfo
    ) -> T:
        given = () if tokens is None else tokens if isinstance(tokens, tuple) else (tokens,)
        # A wrong vocab_size is not in `data`: it is reported by itself.
        size = info.data.get("vocab_size", math.inf)
        if outside := [shown(token) for token in given if not 0 <= token < size]:
            raise ValueError(
                f"{listed(outside, width=60)} is not in the vocabulary of {size} tokens"
            )
        return tokens

    def problems(self) -> Iterator[str]:
        """Yield one clause for every setting that cannot be built."""
        if not self.pattern:
            yield "pattern is empty"
        heads = self.mtp
        windowed = any(SECTIONS[letter].windowed for letter in heads.pattern)
        if heads.attention_window and heads.pattern and not windowed:
            kinds = listed(section.title for section in SECTIONS.values() if section.windowed)
            yield (
                f"mtp_attention_window {heads.attention_window} is for layers of {kinds}, which the"
                f" heads {shown(heads.pattern)} have none of"
            )
        # Physical layers: a repeated head has its experts once, however many depths it has.
        layers = self.pattern + self.mtp.pattern * self.mtp.num_layers
        for letter, section in SECTIONS.items():
            if count := layers.count(letter):
                yield from self.section(section).requirements(count)
                for other in set(section.apart) & set(layers):
                    yield (
                        f"{section.title} and {SECTIONS[other].title} ({letter}, {other}) cannot be"
                        " in one model"
                    )

    def section[S: Section](self, kind: type[S]) -> S:
        """The sizes and switches of a layer kind."""
        return next(
            (section for section in self.sections if isinstance(section, kind)), kind.default()
        )

    def has(self, kind: type[Section]) -> bool:
        """Whether any layer of the base or the heads is of the given kind."""
        return kind.letter in self.letters

    @property
    def attention(self) -> AttentionConfig:
        return self.section(AttentionConfig)

    @property
    def mlp(self) -> MlpConfig:
        return self.section(MlpConfig)

    @property
    def mla(self) -> MlaConfig:
        return self.section(MlaConfig)

    @property
    def mamba2(self) -> Mamba2Config:
        return self.section(Mamba2Config)

    @property
    def gated_delta_net(self) -> GatedDeltaNetConfig:
        return self.section(GatedDeltaNetConfig)

    @property
    def moe(self) -> MoeConfig:
        return self.section(MoeConfig)

    @property
    def letters(self) -> str:
        """The letters of all layers, those of one MTP depth last."""
        return self.pattern + self.mtp.pattern

    @property
    def hybrid_layer_pattern(self) -> str:
        """Megatron's unified pattern, such as `M-*-/*-/*-` for two depths."""
        return "/".join([self.pattern, *[self.mtp.pattern] * self.mtp.num_depths])

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Make a config from the fields of all parts, given by their keys in files, such as
        `mamba_num_heads`.

        Raises:
            UserError: unknown or missing keys, or wrong values, all of them named.
        """
        # Callers give the fields of the parts, not the parts.
        clauses = [f"{key} is unknown" for key in ("mtp", "sections") if key in values]
        parts: dict[type[Part], Any] = {}
        kinds: list[type[Part]] = [MtpConfig, *SECTIONS.values()]
        for part in kinds:
            own = {key: values.pop(key) for key in keys_of(part).values() if key in values}
            parts[part] = attempt(part, own, clauses)
        if clauses:
            # The config's own fields are checked as well: one error names everything that is wrong.
            raise WrongValues(
                _WHAT, clauses + field_clauses(cls, values | {"mtp": MtpConfig(), "sections": ()})
            )
        return cls(**values, mtp=parts.pop(MtpConfig), sections=tuple(parts.values()))

    def replace(self, **changes: Any) -> Self:
        """A copy with some values changed, by their keys in files. A number of depths given here
        counts as known."""
        if "mtp_num_depths" in changes:
            changes = {"mtp_depths_known": True} | changes
        return type(self).of(**self.values() | changes)

    def values(self) -> JsonObject:
        """The fields of all parts by their keys in files, in the order of files."""
        nested: dict[str, Sequence[Part]] = {"mtp": [self.mtp], "sections": self._written()}
        found: JsonObject = {}
        for name in keys_of(type(self)):
            for part in nested.get(name, ()):
                found |= part.stored()
            if name not in nested:
                found[name] = getattr(self, name)
        return found

    def _written(self) -> list[Section]:
        """The sections of the model's layers, and others that differ from their defaults."""
        own = sections_of(self.letters)
        return [
            self.section(kind)
            for kind in SECTIONS.values()
            if kind in own or self.section(kind) in self.sections
        ]

    def value(self, key: str) -> Any:
        """One value by its key in files, even if `values` leaves the key out."""
        for part in (self.mtp, *(self.section(kind) for kind in SECTIONS.values())):
            for name, own in keys_of(type(part)).items():
                if own == key:
                    return getattr(part, name)
        return getattr(self, key)

    def departures(self, letters: str) -> JsonObject:
        """Settings of the model, and of its layers with these letters, that differ from their
        defaults, by their keys in files."""
        found: JsonObject = {}
        for letter, kind in SECTIONS.items():
            if letter in letters and letter in self.letters:
                default = kind.default().stored()
                stored = self.section(kind).stored()
                found |= {key: value for key, value in stored.items() if value != default[key]}
        for name, field in fields_of(type(self)).items():
            value = getattr(self, name)
            own = name not in ("mtp", "sections") and not field.is_required()
            if own and value != field.get_default():
                found[name] = value
        return found

    def to_dict(self) -> JsonObject:
        """The values in the form that JSON has; `from_dict` reads them back."""

        def written(value: object) -> object:
            if isinstance(value, tuple):
                return list(map(written, value))
            # JSON has no infinity; a part's `from_file` reads null back.
            return None if value == math.inf else value

        return {key: written(value) for key, value in self.values().items()}

    @classmethod
    def from_dict(cls, values: JsonObject, where: object = _WHAT) -> "ModelConfig":
        """Build from `to_dict`'s values.

        Args:
            where: file of the values, for messages.

        Raises:
            UserError: unknown or missing keys, or wrong values, all of them named.
        """
        for section in SECTIONS.values():
            values = section.from_file(values)
        return config_of_file(where, {}, values)


def config_of_file(
    where: object, keys: Mapping[str, str], fields: Mapping[str, object]
) -> ModelConfig:
    """Build a config from what a file says, with messages that name the file and its own keys.

    Args:
        where: the file.
        keys: key of `ModelConfig.of` -> key of the file, where they differ.

    Raises:
        UserError: as `ModelConfig.of`.
    """
    try:
        return ModelConfig.of(**fields)
    except WrongValues as error:
        # Clauses name keys of `ModelConfig.of`; users know those of their file.
        clauses = [
            re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), clause)
            for clause in error.clauses
        ]
        raise WrongValues(str(where), clauses) from None
