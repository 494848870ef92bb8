"""Checkpoints on disk: a folder with config.json and safetensors files, opened as one set of named tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from cpumoe.checkpoints.config_fields import check_fields
from cpumoe.checkpoints.formats import CONFIG_FILES, parse_quantization
from cpumoe.checkpoints.json_files import (
    read_json as read_json,  # for callers that have a folder and no checkpoint yet
)
from cpumoe.checkpoints.named_tensors import NamedTensors, listed
from cpumoe.checkpoints.regular_files import refuse_outside, refuse_special_files
from cpumoe.checkpoints.storage import LinearStorage, Quantization, StoredTensor
from cpumoe.checkpoints.tensor_file import TensorFile, TensorInfo, identity
from cpumoe.errors import CheckpointError, UnsupportedScheme
from cpumoe.option_values import INT8_ACTIVATIONS

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

#: The part of a name that leads to the decoder layers, and the number of the layer.
LAYER = re.compile(r"(.*?\b(?:layers|blocks)\.)([0-9]{1,9})\.")

_MANY_LAYERS = 64
_LONGEST_NAME = 1000  # of a tensor; transformers reads the digits of names as numbers


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model (multimodal models nest it)."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def check_activations(activations: str | None) -> str | None:
    """Refuses activations that weights cannot be run with on request."""
    if activations not in (None, INT8_ACTIVATIONS):
        raise ValueError(
            f"activations={activations!r}; {INT8_ACTIVATIONS!r}, or nothing for those of the checkpoint, is accepted"
        )
    return activations


class Checkpoint(NamedTensors):
    """The tensors of a checkpoint by name, whatever file they are in, and its configuration."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], files: Iterable[Path], activations: str | None = None
    ) -> None:
        self.folder = self.place = folder
        self.config = config
        self.activations = check_activations(activations)
        self.files: list[TensorFile] = []
        self._file_of: dict[str, TensorFile] = {}
        try:
            for path in files:
                refuse_outside(folder, path)
                file = TensorFile(path)
                self.files.append(file)
                for name in file.tensors:
                    if len(name) > _LONGEST_NAME:
                        reason = f"{len(name)} characters; up to {_LONGEST_NAME} are accepted"
                        raise CheckpointError(f"{path} has a tensor whose name, {name[:100]}..., has {reason}")
                    if name in self._file_of:
                        raise CheckpointError(f"{name} is in {self._file_of[name].path.name} and in {path.name}")
                    self._file_of[name] = file
        except CheckpointError:
            self.close()
            raise

    @classmethod
    def open(cls, folder: str | Path, activations: str | None = None) -> Checkpoint:
        """Opens a folder. Nothing but JSON and safetensors is ever read.

        ``activations="int8"`` runs weights whose activations the checkpoint leaves in float with int8 ones.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; a checkpoint is one with config.json and safetensors")
        refuse_special_files(folder)
        config = read_json(folder / "config.json")
        index = folder / INDEX_FILE
        single = (folder / SINGLE_FILE).exists()  # before an index, as transformers has it
        if single or not index.exists():
            if not single:
                pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
                hint = f" ({pickled[0]} is a pickle, and pickles are never loaded)" if pickled else ""
                raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
            return cls(folder, config, [folder / SINGLE_FILE], activations)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            if Path(shard).name != shard or shard in ("", ".", ".."):
                raise CheckpointError(f"{index} names the file {shard!r}; files of the folder itself are accepted")
        if missing := [shard for shard in shards if not _is_file(folder / shard)]:
            raise CheckpointError(f"{folder} lacks {listed(missing)}, which {INDEX_FILE} names")
        checkpoint = cls(folder, config, [folder / shard for shard in shards], activations)
        absent = [name for name, shard in weight_map.items() if checkpoint._shard_of(name) != shard]
        if absent:
            checkpoint.close()
            raise CheckpointError(f"{index}: these tensors are not in the files it names: {listed(absent)}")
        return checkpoint

    def _shard_of(self, name: str) -> str | None:
        return self._file_of[name].path.name if name in self._file_of else None

    def check_config(self) -> None:
        """Refuses fields of config.json that no model can have, and many more layers than the files have."""
        check_fields(self.text_config)
        layers, found = self.text_config.get("num_hidden_layers"), len(self._layers)
        # A layer too many is found later, with what it lacks; here it is about those that would take long to build.
        if isinstance(layers, int) and found and layers > _MANY_LAYERS + 2 * found:
            raise CheckpointError(
                f"config.json has num_hidden_layers={layers}, and the files have {found} layers; {found} is accepted"
            )

    @cached_property
    def _layers(self) -> set[str]:
        """What the names of layers start with: ``model.layers.3.``"""
        return {match[0] for name in self.names if (match := LAYER.match(name))}

    @property
    def text_config(self) -> Mapping[str, Any]:
        return text_config(self.config)

    @cached_property
    def quantization_section(self) -> Any:
        """The ``quantization_config`` as it stands in config.json or in a file of its own, or None."""
        found = self.config.get("quantization_config") or self.text_config.get("quantization_config")
        files = {} if found else {self.folder / name: method for name, method in CONFIG_FILES.items()}
        return next((read_json(p) | {"quant_method": method} for p, method in files.items() if p.exists()), found)

    @cached_property
    def quantization(self) -> Quantization | None:
        """Which modules are quantised and how; None for a float checkpoint."""
        section = self.quantization_section
        try:
            parsed = None if section is None else parse_quantization(section)
        except (CheckpointError, UnsupportedScheme) as problem:
            raise type(problem)(f"{self.folder}: quantization_config in config.json: {problem}") from None
        try:
            return None if parsed is None else parsed.fitted_to(self)
        except (CheckpointError, UnsupportedScheme) as problem:
            if str(self.folder) in str(problem):  # of a file that cannot be read
                raise
            raise type(problem)(f"{self.folder}: {problem}") from None

    @cached_property
    def kv_cache_scales(self) -> Mapping[str, StoredTensor]:
        """Return the scales and zero points of a quantised KV cache, as they must be in the files, by name."""
        kv_cache = None if self.quantization is None else self.quantization.kv_cache
        return {} if kv_cache is None else kv_cache.tensors(self.names, self.info)

    def kv_cache_use(self, held: str | None) -> str | None:
        """Return what is done about the KV cache that the configuration announces, in words; None without one.

        Args:
            held: the ``kv_cache`` that was asked for.
        """
        kv_cache = None if self.quantization is None else self.quantization.kv_cache
        return None if kv_cache is None else kv_cache.use(len(self.kv_cache_scales), held)

    def storage_of(self, module: str) -> LinearStorage | None:
        """How the linear named ``module`` is stored, with the activations that were asked for; None for float."""
        storage = None if self.quantization is None else self.quantization.storage_of(module)
        if storage is None or self.activations is None:
            return storage
        return replace(storage, scheme=storage.scheme.with_int8_activations())

    @property
    def names(self) -> KeysView[str]:
        return self._file_of.keys()

    def info(self, name: str) -> TensorInfo:
        return self._file_of[name].tensors[name]

    def can_be_mapped(self, name: str) -> bool:
        """Whether the system maps the file of the tensor ``name``."""
        return self._file_of[name].can_be_mapped

    def read(self, name: str) -> Tensor:
        """The tensor ``name`` in fresh memory."""
        return self._file_of[name].read(name)

    def read_into(self, name: str, out: Tensor, first_byte: int = 0) -> None:
        """Fills the contiguous tensor ``out`` with bytes of ``name``."""
        self._file_of[name].read_into(name, out, first_byte)

    def read_part(self, name: str, out: Tensor, start: Sequence[int]) -> None:
        """Fills ``out`` with the part of ``name`` that begins at the place ``start`` and has the shape of ``out``."""
        self._file_of[name].read_part(name, out, start)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return sum(file.bytes_read for file in self.files)

    def fingerprint(self) -> list[list[str | int]]:
        """What tells whether the files are still those that were opened: name, size, times and inode of each."""
        return [[file.path.name, *identity(file.path.stat())] for file in self.files]

    def refuse_changed(self) -> None:
        """Raises CheckpointError if a file is not the one any more that was opened: what was read may be a mixture."""
        for file in self.files:
            file.refuse_changed()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
