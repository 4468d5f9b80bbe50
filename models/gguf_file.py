"""GGUF files: metadata read in one pass, tensors mapped from the file."""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from jaxkv.errors import ConfigError
from jaxkv.models.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_REQUIRED: Any = object()
_TYPES = {
    int: "an integer", float: "a number", str: "a text", bool: "true or false", list: "an array",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file.

    Attributes:
      name: name in the file.
      shape: sizes, the slowest axis first, as NumPy has them.
      kind: element type or quantisation.
      data: u8[bytes] of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray


class _Damaged(Exception):
    pass


class GGUFFile:
    """An opened GGUF file.

    Args:
      path: path of the file.

    Attributes:
      fields: metadata by key; arrays are lists.
      tensors: tensors by name, not yet read.

    Raises:
      CheckpointError: the file cannot be read, is not GGUF, is cut short, names a tensor or a field
        twice, or is one part of a split file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                if not path.stat().st_size:
                    raise _Damaged("it is empty")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read(_Reader(data))
        except FileNotFoundError:
            raise CheckpointError(f"no such file: {path}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        except (struct.error, OverflowError):
            reason = "it ends within its header; it was cut short, or is damaged"
            raise CheckpointError(f"{path} is not a readable GGUF file: {reason}") from None
        except _Damaged as error:
            raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from None
        self._refuse_parts()

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a field, or `default`.

        Raises:
          ConfigError: a value of another type than `kind`.
        """
        value = self.fields.get(key, _REQUIRED)
        if value is _REQUIRED:
            return default
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{self.path}: {key}={brief(value)} must be {_TYPES[kind]}")
        return value

    def need(self, key: str, kind: type) -> Any:
        """The value of a field.

        Raises:
          CheckpointError: the file lacks it.
          ConfigError: a value of another type than `kind`.
        """
        if key not in self.fields:
            raise CheckpointError(f"{self.path} lacks the field {key}")
        return self.get(key, kind)

    def _read(self, reader: _Reader) -> None:
        if (magic := reader.take(4)) != b"GGUF":
            raise _Damaged(f"it starts with {magic!r}, not with b'GGUF'; of other checkpoints give "
                           "the folder")  # fmt: skip
        version = reader.scalar("I")
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                raise _Damaged("it is big-endian; only little-endian files are supported")
            raise _Damaged(f"its version, {version}, is not supported (one of 2, 3)")
        num_tensors, num_fields = reader.scalar("Q"), reader.scalar("Q")
        for _ in range(num_fields):
            key = reader.text()
            if key in self.fields:
                raise _Damaged(f"it has the field {key} twice")
            try:
                self.fields[key] = reader.value(reader.scalar("I"), key)
            except UnicodeDecodeError:
                raise _Damaged(f"the text of {key} is not UTF-8") from None
        infos = [self._tensor_info(reader) for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Damaged(f"general.alignment={alignment!r} must be a positive integer")
        start = -(-reader.at // alignment) * alignment
        for name, shape, kind, offset in infos:
            block, size = GGML_QUANT_SIZES[kind]
            count = math.prod(shape)
            if shape and shape[-1] % block:
                raise _Damaged(f"rows of {name} have {shape[-1]} values; {kind.name} packs {block}")
            first, length = start + offset, count // block * size
            if first + length > len(reader.data):
                raise _Damaged(f"{name} needs bytes up to {first + length}, and the file has "
                               f"{len(reader.data)}; it was cut short")  # fmt: skip
            if name in self.tensors:
                raise _Damaged(f"it has the tensor {name} twice")
            data = np.frombuffer(reader.data, np.uint8, length, first)
            self.tensors[name] = GGUFTensor(name, shape, kind, data)

    def _tensor_info(self, reader: _Reader) -> tuple[str, tuple[int, ...], Any, int]:
        name = reader.text()
        axes = reader.scalar("I")
        if axes > 8:
            raise _Damaged(f"{name} has {axes} axes")
        shape = tuple(reader.scalar("Q") for _ in range(axes))[::-1]
        kind = reader.scalar("I")
        try:
            return name, shape, GGMLQuantizationType(kind), reader.scalar("Q")
        except ValueError:
            raise _Damaged(
                f"{name} has an unknown type, {kind}; it may need a newer version of gguf"
            ) from None

    def _refuse_parts(self) -> None:
        count = self.get("split.count", int, 0)
        if count <= 1:
            return
        number = self.get("split.no", int, 0) + 1
        suffix = f"-{number:05d}-of-{count:05d}.gguf"
        stem = self.path.name.removesuffix(suffix)
        first, last = (f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in (1, count))
        raise CheckpointError(
            f"{self.path} is part {number} of {count} of a split GGUF file (split.count={count}: "
            f"{first} to {last}), and parts cannot be loaded; merge them with llama.cpp's "
            f"`llama-gguf-split --merge {first} {stem}.gguf` and load {stem}.gguf"
        )


class _Reader:
    """Little-endian values of a buffer, one after the other."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise struct.error
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, form: str) -> Any:
        form = "<" + form
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode()
        except UnicodeDecodeError:
            raise _Damaged(f"a name before byte {self.at} is not UTF-8") from None

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        # Descriptions are for people: a wrong letter in one is no reason to refuse a model.
        errors = "replace" if key.startswith("general.") else "strict"
        if kind == _STRING:
            return self.take(self.scalar("Q")).decode(errors=errors)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY or depth > 4:
            raise _Damaged(f"{key} has an unknown type, {kind}")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            form = np.dtype("<" + _SCALARS[kind])
            return np.frombuffer(self.take(count * form.itemsize), form).tolist()
        if kind == _STRING:
            return [text.decode(errors=errors) for text in self._texts(count)]
        return [self.value(kind, key, depth + 1) for _ in range(count)]

    def _texts(self, count: int) -> list[bytes]:
        """Texts of an array; a large vocabulary has 400,000, so this loop calls nothing else."""
        data, at, found = self.data, self.at, []
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + length(data, at)[0]
            found.append(data[start:at])
        if at > len(data):
            raise struct.error
        self.at = at
        return found


def read_tensor(tensor: GGUFTensor) -> np.ndarray:
    """The tensor's values as float32, dequantised; its kind must be one that `can_read`."""
    rows = tensor.data.reshape(*tensor.shape[:-1], -1)
    if tensor.kind == GGMLQuantizationType.F64:
        return rows.view("<f8").astype(np.float32)
    return dequantize(rows, tensor.kind)


@functools.cache
def can_read(kind: GGMLQuantizationType) -> bool:
    """Whether `read_tensor` reads this element type."""
    if kind == GGMLQuantizationType.F64:
        return True
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def brief(value: Any) -> str:
    """A value for an error message, long ones cut.

    Example:
      >>> brief(list(range(1000)))
      '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...] of 1000'
    """
    if isinstance(value, list) and len(value) > 10:
        return f"{repr(value[:10])[:-1]}, ...] of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
