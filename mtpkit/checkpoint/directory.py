"""Model directories of either layout, opened once and handed on: layout, config, weights, and the
files beside them.

A Megatron directory is a `torch_dist` checkpoint itself, a run with
`latest_checkpointed_iteration.txt` and `iter_0000123/` or `release/`, or a folder with
`checkpoint/` in it. Config and tokenizer lie in or beside it.
"""

import functools
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import torch

from mtpkit.checkpoint.families import Family, get_family, only_fit
from mtpkit.checkpoint.families.keys import Settings, as_token_ids
from mtpkit.checkpoint.families.table import Stored, Table
from mtpkit.checkpoint.kv_scales import KVScaleTensors
from mtpkit.checkpoint.layouts import megatron
from mtpkit.checkpoint.layouts.huggingface import (
    INDEX,
    SINGLE,
    CarriedTensors,
    HFReader,
    stored_names,
)
from mtpkit.checkpoint.layouts.megatron import config_from_megatron
from mtpkit.checkpoint.layouts.torch_dist import MegatronReader
from mtpkit.checkpoint.matrices import (
    CheckedWeights,
    Found,
    StoredMatrices,
    Weights,
    find_matrices,
    split_part,
)
from mtpkit.checkpoint.original import open_carried, read_stored
from mtpkit.checkpoint.quantized import CONFIG
from mtpkit.checkpoint.recipe import Recipe, read_recipe
from mtpkit.checkpoint.tensors import require_same_names
from mtpkit.checkpoint.values import Values
from mtpkit.config import ModelConfig
from mtpkit.errors import UserError, listed, raise_problems, shown
from mtpkit.files import JsonObject, is_there, read_json, read_text

Layout = Literal["hf", "megatron"]

_logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
OWN_CONFIG = "mtpkit.json"
MODELOPT = "hf_quant_config.json"
"""File with ModelOpt's settings, used if `config.json` has none."""
RELEASE = "release"
"""Megatron-LM's name for a checkpoint that does not belong to a step of a run."""

_ADAPTER_CONFIG = "adapter_config.json"
_HF_CONFIG = "config.json"
_COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", OWN_CONFIG)
"""Files that show that the companions of a Megatron checkpoint lie in a directory."""


@dataclass(frozen=True)
class ModelDirectory(ABC):
    """A model directory of either layout. `open_directory` opens one.

    Each file is read when something in it is first asked for, and only once: functions hand an
    opened directory on instead of its path. It does not notice changes after that.
    """

    path: Path

    layout: ClassVar[Layout]

    @cached_property
    def _settings(self) -> dict[Path, JsonObject]:
        """The JSON files that were read so far."""
        return {}

    def _read(self, path: Path) -> JsonObject:
        """The content of a JSON file, which callers must not change; raises as `read_json` does."""
        if path not in self._settings:
            self._settings[path] = read_json(path)
        return self._settings[path]

    @property
    @abstractmethod
    def config(self) -> ModelConfig:
        """The model's config.

        Raises:
            UserError: there is no config, or it has unsupported settings.
        """

    @property
    @abstractmethod
    def companions(self) -> Path:
        """The directory that holds the tokenizer and the other files beside the weights."""

    @property
    @abstractmethod
    def carried(self) -> CarriedTensors | None:
        """The tensors outside the text model, if there are any.

        Raises:
            UserError: files are missing or damaged.
        """

    @property
    @abstractmethod
    def recipe(self) -> Recipe | None:
        """The settings of its quantisation, or of that of its original, if there is one.

        Raises:
            UserError: they are damaged or not supported.
        """

    @property
    @abstractmethod
    def is_quantized(self) -> bool:
        """Whether some matrices are stored quantised.

        Raises:
            UserError: files are missing or damaged.
        """

    @property
    @abstractmethod
    def kv_scales(self) -> KVScaleTensors:
        """The scales of keys and values in a cache in fp8, under Megatron's names.

        Raises:
            UserError: as `KVScaleTensors`, or files are missing or damaged.
        """

    @property
    @abstractmethod
    def weights_place(self) -> Path:
        """The directory that holds the files of the weights.

        Raises:
            UserError: there is no checkpoint.
        """

    @abstractmethod
    def weights(
        self,
        fit_config: bool = False,
        device: torch.device | str = "cpu",
        widen: torch.dtype = torch.bfloat16,
        expand_scales: bool = False,
    ) -> Weights:
        """The weights under Megatron's names. Each call returns a new source, which checks what is
        read from it, and which gives quantised matrices as they are stored, too.

        Args:
            fit_config: also check the names and shapes of a Megatron checkpoint's tensors against
                its own config, before a model is built in the sizes that the config claims. Hugging
                Face checkpoints are always checked.
            device: device that tensors are read to: a GPU; any other device means the CPU.
            widen: dtype in which `read` gives quantised matrices.
            expand_scales: see `Table.to_megatron`.

        Raises:
            UserError: files are missing or damaged, or do not fit the config.
        """

    def end_token_ids(self, vocab_size: int) -> frozenset[int]:
        """Tokens that end a sequence according to `generation_config.json` among the companions;
        none without that file.

        Raises:
            UserError: the settings cannot be read, or hold values other than ids of a vocabulary of
                that size.
        """
        path = self.companions / "generation_config.json"
        found = as_token_ids(self._read(path).get("eos_token_id")) if is_there(path) else ()
        odd = [
            shown(token) for token in found if type(token) is not int or not 0 <= token < vocab_size
        ]
        if odd:
            raise UserError(
                f"{path}: eos_token_id {listed(odd, width=120)} is none of the {vocab_size}"
                " token ids"
            )
        return frozenset(token for token in found if isinstance(token, int))


