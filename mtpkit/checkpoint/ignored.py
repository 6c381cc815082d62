"""Lists of the modules that a quantised checkpoint holds unquantised, as vLLM 0.33 and SGLang
0.5.23 read them.

Each quantisation method has its own key for the list, and each server its own rule for which
modules an entry matches. Servers build one matrix from several modules of a file (`qkv_proj` from
`q_proj`, `k_proj` and `v_proj`), and some look only for the name of that matrix. The rules were
read in `layers/quantization/` of both servers: `fp8.py`, `modelopt.py` (in SGLang
`modelopt_quant.py`), `compressed_tensors/`, `auto_awq.py` and `auto_gptq.py` (`awq/`, `gptq/`), and
in the `is_layer_skipped` that these share.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch

from mtpkit.checkpoint.families.serving import OUTPUT_COPY, SERVERS, USUAL, Server, Serving
from mtpkit.checkpoint.tensors import Shape

Rule = Callable[[Sequence[str], str], bool]
"""Whether a list leaves out what has a name. Called as (entries, name)."""

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Matrix that servers build -> the modules of a file that it consists of."""
_CALLED: Mapping[tuple[Server, str], str] = {
    ("sglang", "fused_qkv_a_proj"): "fused_qkv_a_proj_with_mqa"
}
"""Names of such matrices that differ in one server."""

_NESTED = "quantization"
"""Key inside `quantization_config` under which older files of ModelOpt hold their settings."""
_MIXED = "MIXED_PRECISION"
"""ModelOpt's `quant_algo` under which only the modules in `_LAYERS` are quantised."""
_LAYERS = "quantized_layers"
_GROUPS: Mapping[str, int] = {"NVFP4": 16, "W4A16_NVFP4": 16, "FP8_PB_WO": 128}
"""Algorithm -> its `group_size` there, if it has one."""
_EXPERTS = re.compile(r".*\.experts(?=\.|$)")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Modules of latent attention: under ModelOpt, SGLang takes an entry that ends in one of them for
all layers."""


def stack_of(module: str) -> str:
    """The module that holds all experts of a layer if `module` is inside it; otherwise `module`
    itself."""
    found = _EXPERTS.match(module)
    return found[0] if found else module


def _any(match: Callable[[str, str], bool]) -> Rule:
    return lambda entries, name: any(match(entry, name) for entry in entries)


def _either(*rules: Rule) -> Rule:
    return lambda entries, name: any(rule(entries, name) for rule in rules)


def _never(entries: Sequence[str], name: str) -> bool:
    return False


@_any
def _same(entry: str, name: str) -> bool:
    return entry == name


@_any
def _inside(entry: str, name: str) -> bool:
    return entry in name


@_any
def _path(entry: str, name: str) -> bool:
    return f".{entry.rstrip('.')}." in f".{name}."


@_any
def _names_expert(entry: str, name: str) -> bool:
    """Whether an entry names something inside a stack of experts, which stands for the stack;
    servers ask this about all names with `experts`, those of shared experts too."""
    return "experts" in name and name in entry


def _is_match(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return _matches(entry.removeprefix("re:"), name)
    return entry == name


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches the beginning of a name; one that is no regular expression matches
    nothing."""
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


_regex = _any(_is_match)


@_any
def _regex_or_end(entry: str, name: str) -> bool:
    return _is_match(entry, name) or name.endswith(f".{entry}")


def _first_expert(rule: Rule) -> Rule:
    """Servers ask for the three matrices of expert 0, whether it has them or not, and want one
    answer."""
    parts = ("gate_proj", "up_proj", "down_proj")
    return lambda entries, stack: all(rule(entries, f"{stack}.0.{part}") for part in parts)


@_any
def _glob_or_inside(entry: str, name: str) -> bool:
    return entry in name or fnmatch(name, entry)


