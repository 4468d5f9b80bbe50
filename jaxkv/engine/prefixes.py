"""Prefixes in flight: a request that needs one waits for it. Host code: imports no JAX."""

from __future__ import annotations

from jaxkv.engine.requests import Sequence
from jaxkv.manager.block_manager import BlockManager


class PrefixesInFlight:
    """Blocks that running sequences are computing and that are not visible to lookups yet.

    Args:
      manager: block manager.
      enabled: whether requests wait for prefixes in flight.
    """

    def __init__(self, manager: BlockManager, *, enabled: bool):
        self._manager = manager
        self._enabled = enabled and manager.prefix_index is not None
        self._owners: dict[bytes, Sequence] = {}  # block hash: sequence that computes it

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether the first block missing in the cache is being computed by another sequence."""
        if not self._owners or sequence.request.wants_prompt_logprobs:
            return False
        if sequence.waits_for in self._owners:
            return True  # without a lookup: many may wait for one
        hashes, size = self._hashes(sequence), self._manager.block_size
        found = self._manager.lookup(sequence.tokens, namespace=sequence.request.namespace) // size
        usable = (len(sequence.tokens) - 1) // size  # the last token is computed anyway
        sequence.waits_for = hashes[found] if found < usable else b""
        return sequence.waits_for in self._owners

    def begin(self, sequence: Sequence, num_cached: int) -> None:
        """Registers the blocks that a sequence will compute, behind `num_cached` cached tokens."""
        if self._enabled:
            for block_hash in self._hashes(sequence)[num_cached // self._manager.block_size :]:
                self._owners.setdefault(block_hash, sequence)

    def computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Tokens `start : end` are computed: their blocks are visible to lookups."""
        size = self._manager.block_size
        self._disown(sequence, sequence.hashes[start // size : end // size])

    def end(self, sequence: Sequence) -> None:
        """Unregisters all blocks of a sequence."""
        self._disown(sequence, sequence.hashes)

    def cut(self, sequence: Sequence, length: int) -> None:
        """Unregisters blocks from position `length` on: their tokens were replaced."""
        first = length // self._manager.block_size
        self._disown(sequence, sequence.hashes[first:])
        del sequence.hashes[first:]

    def _disown(self, sequence: Sequence, hashes: list[bytes]) -> None:
        if self._owners:
            for block_hash in hashes:
                if self._owners.get(block_hash) is sequence:
                    del self._owners[block_hash]

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        if len(sequence.hashes) < len(sequence.tokens) // self._manager.block_size:
            sequence.hashes = self._manager.block_hashes(
                sequence.tokens, namespace=sequence.request.namespace
            )
        return sequence.hashes