@dataclass(frozen=True)
class HFDirectory(ModelDirectory):
    """A directory in the Hugging Face layout."""

    any_quantization: bool = False
    """Whether the config may have a quantisation that mtpkit cannot read. `weights` always refuses
    it."""

    layout = "hf"

    @property
    def settings(self) -> JsonObject:
        """`config.json`, which callers must not change; raises as `read_json` does."""
        return self._read(self.path / _HF_CONFIG)

    @cached_property
    def config(self) -> ModelConfig:
        """As in `ModelDirectory`. A model whose files contain no tensor of its heads is read
        without heads, whatever its config.json says."""
        values: Settings = self.settings
        # The model has the same sizes and layers, however its weights are stored.
        if self.any_quantization:
            values = {key: value for key, value in values.items() if key != CONFIG}
        elif CONFIG in values:
            # ModelOpt's own file may be needed to understand the settings here.
            values = {**values, CONFIG: self.quantization}
        return self._with_stored_heads(_config_from_hf(values, self.path / _HF_CONFIG))

    def _with_stored_heads(self, config: ModelConfig) -> ModelConfig:
        """The config, without heads if none of their tensors is stored: transformers drops heads
        but keeps their number.

        That is worth a warning if `config.json` gives the number. Without it, some families count
        one head.
        """
        # Not through `reader`: a config is often read alone, and must not need sound weights.
        names = stored_names(self.path) if config.mtp.num_depths else set()
        family = get_family(config.family)
        heads = tuple(
            {
                prefix
                for depth in range(config.mtp.num_layers)
                for prefix in family.mtp_prefixes(config, depth)
            }
        )
        if not names or any(family.published_name(name).startswith(heads) for name in names):
            return config

        *places, key = family.serving.count_key.split(".")
        settings: object = self.settings
        for place in places:
            settings = settings.get(place) if isinstance(settings, Mapping) else None
        if isinstance(settings, Mapping) and settings.get(key) is not None:
            _warn_of_lost_heads(self.path / _HF_CONFIG, config.mtp.num_layers)
        return config.replace(mtp_pattern="", mtp_num_depths=0)

    @property
    def family(self) -> Family:
        return get_family(self.config.family)

    @cached_property
    def reader(self) -> HFReader:
        """The tensors as they are stored; raises as `HFReader` does."""
        return HFReader(self.path, self.family.published_name, self.family.carried)

    @cached_property
    def table(self) -> Table:
        """The names of the tensors in both layouts."""
        return self.family.table(self.config)

    @cached_property
    def stored(self) -> Stored:
        """How the files store their tensors where there is a choice."""
        # `any_quantization` lets settings pass that `matrices` refuses.
        matrices = {} if self.any_quantization else self.matrices
        return self.table.stored_in(self.reader.tensors.keys() | matrices.keys())

    @property
    def companions(self) -> Path:
        return self.path

    @property
    def carried(self) -> CarriedTensors | None:
        carried = self.reader.carried
        return carried if carried.tensors else None

    @cached_property
    def kv_scales(self) -> KVScaleTensors:
        return KVScaleTensors(self.reader, self.table.attentions, self.path)

    @property
    def weights_place(self) -> Path:
        return self.path

    @property
    def quantization(self) -> object:
        """See `quantization_of`; raises as `read_json` does."""
        return quantization_of(self.settings, self.modelopt)

    @property
    def modelopt(self) -> JsonObject | None:
        """The settings that ModelOpt wrote beside `config.json`, if any. Raises as `read_json`
        does."""
        path = self.path / MODELOPT
        return self._read(path) if is_there(path) else None

    @cached_property
    def recipe(self) -> Recipe | None:
        file = Values(self.settings, self.path / _HF_CONFIG)
        recipe = read_recipe(file, self.modelopt)
        raise_problems(file.where, file.problems)
        return recipe

    @property
    def is_quantized(self) -> bool:
        return bool(self.matrices)

    @cached_property
    def matrices(self) -> dict[str, Found]:
        """The quantised matrices by their names in `table`; raises as `find_matrices` does."""
        return find_matrices(self.reader.tensors, self.recipe, self.path)

    def weights(
        self,
        fit_config: bool = False,
        device: torch.device | str = "cpu",
        widen: torch.dtype = torch.bfloat16,
        expand_scales: bool = False,
    ) -> Weights:
        # The reader needs the config, so that an unknown quantisation is refused already unless
        # `any_quantization` let it pass.
        stored = StoredMatrices(self.reader, self.matrices, widen)
        checked = CheckedWeights(stored, self.path, torch.device(device))
        return self.table.to_megatron(checked, self.path, expand_scales)


