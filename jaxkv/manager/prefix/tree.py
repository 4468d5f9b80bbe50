"""Links between indexed blocks (parents, children, siblings), in arrays by block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

ROOT = -1  # the parent of a sequence's first block
GONE = -2  # the parent of a block that has outlived its own (sliding windows only)


class BlockTree:
    """Links between the indexed blocks."""

    def __init__(self, num_blocks: int):
        self.parents = np.full(num_blocks, ROOT, np.int64)
        self._first_child = np.zeros(num_blocks, np.int32)  # 0: none
        self._next = np.zeros(num_blocks, np.int32)  # siblings
        self._previous = np.zeros(num_blocks, np.int32)

    def add(self, blocks: np.ndarray, parent: int) -> None:
        """Adds a run of blocks, each a child of the one before, the first of `parent`."""
        self.parents[blocks[1:]] = blocks[:-1]
        self._first_child[blocks[:-1]], self._first_child[blocks[-1]] = blocks[1:], 0
        self._next[blocks] = self._previous[blocks] = 0
        self.attach(int(blocks[0]), parent)

    def add_leaves(self, blocks: np.ndarray, parents: np.ndarray) -> None:
        """Adds blocks below their parents, which are not among them."""
        self._first_child[blocks] = self._next[blocks] = self._previous[blocks] = 0
        if len(set(parents.tolist())) == len(parents) and not self._first_child[parents].any():
            self.parents[blocks], self._first_child[parents] = parents, blocks
        else:
            for block, parent in zip(blocks.tolist(), parents.tolist(), strict=True):
                self.attach(block, parent)

    def attach(self, block: int, parent: int) -> None:
        """Adds a block without siblings below `parent`."""
        self.parents[block] = parent
        if parent != ROOT:
            eldest = int(self._first_child[parent])
            self._next[block], self._previous[eldest] = eldest, block
            self._first_child[parent] = block

    def remove(self, block: int) -> list[int]:
        """Removes a block; returns its children, whose parent becomes GONE."""
        parent, children = self.parents.item(block), self.children(block)
        before, after = self._previous.item(block), self._next.item(block)
        if before:
            self._next[before] = after
        elif parent >= 0:
            self._first_child[parent] = after
        if after:
            self._previous[after] = before
        if children:
            self._first_child[block] = 0
            self.parents[children] = GONE
            self._next[children] = self._previous[children] = 0
        return children

    def clear(self) -> None:
        """Removes all blocks."""
        self._first_child[:] = self._next[:] = self._previous[:] = 0

    def has_children(self, block: int) -> bool:
        """Whether a block has indexed children."""
        return self._first_child.item(block) != 0

    def children(self, block: int) -> list[int]:
        """Indexed children of a block."""
        found: list[int] = []
        child = self._first_child.item(block)
        while child:
            found.append(child)
            child = self._next.item(child)
        return found

    def edges(self) -> Iterator[tuple[int, int]]:
        """(parent, child) of all links, each list followed once; no more than there are blocks."""
        following = self._next.tolist()
        left = len(following)
        for parent in np.flatnonzero(self._first_child).tolist():
            child = self._first_child.item(parent)
            while child and left:
                yield parent, child
                child, left = following[child], left - 1

    def subtree(self, block: int) -> list[int]:
        """The block and its descendants, children before parents."""
        order: list[int] = []
        todo = [block]
        while todo:
            order.append(todo.pop())
            todo += self.children(order[-1])
        return order[::-1]