@_any
def _glob_of_parts(entry: str, name: str) -> bool:
    pattern = f"(?:{entry.replace('.', re.escape('.')).replace('*', '.*')})$"
    if any(_matches(pattern, part) for part in (name, *name.split("."))):
        return True
    last = entry.rpartition(".")[2]
    return last in _LATENT and last in name.rpartition(".")[2]


def _first_negative(entries: Sequence[str], name: str) -> bool:
    """The first entry that matches decides; only those with a minus leave out."""
    for entry in entries:
        if _matches(entry.removeprefix("-:").removeprefix("+:"), name):
            return entry.startswith("-:")
    return False


def _as_it_is(entry: str) -> tuple[str, ...]:
    return (entry,)


def _with_and_without_model(entry: str) -> tuple[str, ...]:
    base = entry.removeprefix("model.")
    return base, f"model.{base}"


@dataclass(frozen=True)
class Module:
    """A module of a file under the names that a server has for it."""

    name: str
    """The module's own name, such as `mtp.layers.0.self_attn.q_proj`."""
    matrix: str
    """Name of the matrix that the server builds from it, such as
    `mtp.layers.0.self_attn.qkv_proj`."""
    file_name: str
    """Its name in the file."""

    @property
    def stack(self) -> str:
        """The stack of experts that it belongs to; empty if it is no expert."""
        stack = stack_of(self.name)
        return stack if stack != self.name else ""


@dataclass(frozen=True)
class Reading:
    """How a server reads the list of one quantisation method."""

    keys: Callable[[str], tuple[str, ...]]
    """Keys of the list by `quant_algo`. The server reads the first one that is there."""
    alone: Rule
    """Whether the list leaves out a matrix that is one module of the file, or whose modules are not
    looked for."""
    experts: Rule
    """Whether it leaves out all experts of a layer. Called with the name of the stack."""
    together: Rule = _never
    """Whether it leaves out a matrix of several modules, called with the name of the matrix."""
    part: Rule | None = None
    """Whether it leaves out one module of such a matrix; None: modules are not looked for."""
    parts_unless: Rule | None = None
    """If set, modules of a matrix must agree even where the list leaves out the matrix, unless this
    holds for the matrix's name."""
    needs_table: bool = False
    """Whether modules are looked for only if the server's model says what its matrices consist
    of."""
    skips_empty: bool = False
    """Whether an empty list counts as absent."""
    renames: bool = False
    """Whether entries are renamed as `Serving.renamed` says before they are compared."""
    variants: Callable[[str], tuple[str, ...]] = _as_it_is
    """The forms in which an entry is compared."""
    dtypes: str = ""
    """When unquantised modules, but not experts, are recognised in the files without a list:
    `always` or `unlisted`, which is where there is no list; empty: never."""


def _keys(*names: str) -> Callable[[str], tuple[str, ...]]:
    return lambda algorithm: names


def _sglang_modelopt_keys(algorithm: str) -> tuple[str, ...]:
    if algorithm == _MIXED:
        return "ignore", "exclude_modules"
    return (
        ("ignore", "modules_to_not_convert", "exclude_modules")
        if "NVFP4" in algorithm
        else ("ignore",)
    )


@dataclass(frozen=True)
class Method:
    """One line of the table of methods: the key of a list, the syntax of its entries, and how
    servers match them. Entries are read by `servers` and written by `entry`."""

    keys: tuple[str, ...]
    """Keys under which a list is written: the first one that is there already, otherwise the
    last."""
    servers: Mapping[Server, Reading]
    entry: Callable[[str], str] = stack_of
    """Makes the entry that leaves out a module, or all experts of its layer."""
    nested_key: str = ""
    """Key of the list in older files, which hold their settings in an object of their own; empty:
    the same as in newer files."""
    is_object: bool = False
    """Whether the list is an object whose keys are the entries."""
    by_matrix: tuple[str, ...] = ()
    """Last parts of the names of modules that are listed as their matrix: a server takes an entry
    that ends in one of them for all layers."""
    output_in: tuple[Server, ...] = ()
    """Servers that quantise a head's copy of the output layer unless it is listed."""
    all_inside: Callable[[str], str] | None = None
    """Makes the entry that leaves out all modules inside one, for readers that know other names of
    the heads' modules; None: an entry cannot say that."""
    twins: tuple[str, ...] = ()
    """Keys that all get new entries, since other readers know only one of them."""


