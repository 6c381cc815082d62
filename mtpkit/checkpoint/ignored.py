"""Lists of the modules that a quantised checkpoint holds unquantised, as vLLM 0.33 and SGLang 0.5.23 read them.

Each quantisation method has its own key for the list, and each server has its own rule for which modules an entry
matches: vLLM takes the entries of an fp8 checkpoint as whole names, SGLang as parts of a path.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from mtpkit.checkpoint.families.serving import SERVERS, Server, Serving
from mtpkit.checkpoint.tensors import Shape

Match = Callable[[str, str], bool]
"""Whether an entry matches a module. Called as (entry, module)."""

_NESTED = "quantization"
"""Key inside `quantization_config` under which older files of ModelOpt hold their settings."""
_EXPERTS = re.compile(r".*\.experts(?=\.|$)")


def stack_of(module: str) -> str:
    """The module that holds all experts of a layer if `module` is inside it; otherwise `module` itself."""
    found = _EXPERTS.match(module)
    return found[0] if found else module


def _names_experts(entry: str, module: str) -> bool:
    """Whether an entry names any expert of the module's layer, which servers take as all its experts."""
    stack = stack_of(module)
    return stack != module and stack in entry


def _whole(entry: str, module: str) -> bool:
    return entry == module or _names_experts(entry, module)


def _path(entry: str, module: str) -> bool:
    entry = entry.rstrip(".").removeprefix("model.")
    inside = f".{module.removeprefix('model.')}."
    return f".{entry}." in inside or _names_experts(entry, module)