def quantization_of(settings: Settings, own: JsonObject | None) -> object:
    """`quantization_config`, or ModelOpt's settings beside `config.json`; None without either.

    As in vLLM 0.33 and SGLang 0.5.23, the file beside it also counts where layers have different
    algorithms and `config.json` does not say which.

    Args:
        settings: `config.json`.
        own: ModelOpt's settings, if there are any.
    """
    found = settings.get(CONFIG)
    if own is None or not (found is None or _lacks_algorithms(found)):
        return found
    return {"quant_method": "modelopt", **own}


def _lacks_algorithms(settings: object) -> bool:
    if (
        not isinstance(settings, Mapping)
        or str(settings.get("quant_algo")).upper() != "MIXED_PRECISION"
    ):
        return False
    return "quantized_layers" not in settings


@functools.cache
def _warn_of_lost_heads(path: Path, count: int) -> None:
    """Warn once per process."""
    _logger.warning(
        "%s: no tensor of the %d MTP layer(s) of this model is stored, so it is read without heads",
        path,
        count,
    )


@dataclass(frozen=True)
class MegatronDirectory(ModelDirectory):
    """A directory in the Megatron layout."""

    found: Path
    """The `torch_dist` directory that `path` or its tracker file names, which need not be there."""

    layout = "megatron"

    @property
    def weights_place(self) -> Path:
        return _require_index(self.found)

    @property
    def places(self) -> tuple[Path, ...]:
        """Directories that may hold the files that go with the checkpoint, nearest first.

        Raises:
            UserError: there is no checkpoint.
        """
        checkpoint = self.weights_place
        return tuple(dict.fromkeys((self.path, checkpoint, checkpoint.parent)))

    @cached_property
    def config(self) -> ModelConfig:
        """As in `ModelDirectory`. Megatron's own settings name no family, so the family is the one
        that fits, if exactly one does."""
        # The nearest directory with a config wins, so that a config.json put beside a checkpoint is
        # not overruled by the file of the run around it.
        for place in self.places:
            own = place / OWN_CONFIG
            other = place / _HF_CONFIG
            if is_there(own):
                config = ModelConfig.from_dict(self._read(own), own)
                if config.family:
                    get_family(config.family, own)
                return config
            if is_there(other):
                values = self._read(other)
                if "config" in values:
                    return _config_from_megatron(values["config"], other)
                return _config_from_hf(values, other)

        args = self.reader.read_common_state().get("args")
        if args is None:
            raise UserError(
                f"{self.path}: no config; looked for {OWN_CONFIG} and config.json there, and for"
                " args inside"
            )
        return _config_from_megatron(
            getattr(args, "__dict__", args), f"args in {self.weights_place}"
        )

    @property
    def original_settings(self) -> JsonObject | None:
        """The Hugging Face config that the checkpoint was imported with, if it came with one."""
        for place in self.places:
            if is_there(place / _HF_CONFIG):
                values = self._read(place / _HF_CONFIG)
                return values if "model_type" in values else None
        return None

    @cached_property
    def stored(self) -> Stored:
        """How the original stored its tensors; raises as `read_stored` does."""
        return read_stored(self.places)

    @cached_property
    def reader(self) -> MegatronReader:
        """The tensors as they are stored; raises as `MegatronReader` does."""
        return MegatronReader(self.weights_place)

    @cached_property
    def companions(self) -> Path:
        return next(
            (place for place in self.places if any(is_there(place / name) for name in _COMPANIONS)),
            self.path,
        )

    @cached_property
    def carried(self) -> CarriedTensors | None:
        return open_carried(self.places)

    @cached_property
    def kv_scales(self) -> KVScaleTensors:
        return KVScaleTensors(self.reader, None, self.path)

    @property
    def modelopt(self) -> JsonObject | None:
        """As in `HFDirectory`, of the original."""
        own = next((place / MODELOPT for place in self.places if is_there(place / MODELOPT)), None)
        return None if own is None else self._read(own)

    @cached_property
    def recipe(self) -> Recipe | None:
        """As in `HFDirectory`, by the files that the checkpoint was imported with."""
        file = Values(self.original_settings or {}, self.path / _HF_CONFIG)
        recipe = read_recipe(file, self.modelopt)
        raise_problems(file.where, file.problems)
        return recipe

    @property
    def is_quantized(self) -> bool:
        return any(split_part(name)[1] != "weight" for name in self.reader.tensors)

    def weights(
        self,
        fit_config: bool = False,
        device: torch.device | str = "cpu",
        widen: torch.dtype = torch.bfloat16,
        expand_scales: bool = False,
    ) -> Weights:
        reader = self.reader
        # Widened imports keep the settings of a quantised checkpoint beside their weights.
        recipe = self.recipe if self.is_quantized else None
        found = find_matrices(reader.tensors, recipe, self.path, in_file=False)
        stored = StoredMatrices(reader, found, widen, in_file=False)
        if fit_config:
            require_same_names(self.path, stored.tensors, megatron.parameters(self.config))
        return CheckedWeights(stored, self.path, torch.device(device))


