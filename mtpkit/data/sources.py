"""Find data: files, folders, globs and prepared data, each a source with its own name."""

import glob
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpkit.data.rows import TABLE_SUFFIXES, TEXT_SUFFIXES, kind_problem
from mtpkit.errors import UserError, listed, raise_problems

logger = logging.getLogger(__name__)

MANIFEST = "mtpkit_data.json"
"""The file that marks a directory of `mtpkit data prepare`."""


@dataclass(frozen=True)
class Source:
    """A named part of the data, for which acceptance can be reported separately."""

    name: str
    files: tuple[Path, ...] = ()
    prepared: Path | None = None
    """A directory of `mtpkit data prepare`, in place of files; `name` is empty if its sources keep
    their own names."""


def find_sources(paths: Iterable[str | Path], warn: bool = True) -> list[Source]:
    """Find the sources that `paths` name: files, folders (with everything below), globs (`**` too),
    prepared data.

    A source has the name of its file or folder without suffix, or the name of `name=path`. Sources
    that would share a name have the end of their paths as names, `a/x.jsonl` and `b/x.jsonl`. A
    file that is named twice, directly or through a folder or glob, belongs to the first source
    only, with a warning unless `warn` is False.

    Raises:
        UserError: paths that do not exist, hold only empty files, or are of an unknown kind; all of
            them are named.
    """
    sources: list[Source] = []
    origins: list[tuple[str, Path | None]] = []
    seen: set[str] = set()
    again: list[Path] = []
    problems = []
    for given in paths:
        try:
            name, path, chosen = _split_name(given)
            prepared = (path / MANIFEST).is_file()
            found, problem = ([path], "") if prepared else _find(path)
        except UserError:
            raise
        except (OSError, ValueError) as error:  # for example a name that is too long or has a NUL
            problems.append(
                f"{str(given)[:200]} cannot be read: {getattr(error, 'strerror', None) or error}"
            )
            continue
        if problem:
            problems.append(problem)
        new: list[Path] = []
        for file in found:
            # A link and its file are the same data.
            place = os.path.realpath(file)
            (again if place in seen else new).append(file)
            seen.add(place)
        if new:
            sources.append(Source(name, prepared=path) if prepared else Source(name, tuple(new)))
            origins.append((name, None if chosen or prepared else Path(os.path.abspath(path))))
    raise_problems("data", problems)
    if not sources:
        raise UserError("data: no files; name files, folders or globs")
    if again and warn:
        logger.warning("data: %s named more than once, and read once", listed(again))
    names = tell_apart(origins)
    return [
        Source(name, source.files, source.prepared)
        for name, source in zip(names, sources, strict=True)
    ]


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files of `find_sources`, in order, each once.

    Raises:
        UserError: any error of `find_sources`; or prepared data, which has no text.
    """
    sources = find_sources(paths)
    prepared = [source.prepared for source in sources if source.prepared]
    if prepared:
        raise UserError(
            f"data: {listed(prepared)} is prepared data, tokens without text; name the files it is"
            " from"
        )
    return [file for source in sources for file in source.files]


def tell_apart(sources: Sequence[tuple[str, Path | None]]) -> list[str]:
    """A name for each source: its own, or the end of its path if others have that name too.

    Args:
        sources: names, each with the path that may replace it; None: the name is kept.

    Example: ("x", a/x.jsonl), ("x", b/x.jsonl), ("y", a/y.jsonl) gives a/x.jsonl, b/x.jsonl, y
    """
    paths: dict[str, set[Path | None]] = defaultdict(set)
    for name, path in sources:
        paths[name].add(path)
    taken = {end for name in paths for end in _ends(name)}
    shared = {
        name: Counter(end for path in rivals if path for end in _ends(path))
        for name, rivals in paths.items()
    }
    names = []
    for name, path in sources:
        if path is not None and len(paths[name]) > 1:
            ends = (end for end in _ends(path) if end not in taken and shared[name][end] == 1)
            name = next(ends, str(path))
        names.append(name)
    return names


def _ends(path: Path | str) -> list[str]:
    """The last part of a path, the last two, and so on."""
    parts = str(path).split("/")
    return ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def _split_name(given: str | Path) -> tuple[str, Path, bool]:
    """Name and path of `name=path` or of a path, and whether the name was given."""
    if not str(given):
        raise UserError("data: one of the paths is empty; name files, folders or globs")
    match = re.fullmatch(r"([\w.-]+)=(.+)", str(given), re.DOTALL)
    # A file whose own name has an equals sign is meant as it stands.
    if match and not Path(given).exists():
        return match[1], Path(match[2]), True
    path = Path(given)
    if (path / MANIFEST).is_file():
        return "", path, False
    if _is_glob(path):
        plain = [part for part in path.parts if not glob.has_magic(part)]
        return (plain[-1] if plain else str(path)), path, False
    return (path.resolve().name if path.is_dir() else path.stem), path, False


def _is_glob(path: Path) -> bool:
    return glob.has_magic(str(path)) and not path.exists()


def _find(path: Path) -> tuple[list[Path], str]:
    """Files at a path that are not empty, and a problem if there are none or some are of an unknown
    kind."""
    if path.is_file():
        found = [path]
        problem = f"{path} is empty"
    elif path.is_dir():
        found = sorted(p for p in path.rglob("*") if _is_data(p.relative_to(path)) and p.is_file())
        inside = [p.parent for p in found if p.name == MANIFEST]
        if inside:
            return (
                [],
                f"folder {path} holds prepared data in {inside[0]}: name that directory itself",
            )
        suffixes = " ".join(sorted((*TEXT_SUFFIXES, *TABLE_SUFFIXES)))
        problem = f"folder {path} has no data files ({suffixes}); a glob may name others"
    elif _is_glob(path):
        found = sorted(
            Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()
        )
        problem = f"{path} holds no data" if found else f"{path} matches no file"
    elif path.is_symlink():
        return [], f"{path} is a link that leads nowhere"
    else:
        return (
            [],
            f"{path} {'is neither a file nor a folder' if path.exists() else 'does not exist'}",
        )
    # An empty file among other files is normal (an __init__.py).
    found = [p for p in found if p.stat().st_size]
    if unknown := [p for p in found if kind_problem(p)]:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        return [], kind_problem(unknown[0]) + more
    return found, "" if found else problem


def _is_data(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.suffix.lower() in (*TEXT_SUFFIXES, *TABLE_SUFFIXES)