def _as_glob(module: str) -> str:
    """With a star at the end where the plain name would mean all layers."""
    return f"{module}*" if module.rpartition(".")[2] in _LATENT else stack_of(module)


def _as_regex(module: str) -> str:
    return f"{re.escape(stack_of(module))}(\\.|$)"


_FP8_KEYS = _keys("ignored_layers", "modules_to_not_convert")

METHODS: Mapping[str, Method] = {
    "fp8": Method(
        ("ignored_layers", "modules_to_not_convert"),
        {
            "vllm": Reading(
                _FP8_KEYS,
                _either(_same, _names_expert),
                _names_expert,
                together=_same,
                part=_same,
                skips_empty=True,
            ),
            "sglang": Reading(
                _FP8_KEYS,
                _either(_path, _names_expert),
                _either(_path, _names_expert),
                part=_path,
                renames=True,
                variants=_with_and_without_model,
            ),
        },
    ),
    "compressed-tensors": Method(
        ("ignore",),
        {
            "vllm": Reading(
                _keys("ignore"), _regex, _first_expert(_regex), together=_regex, part=_regex
            ),
            "sglang": Reading(
                _keys("ignore"),
                _regex_or_end,
                _first_expert(_regex_or_end),
                together=_same,
                part=_regex_or_end,
                needs_table=True,
                renames=True,
            ),
        },
        lambda module: f"re:{_as_regex(module)}",
        all_inside=lambda place: f"re:^{re.escape(place)}\\..*",
    ),
    "modelopt": Method(
        ("ignore",),
        {
            "vllm": Reading(
                _keys("ignore", "exclude_modules"),
                _either(_glob_or_inside, _names_expert),
                _either(_glob_or_inside, _names_expert),
                together=_glob_or_inside,
                part=_same,
                parts_unless=_same,
            ),
            "sglang": Reading(
                _sglang_modelopt_keys,
                _either(_path, _names_expert, _glob_of_parts),
                _glob_of_parts,
                together=_glob_of_parts,
                part=_path,
                parts_unless=_never,
                renames=True,
            ),
        },
        _as_glob,
        nested_key="exclude_modules",
        by_matrix=_LATENT,
        output_in=("vllm",),
        all_inside=lambda place: f"{place}*",
        twins=("ignore", "exclude_modules"),
    ),
    "awq": Method(
        ("modules_to_not_convert",),
        {
            "vllm": Reading(
                _keys("modules_to_not_convert"),
                _inside,
                _inside,
                together=_inside,
                part=_inside,
                dtypes="unlisted",
            ),
            "sglang": Reading(_keys("modules_to_not_convert"), _inside, _inside),
        },
    ),
    "gptq": Method(
        ("dynamic",),
        {
            "vllm": Reading(_keys("dynamic"), _first_negative, _first_negative, dtypes="always"),
            "sglang": Reading(_keys("dynamic"), _first_negative, _never),
        },
        lambda module: f"-:{_as_regex(module)}",
        is_object=True,
    ),
}
"""Methods by the beginning of `quant_method`."""


