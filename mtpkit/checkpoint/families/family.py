"""The definition of a model family: its `config.json`, its weight names, and the settings that it
cannot express."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mtpkit.checkpoint.families.keys import Line, Nested, Settings
from mtpkit.checkpoint.families.serving import USUAL, Serving
from mtpkit.checkpoint.families.table import Entry, Table, Ways
from mtpkit.checkpoint.layouts import megatron
from mtpkit.checkpoint.values import Values
from mtpkit.config import ModelConfig, MtpConfig, config_of_file
from mtpkit.errors import UserError, listed, raise_problems
from mtpkit.model.kinds import KINDS, kinds_in

Layer = Callable[[ModelConfig], Iterable[Entry | Ways]]

SOURCE_ONLY = ("quantization_config",)
"""Keys of a `config.json` that describe its own weight files. Exports store weights differently and
drop these keys."""


def _no_copies(_: ModelConfig) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models in the Hugging Face layout."""

    model_type: str
    """Name of the family in `config.json`."""
    architecture: str
    """Name of the model class in transformers."""
    read_patterns: Callable[[Values], tuple[str, str]]
    """Reads the layer patterns of the base and of one MTP depth (empty without heads) from a
    `config.json`."""
    lines: tuple[Line, ...]
    """All other settings of `config.json`, in the order in which they are written."""
    replaced: tuple[str, ...]
    """Keys that an export does not copy from the `config.json` that the model came with."""

    outside: tuple[Entry, ...]
    """The base's tensors outside its layers, the embedding first."""
    layers: Mapping[str, Layer]
    """Layer kind -> its tensors, named without prefix. Tables leave out the tensors that a model's
    config turns off."""
    base_layer: Callable[[int], str]
    """Prefix of the tensor names of base layer n, where n is the index of a letter of the
    pattern."""
    mtp_outside: Callable[[ModelConfig, int], Iterable[Entry]]
    """The tensors of physical MTP depth d outside its layers, the final norm last. Called as
    (config, d)."""
    mtp_layer: Callable[[ModelConfig, int, int], str]
    """Prefix of the tensor names of layer i of physical MTP depth d. Called as (config, d, i)."""
    published_name: Callable[[str], str] = str
    """Maps the name of a tensor on disk to its name in this family's table."""
    copies: Callable[[ModelConfig], Mapping[str, str]] = _no_copies
    """Name of each head tensor that duplicates one of the base's -> name of the base's tensor. An
    import drops the copies after checking that they are equal; an export writes them unless the
    original had none."""
    serving: Serving = USUAL
    """Expectations of servers about a directory, which `mtpkit.checkpoint.lint` checks."""
    carried: tuple[str, ...] = ()
    """Name prefixes of tensors outside the text model, such as those of a vision tower. Both
    conversions copy these tensors unchanged, in any dtype."""
    head_rules: Settings = field(default_factory=dict)
    """Rules for the inputs of published heads that differ from the defaults of `MtpConfig`, under
    keys such as `mtp_reads_of_base`. The `mtpkit` keys of a checkpoint override them."""
    nested: Nested | None = None
    """Location of the text model's settings if they are not at the top level of `config.json`."""

    def config_from_hf(self, hf: Settings, where: object = "config.json") -> ModelConfig:
        """Read a `config.json`. A key whose value is null counts as absent.

        Args:
            where: the file, for messages.

        Raises:
            UserError: a key is missing, a layer unknown, or a setting wrong or unsupported; the
                message names them all.
        """
        file = Values(hf if self.nested is None else self.nested.settings(hf, where), where)
        pattern, mtp_pattern = self.read_patterns(file)
        fields: dict[str, object] = {
            "family": self.model_type,
            "pattern": pattern,
            "mtp_pattern": mtp_pattern,
        }
        fields |= self.head_rules
        keys: dict[str, str] = {}
        for line in self._lines(pattern + mtp_pattern):
            fields |= line.read(file)
            keys |= line.names()
        raise_problems(file.where, file.problems)
        return config_of_file(where, keys, fields)

    def config_to_hf(
        self, config: ModelConfig, original: Settings | None = None
    ) -> dict[str, object]:
        """Write a `config.json` that transformers and vLLM both read, with the published keys.

        Args:
            original: the config that the base came with; its keys are kept, except those written
                anew, `replaced` and `SOURCE_ONLY`.

        Raises:
            UserError: the family cannot express some settings; the message names them.
        """
        if misfits := list(self.misfits(config)):
            raise UserError(f"a {self.model_type} config.json cannot express: {listed(misfits)}")
        names: dict[str, object] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
        }
        if self.nested is None:
            return self._written(config, original, names)
        inner = self.nested.settings(original) if original else None
        written = self._written(config, inner, {"model_type": self.nested.model_type})
        return self.nested.around(written, {**self._kept(original), **names})

    def _kept(self, original: Settings | None) -> dict[str, object]:
        dropped = (*self.replaced, *SOURCE_ONLY)
        return {key: value for key, value in (original or {}).items() if key not in dropped}

    def _written(
        self, config: ModelConfig, original: Settings | None, names: Settings
    ) -> dict[str, object]:
        hf = {**self._kept(original), **names}
        for line in self._lines(config.letters):
            hf |= line.write(config, original)
        return hf | self._own_settings(config, hf.get("mtpkit", {}))

    @property
    def usual_rules(self) -> Settings:
        """Rules for the inputs of published heads, by key."""
        return {**MtpConfig().rules, **self.head_rules}

    def _own_settings(self, config: ModelConfig, own: object) -> dict[str, object]:
        """The key `mtpkit` with `own` settings and the rules for head inputs that differ from the
        family's; no key if both are empty."""
        assert isinstance(own, dict)
        own = own | {
            key: value for key, value in config.mtp.rules.items() if value != self.usual_rules[key]
        }
        return {"mtpkit": own} if own else {}

    def count_heads(self, config: ModelConfig, original: Settings) -> dict[str, object]:
        """A copy of a `config.json` in which only the keys about the heads change, to the settings
        in `config`.

        Keys of layer kinds that the base lacks count as keys about the heads.
        """
        if self.nested is not None:
            inner = self._counted(config, self.nested.settings(original))
            return self.nested.around(
                inner, {key: value for key, value in original.items() if key != "mtpkit"}
            )
        return self._counted(config, original)

    def _counted(self, config: ModelConfig, original: Settings) -> dict[str, object]:
        base = {"", *_kinds(config.pattern)}
        lines = [
            line
            for line in self._lines(config.letters)
            if line.counts_heads or line.kind not in base
        ]
        hf = {
            key: value
            for key, value in original.items()
            if not (key in self.replaced and key.startswith("mtp"))
        }
        for line in lines:
            hf = _merged(hf, line.write(config, original))
        return hf | self._own_settings(config, hf.get("mtpkit", {}))

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        """Yield one clause for each setting of a model for which this family has no config key or
        no weight names."""
        letters = config.letters
        kinds = kinds_in(letters)
        yield from (f"layers of kind {kind.name}" for kind in kinds if kind.name not in self.layers)
        known: set[str] = set()
        for line in self._lines(letters):
            known.update(line.fields())
            yield from line.misfits(config)
        # no line would write these: a server would take its own value for them
        own = "".join(kind.letter for kind in kinds if kind.name in self.layers)
        departures = config.departures(own)
        yield from (f"{key} {value}" for key, value in departures.items() if key not in known)

    def _lines(self, letters: str) -> list[Line]:
        """The lines that apply to a model with these layer letters."""
        kinds = {"", *_kinds(letters)}
        return [line for line in self.lines if line.kind in kinds]

    def mtp_prefixes(self, config: ModelConfig, depth: int) -> Iterator[str]:
        """Yield the name prefixes of the tensors in the layers of one physical MTP depth."""
        return (self.mtp_layer(config, depth, number) for number in range(len(config.mtp.pattern)))

    def table(self, config: ModelConfig) -> Table:
        """Every tensor of a model, base and heads, under its names in both layouts."""
        return Table(self._entries(config), megatron.parameters(config), self.copies(config))

    def _entries(self, config: ModelConfig) -> Iterator[Entry | Ways]:
        yield self.outside[0]
        layers = {
            letter: list(self.layers[KINDS[letter].name](config)) for letter in set(config.letters)
        }
        for number, letter in enumerate(config.pattern):
            hf = self.base_layer(number)
            own = megatron.base_layer(number)
            yield from (entry.under(hf, own) for entry in layers[letter])
        yield from self.outside[1:]
        for depth in range(config.mtp.num_layers):
            *joining, final_norm = self.mtp_outside(config, depth)
            yield from joining
            for number, letter in enumerate(config.mtp.pattern):
                hf = self.mtp_layer(config, depth, number)
                own = megatron.mtp_layer(depth, number)
                yield from (entry.under(hf, own) for entry in layers[letter])
            yield final_norm


def _merged(settings: Settings, changes: Settings) -> dict[str, object]:
    """Settings with some values changed. Inside nested objects, keys that are not in `changes`
    stay."""
    merged = dict(settings)
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = (
            _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return merged


def _kinds(letters: str) -> list[str]:
    return [kind.name for kind in kinds_in(letters)]