def _config_from_hf(values: Settings, path: Path) -> ModelConfig:
    return get_family(values.get("model_type"), path, "model_type").config_from_hf(values, path)


def _config_from_megatron(values: object, where: object) -> ModelConfig:
    config = config_from_megatron(values, where)
    return config.replace(family=only_fit(config))


def open_directory(
    directory: Path | str | ModelDirectory, any_quantization: bool = False
) -> ModelDirectory:
    """Open a model directory: find out its layout. An opened directory is returned as it is.

    Args:
        any_quantization: see `HFDirectory`.

    Raises:
        UserError: the directory does not exist or has neither layout; the message lists the files
            looked for.
    """
    if isinstance(directory, ModelDirectory):
        return directory
    path = Path(directory)
    if not path.is_dir():
        raise UserError(
            f"{path}: no such model directory; name one that holds config.json or a Megatron"
            " checkpoint"
        )
    # Megatron's files decide, since a Megatron directory may keep the config.json of its original.
    found = _find_torch_dist(path)
    if found is not None:
        return MegatronDirectory(path, found)
    if is_there(path / _HF_CONFIG):
        return HFDirectory(path, any_quantization)
    if is_there(path / _ADAPTER_CONFIG):
        raise UserError(
            f"{path} has {_ADAPTER_CONFIG}, so it holds an adapter: adapters must be merged into"
            " the weights of their model, give the directory with the result"
        )
    raise UserError(
        f"{path} is no model directory: looked for config.json with {SINGLE} or {INDEX}"
        f" (Hugging Face), and for metadata.json with .metadata, {TRACKER}, or checkpoint/"
        " (Megatron)"
    )


def load_config(directory: Path | str) -> ModelConfig:
    """The config of a model directory, where nothing else of it is needed.

    Raises:
        UserError: as `open_directory` and `ModelDirectory.config`.
    """
    return open_directory(directory).config


def find_torch_dist(directory: Path | str) -> Path:
    """The `torch_dist` directory inside a Megatron directory: the latest iteration of a run.

    Raises:
        UserError: there is no checkpoint, or the one that the tracker file names is missing.
    """
    directory = Path(directory)
    return _require_index(_find_torch_dist(directory) or directory)


def _require_index(checkpoint: Path) -> Path:
    if not is_there(checkpoint / ".metadata"):
        raise UserError(f"{checkpoint} holds no Megatron checkpoint: .metadata is missing")
    return checkpoint


def _find_torch_dist(directory: Path) -> Path | None:
    tracker = directory / TRACKER
    if is_there(directory / "metadata.json") or is_there(directory / ".metadata"):
        return directory
    if is_there(tracker):
        return directory / iteration_name(latest_iteration(directory))
    if (directory / "checkpoint").is_dir():
        return directory / "checkpoint"
    return None


def iteration_name(iteration: int | None) -> str:
    """Directory of an iteration inside a run; None: the release."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def latest_iteration(directory: Path | str) -> int | None:
    """The iteration that a run's tracker file names; None for a release, or if no iteration was
    saved yet.

    Raises:
        UserError: the tracker file holds something else.
    """
    tracker = Path(directory) / TRACKER
    text = read_text(tracker).strip() if is_there(tracker) else RELEASE
    if text != RELEASE and not re.fullmatch("[0-9]{1,18}", text):
        raise UserError(
            f"{tracker} holds {shown(text)}; write the number of an existing iteration into it"
        )
    return None if text == RELEASE else int(text)