def _regex(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return _matches(entry.removeprefix("re:"), module)
    return entry == module


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern matches the beginning of a name; one that is no regular expression matches nothing."""
    try:
        return re.match(pattern, module) is not None
    except re.error:
        return False


def _regex_or_end(entry: str, module: str) -> bool:
    return _regex(entry, module) or module.endswith(f".{entry}")


def _glob_or_inside(entry: str, module: str) -> bool:
    stack = stack_of(module)
    return entry in stack or fnmatch(stack, entry) or _names_experts(entry, module)


def _glob_of_parts(entry: str, module: str) -> bool:
    stack = stack_of(module)
    return any(fnmatch(part, entry) for part in (stack, *stack.split("."))) or _names_experts(entry, module)


def _inside(entry: str, module: str) -> bool:
    return entry in module


def _negative(entry: str, module: str) -> bool:
    return entry.startswith("-:") and _matches(entry.removeprefix("-:"), module)


@dataclass(frozen=True)
class Method:
    """The format in which a quantisation method lists the modules that it leaves out."""

    keys: tuple[str, ...]
    """Possible keys of the list. Servers read the first that is not empty; a new list is written under the last."""
    means: Mapping[Server, Match]
    entry: Callable[[str], str]
    """Makes the entry that leaves out a module, or all experts of its layer."""


def _as_regex(module: str) -> str:
    return f"{re.escape(stack_of(module))}(\\.|$)"


METHODS: Mapping[str, Method] = {
    "fp8": Method(("ignored_layers", "modules_to_not_convert"), {"vllm": _whole, "sglang": _path}, stack_of),
    "compressed-tensors": Method(
        ("ignore",), {"vllm": _regex, "sglang": _regex_or_end}, lambda module: f"re:{_as_regex(module)}"
    ),
    "modelopt": Method(("exclude_modules", "ignore"), {"vllm": _glob_or_inside, "sglang": _glob_of_parts}, stack_of),
    "awq": Method(("modules_to_not_convert",), {"vllm": _inside, "sglang": _inside}, stack_of),
    "gptq": Method(("dynamic",), {"vllm": _negative, "sglang": _negative}, lambda module: f"-:{_as_regex(module)}"),
}
"""Methods by the beginning of `quant_method`. GPTQ's list is an object, whose keys are the entries."""


@dataclass(frozen=True)
class IgnoreList:
    """The list of one `quantization_config`."""

    settings: Mapping[str, object]
    """The object that holds the list."""
    method: Method

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "IgnoreList | None":
        """The list of a config; None if its quantisation method is not known."""
        name, inner = str(config.get("quant_method", "")).lower(), config.get(_NESTED)
        method = next((method for start, method in METHODS.items() if name.startswith(start)), None)
        return None if method is None else cls(inner if isinstance(inner, Mapping) else config, method)

    @property
    def key(self) -> str:
        """The key that servers read."""
        keys = self.method.keys
        return next((key for key in keys if self.settings.get(key)), keys[-1])

    @property
    def entries(self) -> list[str]:
        """The entries of the list."""
        found = self.settings.get(self.key)
        return [str(entry) for entry in found] if isinstance(found, list | Mapping) else []

    def leaves_out(self, server: Server, module: str) -> bool:
        """Whether the list makes a server build a module, given by the name in that server, without quantisation."""
        return any(self.method.means[server](entry, module) for entry in self.entries)

    def with_entries(self, config: Mapping[str, object], entries: Iterable[str]) -> dict[str, object]:
        """The config with further entries in its list."""
        new = [entry for entry in dict.fromkeys(entries) if entry not in self.entries]
        kept = self.settings.get(self.key)
        as_object = isinstance(kept, Mapping) or (self.key == "dynamic")
        old = dict(kept) if isinstance(kept, Mapping) else {}
        changed = {
            **self.settings,
            self.key: old | {entry: {} for entry in new} if as_object else [*self.entries, *new],
        }
        return changed if self.settings is config else {**config, _NESTED: changed}


def module_of(name: str) -> str:
    """The module that a weight belongs to."""
    return name.removesuffix(".weight")


def head_modules(shapes: Mapping[str, Shape], facts: Serving) -> list[str]:
    """The modules of heads that servers may quantise: matrices, but not embeddings and the like."""
    modules = (module_of(name) for name, shape in shapes.items() if len(shape) > 1)
    return sorted(m for m in modules if not any(re.search(pattern, m) for pattern in facts.no_linears))


def name_in(server: Server, module: str, facts: Serving) -> str:
    """A server's name for a module of the heads."""
    return re.sub(*facts.called[server], module) if server in facts.called else module


def built_plain(server: Server, modules: Iterable[str], facts: Serving, ignored: IgnoreList) -> set[str]:
    """The modules of heads that a server builds without quantisation, whatever the list says."""
    algorithm = str(ignored.settings.get("quant_algo", "")).upper()
    apply = [one for one in facts.unquantized if server in one.servers and one.algorithm in ("", algorithm)]
    return {module for module in modules if any(re.search(one.pattern, module) for one in apply)}


def unlisted(server: Server, modules: Sequence[str], facts: Serving, ignored: IgnoreList) -> list[str]:
    """A server's names for the modules of heads that it would quantise, since the list does not leave them out."""
    plain = built_plain(server, modules, facts, ignored)
    names = [name_in(server, module, facts) for module in modules if module not in plain]
    return [name for name in names if not ignored.leaves_out(server, name)]


def with_heads_listed(
    config: Mapping[str, object], heads: Sequence[str], quantized: Sequence[str], facts: Serving
) -> dict[str, object]:
    """A `quantization_config` whose list says that the modules of heads are not quantised.

    Entries that would match a quantised module of the base in some server are not added; `lint` reports such heads.

    Args:
        heads: modules of the heads, none of which is quantised.
        quantized: modules of the base that are quantised.
    """
    ignored = IgnoreList.of(config)
    if ignored is None:
        return dict(config)
    names = dict.fromkeys(name for server in SERVERS for name in unlisted(server, heads, facts, ignored))
    safe = []
    for entry in dict.fromkeys(map(ignored.method.entry, names)):
        means = ignored.method.means
        if not any(means[server](entry, module) for server in SERVERS for module in quantized):
            safe.append(entry)
    return ignored.with_entries(config, safe)