@dataclass(frozen=True)
class IgnoreList:
    """The list of one `quantization_config`."""

    settings: Mapping[str, object]
    """The object that holds the list."""
    method: Method
    nested: bool = False
    """Whether it is inside ModelOpt's object `quantization`."""
    facts: Serving = USUAL
    """Facts about the family."""
    letters: int = 0
    """Length of the base's pattern."""

    @classmethod
    def of(
        cls, config: Mapping[str, object], facts: Serving = USUAL, letters: int = 0
    ) -> "IgnoreList | None":
        """The list of a config; None if its quantisation method is not known."""
        name = str(config.get("quant_method", "")).lower()
        inner = config.get(_NESTED)
        method = next((method for start, method in METHODS.items() if name.startswith(start)), None)
        if method is None:
            return None
        if isinstance(inner, Mapping):
            return cls(inner, method, True, facts, letters)
        return cls(config, method, False, facts, letters)

    @property
    def algorithm(self) -> str:
        """ModelOpt's `quant_algo`; empty with other methods."""
        return str(self.settings.get("quant_algo") or "").upper()

    @property
    def key(self) -> str:
        """The key under which entries are written."""
        if self._old_key:
            return self._old_key
        return next((key for key in self.method.keys if key in self.settings), self.method.keys[-1])

    @property
    def _old_key(self) -> str:
        return self.method.nested_key if self.nested else ""

    @property
    def entries(self) -> list[str]:
        """The entries that any server reads."""
        return list(dict.fromkeys(entry for server in SERVERS for entry in self._read_by(server)))

    def _read_by(self, server: Server) -> list[str]:
        reading = self.method.servers[server]
        keys = (self._old_key,) if self._old_key else reading.keys(self.algorithm)
        there = [
            key
            for key in keys
            if self.settings.get(key) or (key in self.settings and not reading.skips_empty)
        ]
        found = self.settings.get(there[0]) if there else None
        return [str(entry) for entry in found] if isinstance(found, list | Mapping) else []

    def _listed(self, key: str) -> list[object] | Mapping[str, object]:
        """The list under a key, empty if there is none."""
        found = self.settings.get(key)
        return found if isinstance(found, list | Mapping) else []

    def modules(self, server: Server, names: Iterable[str]) -> dict[str, Module]:
        """The modules of a file under a server's names, by their names in the file."""
        called = self.facts.called.get(server, lambda name, letters: name)
        own = {name: called(name, self.letters) for name in names}
        together = {*own.values()}
        return {
            name: Module(own[name], self._matrix(server, own[name], together), name) for name in own
        }

    def _matrix(self, server: Server, name: str, names: set[str]) -> str:
        start, dot, last = name.rpartition(".")
        for matrix, parts in FUSED.items():
            if (
                last in parts
                and stack_of(name) == name
                and all(start + dot + part in names for part in parts)
            ):
                return start + dot + _CALLED.get((server, matrix), matrix)
        return name

    def leaves_out(self, server: Server, module: Module) -> bool:
        """Whether a server builds a module without quantisation, as far as the config decides."""
        # The list names exceptions; under mixed precision the quantised modules are named.
        if self.algorithm == _MIXED and not self._is_quantized_layer(module):
            return True
        return self.lists(server, self._read_by(server), module)

    def _is_quantized_layer(self, module: Module) -> bool:
        """Whether `quantized_layers`, which old and new files of ModelOpt have, names a module."""
        layers = self.settings.get(_LAYERS)
        names = list(layers) if isinstance(layers, Mapping) else []
        inside = f"{module.stack}." if module.stack else ""
        return any(
            name in (module.name, module.matrix, module.stack)
            or (inside and str(name).startswith(inside))
            for name in names
        )

    def lists(self, server: Server, entries: Sequence[str], module: Module) -> bool:
        """Whether entries make a server leave out a module."""
        reading = self.method.servers[server]
        entries = self._compared(server, entries)
        # Servers build all experts of a layer as one module, which is quantised or not.
        if module.stack:
            return reading.experts(entries, module.stack)
        if module.matrix == module.name:
            return reading.alone(entries, module.name)
        if reading.part is None or not self._looks_for_parts(server, module):
            return reading.alone(entries, module.matrix)
        # An entry for the matrix does as well as entries for all of its modules.
        return reading.together(entries, module.matrix) or reading.part(entries, module.name)

    def _compared(self, server: Server, entries: Sequence[str]) -> list[str]:
        """Entries in the forms in which a server compares them."""
        reading = self.method.servers[server]
        forms = [form for entry in entries for form in reading.variants(entry)]
        if reading.renames and server in self.facts.renamed:
            return [form.replace(*self.facts.renamed[server]) for form in forms]
        return forms

    def answer(self, server: Server, module: Module) -> bool:
        """The answer that a server wants to be the same for all modules of a matrix."""
        reading = self.method.servers[server]
        if module.matrix == module.name or reading.parts_unless is None or reading.part is None:
            return self.leaves_out(server, module)
        entries = self._compared(server, self._read_by(server))
        return reading.parts_unless(entries, module.matrix) or reading.part(entries, module.name)

    def _looks_for_parts(self, server: Server, module: Module) -> bool:
        reading = self.method.servers[server]
        last = module.matrix.rpartition(".")[2]
        return reading.part is not None and not (
            reading.needs_table and last in self.facts.no_table.get(server, ())
        )

    def sees_dtype(self, server: Server, module: Module) -> bool:
        """Whether a server recognises in the files that a module is not quantised."""
        when = self.method.servers[server].dtypes
        if module.stack or not when:
            return False
        if when == "always":
            return not self.settings.get("modules_in_block_to_quantize")
        return not self._read_by(server) and module.name == module.file_name

    def built_plain(self, server: Server, names: Iterable[str]) -> set[str]:
        """The modules of heads that a server builds without quantisation, whatever the config
        says."""
        apply = [
            one
            for one in self.facts.unquantized
            if server in one.servers and one.algorithm in self.algorithm
        ]
        plain = {name for name in names if any(re.search(one.pattern, name) for one in apply)}
        if server in self.method.output_in:
            return plain
        return plain | {name for name in names if re.search(OUTPUT_COPY, name)}

    def unlisted(self, server: Server, names: Sequence[str]) -> list[Module]:
        """The unquantised modules of heads that a server would quantise, since the config does not
        leave them out."""
        plain = self.built_plain(server, names)
        modules = self.modules(server, names)
        return [
            module
            for name, module in modules.items()
            if name not in plain
            and not self.leaves_out(server, module)
            and not self.sees_dtype(server, module)
        ]

    def can_list(self, server: Server, module: Module) -> bool:
        """Whether any entry could make a server leave out a module."""
        return not module.stack or self.method.servers[server].experts is not _never

    def to_list(self, server: Server, module: Module) -> str:
        """The name under which a server looks for a module in the list."""
        if module.stack or module.matrix == module.name:
            return module.name
        last = module.name.rpartition(".")[2]
        if self._looks_for_parts(server, module) and last not in self.method.by_matrix:
            return module.name
        return module.matrix

    @property
    def names_no_layers(self) -> bool:
        """Whether these settings leave it to others which modules are quantised."""
        return self.algorithm == _MIXED and not isinstance(self.settings.get(_LAYERS), Mapping)

    def without_entries(
        self, config: Mapping[str, object], matches: Callable[[str], bool]
    ) -> dict[str, object]:
        """The config without some entries of its list."""
        keys = {
            self._old_key,
            *self.method.twins,
            *(key for one in self.method.servers.values() for key in one.keys(self.algorithm)),
        }
        lists = {
            key: [entry for entry in found if not matches(str(entry))]
            for key in keys
            if isinstance(found := self.settings.get(key), list)
        }
        return self._changed(config, lists)

    def with_layers(
        self, config: Mapping[str, object], algorithms: Mapping[str, str]
    ) -> dict[str, object]:
        """The config with further modules among those that mixed precision names.

        Args:
            algorithms: module -> its algorithm.
        """
        layers = self.settings.get(_LAYERS)
        if self.algorithm != _MIXED or not isinstance(layers, Mapping):
            return dict(config)
        new = {
            module: {"quant_algo": name, "group_size": _GROUPS[name]}
            if name in _GROUPS
            else {"quant_algo": name}
            for module, name in algorithms.items()
        }
        return self._changed(config, {_LAYERS: {**layers, **new}})

    def _changed(
        self, config: Mapping[str, object], changes: Mapping[str, object]
    ) -> dict[str, object]:
        """The config with changed settings."""
        settings = IgnoreList.of(config)
        assert settings is not None
        changed = {**settings.settings, **changes}
        return {**config, _NESTED: changed} if self.nested else changed

    def with_entries(
        self, config: Mapping[str, object], entries: Iterable[str]
    ) -> dict[str, object]:
        """The config with further entries in its list. In an object the first entry that matches
        decides, so that new ones are put before the others."""
        wanted = list(dict.fromkeys(entries))
        keys = dict.fromkeys((self.key, *self.method.twins))
        new = [
            entry
            for entry in wanted
            for key in keys
            if (key == self.key or key in self.settings) and entry not in self._listed(key)
        ]
        if not new:
            return dict(config)
        old = self._listed(self.key)
        if isinstance(old, Mapping) or self.method.is_object:
            kept = old if isinstance(old, Mapping) else {}
            lists: dict[str, object] = {self.key: {entry: {} for entry in new} | dict(kept)}
        else:
            both = [*self.entries, *wanted]
            lists = {
                key: list(dict.fromkeys([*map(str, self._listed(key)), *both])) for key in keys
            }
        return self._changed(config, lists)


