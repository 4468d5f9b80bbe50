"""Keys of block contents: namespace, all tokens before the block, its own tokens, its media.

A block's hash is chained, `XXH3-128(hash of the block before, tokens, media)`, and the chain starts
with the namespace. Tokens are hashed as little-endian int32, so that keys are equal in every
process and for every integer type. The hash only finds a block; the content is compared on a hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash

from jaxkv._util import as_int
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.manager.arguments import as_integers

HashFunction = Callable[[bytes], bytes]  # any length to 16 bytes

_TOKEN = np.dtype("<i4")
_MAX_BITS = 4096  # of an integer in a namespace; Python refuses to print much longer ones


class Media(NamedTuple):
    """Media behind the placeholder tokens `start : start + length`.

    The id must identify the content: a digest of at least 128 bits, not a file name.
    """

    start: int
    length: int
    id: str | bytes | int


def as_tokens(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as contiguous little-endian int32.

    Raises:
      ConfigError: not a flat sequence of integers from 0 to 2**31 - 1.
    """
    tokens = as_integers("token_ids", token_ids)
    known = tokens.dtype == _TOKEN
    if tokens.size:
        low = np.minimum.reduce(tokens)
        if low < 0 or (not known and int(np.maximum.reduce(tokens)) >= 2**31):
            raise ConfigError(
                f"token_ids must be from 0 to {2**31 - 1} (32 bits), got {low} to {tokens.max()}"
            )
    return tokens if known and tokens.flags.c_contiguous else np.ascontiguousarray(tokens, _TOKEN)


def canonical(value: Any) -> bytes:
    """Canonical bytes of a value: different for values of different content or kind.

    Each value carries its kind and length, so that "X" as an adapter and "X" as a salt, or
    ("ab", "c") and ("a", "bc"), cannot collide.

    Raises:
      JaxkvError: a type without a stable form (floats, objects), or an integer of more than 4096
        bits.

    Example:
      >>> canonical({"salt": "X"}) == canonical({"adapter": "X"})
      False
    """
    if value is None:
        kind, body = b"n", b""
    elif isinstance(value, bool | np.bool_):
        kind, body = b"?", b"1" if value else b"0"
    elif isinstance(value, int | np.integer):
        number = int(cast(int, value))
        if number.bit_length() > _MAX_BITS:
            raise JaxkvError(
                f"an integer in a namespace must have at most {_MAX_BITS} bits, got "
                f"{number.bit_length()}"
            )
        kind, body = b"i", str(number).encode()
    elif isinstance(value, str):
        kind, body = b"s", value.encode(errors="surrogatepass")
    elif isinstance(value, bytes):
        kind, body = b"b", value
    elif isinstance(value, tuple | list):
        items = cast(Sequence[Any], value)
        kind, body = b"t", b"".join(canonical(x) for x in items)
    elif isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value).items()
        pairs = sorted((canonical(k), canonical(v)) for k, v in entries)
        kind, body = b"m", b"".join(k + v for k, v in pairs)
    else:
        raise JaxkvError(
            f"a namespace must consist of None, str, bytes, int, bool, tuples and mappings of "
            f"them, got {type(cast(object, value)).__name__}: {value!r}"
        )
    return kind + str(len(body)).encode() + b":" + body


digest: HashFunction = xxhash.xxh3_128_digest


def root_of(namespace: Any, weight_version: Any) -> bytes:
    """Start of the hash chain of a namespace: 16 bytes, always of the strong hash."""
    return digest(canonical(("jaxkv", weight_version, namespace)))


def media_of_blocks(media: Iterable[Media], block_size: int, end: int) -> dict[int, bytes]:
    """Key parts of blocks with placeholder tokens, by block index: media, and ranges in them.

    Raises:
      JaxkvError: a range that is empty or not within the first `end` tokens, or an id without a
        stable form.
    """
    parts: dict[int, list[tuple[int, int, Any]]] = {}
    for start, length, id_ in media:
        start = as_int(f"media {id_!r}: start", start, high=end - 1)
        length = as_int(f"media {id_!r}: length", length, 1, end - start)
        for block in range(start // block_size, (start + length - 1) // block_size + 1):
            parts.setdefault(block, []).append((start - block * block_size, length, id_))
    return {block: canonical(sorted(p, key=canonical)) for block, p in parts.items()}


class BlockKeys:
    """Keys of the full blocks `first : first + n` of a sequence.

    Attributes:
      root: start of the sequence's hash chain.
      first: index of the first block.
      tokens: i32[n, block_size]; token ids of the blocks.

    Known hashes are passed as `hashes`; computed ones are added to that list.
    """

    def __init__(
        self,
        root: bytes,
        tokens: np.ndarray,
        *,
        first: int = 0,
        parent_hash: bytes | None = None,
        media: Mapping[int, bytes] | None = None,
        hash_function: HashFunction = digest,
        hashes: list[bytes] | None = None,
    ):
        self.root, self.first, self.tokens = root, first, tokens
        self.media = media or {}
        self._parent_hash = root if parent_hash is None else parent_hash
        self._hash = hash_function
        self._hashes = [] if hashes is None else hashes

    def __len__(self) -> int:
        return len(self.tokens)

    def contents(self) -> list[bytes]:
        """Content of each block: its tokens and media, without its predecessors."""
        row = np.dtype((np.void, self.tokens.shape[1] * _TOKEN.itemsize))
        tokens = np.ascontiguousarray(self.tokens)  # the bytes of all rows in one call
        contents = cast(list[bytes], tokens.view(row).ravel().tolist())
        if self.media:
            return [c + self.media.get(i, b"") for i, c in enumerate(contents, self.first)]
        return contents

    def hashes(self) -> list[bytes]:
        """Chained hashes of all blocks."""
        hashes = self._hashes
        if len(hashes) < len(self):
            parent, function = hashes[-1] if hashes else self._parent_hash, self._hash
            rest = self.contents()[len(hashes) :]
            hashes += [parent := function(parent + content) for content in rest]
        return hashes
