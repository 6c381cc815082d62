"""Base classes of the sections, one section per layer kind, and the table from pattern letters to
sections."""

import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field

from mtpkit.config.checked import keys_of
from mtpkit.errors import listed
from mtpkit.files import JsonObject

Number = int | float
"""A number that files keep as it was written: 1 is not written as 1.0."""


class Part:
    """Base of checked classes whose keys stand in files beside those of `ModelConfig`; all fields
    have defaults."""

    @classmethod
    @functools.cache
    def default(cls) -> Self:
        """The part with the defaults of all fields."""
        return cls()

    def stored(self) -> JsonObject:
        """The values that files have, by their keys there."""
        return {key: getattr(self, name) for name, key in keys_of(type(self)).items()}

    @classmethod
    def from_file(cls, values: JsonObject) -> JsonObject:
        """Replace those values of a file, given by key, that stand for values that JSON cannot
        express."""
        return values


class Section(Part):
    """Base of the sizes and switches of one layer kind."""

    letter: ClassVar[str]
    """The layer kind's letter in patterns."""
    title: ClassVar[str]
    """Name of the kind in messages."""
    also: ClassVar[tuple[str, ...]] = ()
    """Letters of layer kinds whose settings layers of this kind have, too."""
    apart: ClassVar[tuple[str, ...]] = ()
    """Letters of layer kinds that cannot be in one model with this kind."""
    positive: ClassVar[tuple[str, ...]] = ()
    """Fields that must be positive where the model has such layers."""
    multiples: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of a field and a field that must divide it."""
    windowed: ClassVar[bool] = False
    """Whether layers of heads can attend to a window, see `MtpConfig.attention_window`."""
    at_most: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of a field and a field that it must not exceed."""

    def requirements(self, layers: int) -> Iterator[str]:
        """Yield one clause for each value that a model with `layers` such layers, heads included,
        cannot have."""
        keys = keys_of(type(self))
        values = {name: getattr(self, name) for name in keys}
        # Zeros end the checks: those below divide by such fields.
        if missing := [keys[name] for name in self.positive if values[name] <= 0]:
            yield f"must be positive: {', '.join(missing)}"
            return
        for whole, part in self.multiples:
            if values[whole] % values[part]:
                yield (
                    f"{keys[whole]} {values[whole]} is not a multiple of {keys[part]}"
                    f" {values[part]}"
                )
        for low, high in self.at_most:
            if values[low] > values[high]:
                yield f"{keys[low]} {values[low]} exceeds {keys[high]} {values[high]}"


SECTIONS: dict[str, type[Section]] = {}
"""Letter of a layer kind -> its section."""


def register_section(section: type[Section]) -> None:
    """Register the section of a layer kind by its letter, for patterns and for files."""
    assert section.letter not in SECTIONS, (
        f"{section.letter} stands for {SECTIONS[section.letter].title}"
    )
    SECTIONS[section.letter] = section


def sections_of(letters: str) -> list[type[Section]]:
    """The sections that layers with these letters have settings in, in the order of files."""
    # Layers of a kind read the settings of the kinds in `also`, too: files must have them.
    wanted = {
        one for letter in letters if letter in SECTIONS for one in (letter, *SECTIONS[letter].also)
    }
    return [section for letter, section in SECTIONS.items() if letter in wanted]


def known_letters() -> str:
    """The letters of all kinds with their names, for messages: `M (Mamba2), * (attention), ...`."""
    return ", ".join(f"{letter} ({section.title})" for letter, section in SECTIONS.items())


def _check_letters(pattern: str) -> str:
    if unknown := sorted(set(pattern) - SECTIONS.keys()):
        odd = listed(map(repr, unknown), width=60)
        raise ValueError(f"has unknown layer letter(s) {odd}; known: {known_letters()}")
    return pattern


def _check_length(most: int) -> Callable[[str], str]:
    def check(pattern: str) -> str:
        if len(pattern) > most:
            raise ValueError(f"has {len(pattern)} layers, more than {most}")
        return pattern

    return check


def up_to(most: int) -> Any:
    """Limits of a size: from 0 to far above all existing models, so that absurd sizes are refused
    before building."""
    return Field(ge=0, le=most)


Width = Annotated[int, up_to(2**24)]
Count = Annotated[int, up_to(2**16)]
Pattern = Annotated[str, AfterValidator(_check_letters), AfterValidator(_check_length(2048))]
"""Layers of the base, one letter per layer."""
HeadPattern = Annotated[str, AfterValidator(_check_letters), AfterValidator(_check_length(64))]
"""Layers of one MTP depth, one letter per layer."""
