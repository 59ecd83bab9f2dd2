"""safetensors files, a tensor at a time: read by position, and written by position into files of known layout.

The layout of the output follows from names, shapes and dtypes, which are known before anything is calculated. So a
merged tensor goes straight to its place in its file, from any thread and in any order, and none is kept for others.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.files import sync

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies.

    Attributes:
        name: its name.
        shape: its shape.
        dtype: its dtype.
        path: the file.
        offset: of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path
    offset: int

    @property
    def bytes(self) -> int:
        """Its length."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, none of them read. Format: https://github.com/huggingface/safetensors

    Raises:
        InputError: the file is not whole, or holds a dtype that cannot be merged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= size else None
    except OSError as error:
        raise InputError(f"{path}: the file cannot be read ({error.strerror}).") from error
    except (ValueError, struct.error):
        header = None
    if not isinstance(header, dict):
        raise InputError(f"{path} is not a whole safetensors file; fetch or save it again.")
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise InputError(f"{path}: {name} has dtype {entry['dtype']}; merge models that are not quantised.")
        start, stop = entry["data_offsets"]
        stored = Stored(name, tuple(entry["shape"]), DTYPES[entry["dtype"]], path, 8 + length + start)
        if 8 + length + stop > size or stop - start != stored.bytes:
            raise InputError(f"{path} ends before its tensor {name} does; fetch or save it again.")
        tensors[name] = stored
    return tensors


def find_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of a model's folder, through its index where it has one.

    Raises:
        InputError: no safetensors files, a shard that is missing or not whole, or lacks a tensor that the index names.
    """
    index = folder / INDEX
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            other = any(folder.glob("pytorch_model*.bin"))
            hint = "; save it again with save_pretrained, which writes safetensors" if other else ""
            raise InputError(f"{folder} holds no model.safetensors and no {INDEX}{hint}.")
        return read_header(single)
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{index} is not an index of safetensors files ({error}).") from error
    shards: dict[str, dict[str, Stored]] = {}
    for file in dict.fromkeys(places.values()):
        if not (folder / file).is_file():
            raise InputError(f"{folder}: the shard {file} is missing, though {INDEX} names it.")
        shards[file] = read_header(folder / file)
    for name, file in places.items():
        if name not in shards[file]:
            raise InputError(f"{folder / file} lacks the tensor {name} that {INDEX} places there.")
    return {name: shards[file][name] for name, file in places.items()}


def read_tensor(stored: Stored) -> Tensor:
    """One tensor, in memory of its own.

    Raises:
        InputError: the file cannot be read or has become shorter.
    """
    if not stored.bytes:
        return torch.empty(stored.shape, dtype=stored.dtype)
    buffer = torch.empty(stored.bytes, dtype=torch.uint8)
    view = memoryview(buffer.numpy().data)
    try:
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise InputError(f"{stored.path} ends before its tensor {stored.name} does.")
                done += count
    except OSError as error:
        raise InputError(f"{stored.path}: the file cannot be read ({error.strerror}).") from error
    return buffer.view(stored.dtype).view(stored.shape)


class ShardWriter:
    """The safetensors files of one model, laid out beforehand."""

    def __init__(
        self, folder: Path, tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]], max_shard_bytes: int
    ) -> None:
        """Create the files with their headers.

        Args:
            folder: where.
            tensors: name, shape and dtype, in the order in which they are laid out.
            max_shard_bytes: a file holds no more than this, unless one tensor does.
        """
        shards: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
        filled = 0
        for tensor in tensors:
            size = _bytes(tensor)
            if shards[-1] and filled + size > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(tensor)
            filled += size
        self.folder = folder
        self.total = sum(map(_bytes, tensors))
        self.places: dict[str, Stored] = {}
        self.files: dict[Path, int] = {}
        for number, shard in enumerate(shards, 1):
            single = len(shards) == 1
            path = folder / ("model.safetensors" if single else f"model-{number:05}-of-{len(shards):05}.safetensors")
            self._start(path, shard)

    def _start(self, path: Path, shard: list[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in shard:
            name, shape, dtype = tensor
            stop = offset + _bytes(tensor)
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        for name, shape, dtype in shard:
            self.places[name] = Stored(name, shape, dtype, path, 8 + len(text) + header[name]["data_offsets"][0])
        self.files[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        os.pwrite(self.files[path], struct.pack("<Q", len(text)) + text, 0)
        os.ftruncate(self.files[path], 8 + len(text) + offset)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor in its place; safe from several threads."""
        place = self.places[name]
        if tuple(tensor.shape) != place.shape or tensor.dtype != place.dtype:
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)} is not what the header says")
        if not place.bytes:
            return
        view = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        done = 0
        while done < len(view):
            done += os.pwrite(self.files[place.path], view[done:], place.offset + done)

    def finish(self) -> None:
        """Force the files to the disk and write the index of several."""
        self.close()
        for path in self.folder.glob("*.safetensors"):
            sync(path)
        names = {place.path for place in self.places.values()}
        if len(names) > 1:
            index = {
                "metadata": {"total_size": self.total},
                "weight_map": {name: place.path.name for name, place in self.places.items()},
            }
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def close(self) -> None:
        """Close the files."""
        while self.files:
            os.close(self.files.popitem()[1])


def _bytes(tensor: tuple[str, tuple[int, ...], torch.dtype]) -> int:
    return torch.Size(tensor[1]).numel() * tensor[2].itemsize