def module_of(name: str) -> str:
    """The module that a weight belongs to."""
    return name.removesuffix(".weight")


def linears(shapes: Mapping[str, Shape], facts: Serving) -> list[str]:
    """The modules that servers may quantise: matrices, but not embeddings and the like."""
    modules = (module_of(name) for name, shape in shapes.items() if len(shape) > 1)
    return sorted(
        m for m in modules if not any(re.search(pattern, m) for pattern in facts.no_linears)
    )


@dataclass(frozen=True)
class Stitching:
    """The modules of a checkpoint, of which its lists must say which are not quantised.

    The heads are those that it gets; the base's modules stay as they are.
    """

    heads: Sequence[str]
    """Modules of the heads that are not quantised."""
    quantized: Sequence[str]
    """Modules of the base that are quantised."""
    plain: Sequence[str]
    """Matrices of the base that are not quantised."""
    facts: Serving
    """Facts about the family."""
    letters: int
    """Length of the base's pattern."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Modules of the heads that are quantised, each with ModelOpt's algorithm for it."""
    _known: dict[Server, list[Module]] = field(default_factory=dict)
    """The modules of `_others`, which do not depend on the list."""

    def listed_in(self, config: Mapping[str, object]) -> dict[str, object]:
        """A `quantization_config` whose list says which modules of heads are not quantised.

        Entries that would match a quantised module of the base in some server are not added; `lint`
        reports such heads.
        """
        ignored = IgnoreList.of(config, self.facts, self.letters)
        if ignored is None:
            return dict(config)
        config = self._with_written(dict(config), ignored)

        # Some servers read the files only as long as there is no list: the first entry would make
        # them quantise the base's unquantised matrices, so these are listed too.
        if not ignored.entries and any(
            reading.dtypes == "unlisted" for reading in ignored.method.servers.values()
        ):
            base = _of_base(ignored)
            modules = base.modules("vllm", self.plain).values()
            config = base.with_entries(config, self._safe(base, "vllm", modules))

        # vLLM last, since it reads the files as long as there is no list
        for server in reversed(SERVERS):
            ignored = IgnoreList.of(config, self.facts, self.letters)
            assert ignored is not None
            unlisted = ignored.unlisted(server, self.heads)
            config = ignored.with_entries(config, self._safe(ignored, server, unlisted))

        ignored = IgnoreList.of(config, self.facts, self.letters)
        assert ignored is not None
        inside = ignored.method.all_inside
        places = [] if inside is None or self.written else map(inside, self._places())
        return ignored.with_entries(
            config, [entry for entry in places if not self._is_unsafe(ignored, entry)]
        )

    def is_complete(self, config: Mapping[str, object]) -> bool:
        """Whether the lists of a config are right for the heads already, for all servers."""
        ignored = IgnoreList.of(config, self.facts, self.letters)
        return ignored is None or not (
            self.misread(config) or any(ignored.unlisted(server, self.heads) for server in SERVERS)
        )

    def misread(self, config: Mapping[str, object]) -> list[str]:
        """The quantised modules of the heads that some server would take for unquantised."""
        ignored = IgnoreList.of(config, self.facts, self.letters)
        if ignored is None or ignored.names_no_layers:
            return []
        hidden = {
            module.file_name
            for server in SERVERS
            for module in ignored.modules(server, self.written).values()
            if ignored.leaves_out(server, module)
        }
        return sorted(hidden)

    def _with_written(self, config: dict[str, object], ignored: IgnoreList) -> dict[str, object]:
        """A config whose list does not say that quantised modules of heads are not."""
        names = [*self.written]
        modules = {server: ignored.modules(server, names) for server in SERVERS}
        config = ignored.without_entries(
            config,
            # Other readers look for the names in the file.
            lambda entry: (
                any(_is_match(entry, name) or fnmatch(name, entry) for name in names)
                or any(
                    ignored.lists(server, [entry], module)
                    for server, own in modules.items()
                    for module in own.values()
                )
            ),
        )
        config = ignored.with_layers(config, self.written)
        if not self.written:
            return config
        # The same entries may have been about modules of the base, too.
        before = _of_base(ignored)
        for server in SERVERS:
            after = IgnoreList.of(config, self.facts, self.letters)
            assert after is not None
            after = _of_base(after)
            lost = [
                module
                for module in before.modules(server, self.plain).values()
                if before.leaves_out(server, module) and not after.leaves_out(server, module)
            ]
            config = after.with_entries(config, self._safe(after, server, lost))
        return config

    def _places(self) -> list[str]:
        """The shortest beginnings of names that all modules of the heads share with no module of
        the base: `mtp`, or `model.layers.61`."""
        taken = {
            start for module in (*self.quantized, *self.plain) for start in _beginnings(module)
        }
        places = (
            next((start for start in _beginnings(module) if start not in taken), module)
            for module in self.heads
        )
        return list(dict.fromkeys(places))

    def _safe(
        self, ignored: IgnoreList, server: Server, modules: Iterable[Module]
    ) -> Iterator[str]:
        """Entries for modules, except for matrices of which an entry matches a quantised module of
        the base."""
        entries = {
            module: ignored.method.entry(ignored.to_list(server, module)) for module in modules
        }
        unsafe = {entry for entry in {*entries.values()} if self._is_unsafe(ignored, entry)}
        apart = {module.matrix for module, entry in entries.items() if entry in unsafe}
        yield from (entry for module, entry in entries.items() if module.matrix not in apart)

    def _is_unsafe(self, ignored: IgnoreList, entry: str) -> bool:
        """Whether an entry matches a quantised module of the base in some server."""
        base = _of_base(ignored)
        return any(
            base.lists(server, [entry], other)
            for server in SERVERS
            for other in self._others(base, server)
        )

    def _others(self, base: IgnoreList, server: Server) -> list[Module]:
        """The quantised modules of the base, each stack of experts once."""
        if server not in self._known:
            modules = base.modules(server, self.quantized).values()
            self._known[server] = [*{one.stack or one.name: one for one in modules}.values()]
        return self._known[server]


def _beginnings(module: str) -> Iterator[str]:
    """The names of the modules that a module is inside of, the outermost first, and its own."""
    parts = module.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _of_base(ignored: IgnoreList) -> IgnoreList:
    """The list as it applies to modules of the base, which servers do not rename."""
    return replace(ignored, facts=replace(ignored.facts, called={}))
