"""Which indexed block follows which: parents, children, siblings, in arrays by block."""

from __future__ import annotations

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
        """A run of new blocks, each the child of the one before, the first of `parent`."""
        self.parents[blocks[1:]] = blocks[:-1]
        self._first_child[blocks[:-1]], self._first_child[blocks[-1]] = blocks[1:], 0
        self._next[blocks] = self._previous[blocks] = 0
        self.attach(int(blocks[0]), parent)

    def add_leaves(self, blocks: np.ndarray, parents: np.ndarray) -> None:
        """New blocks, each below its parent, which is none of them."""
        self._first_child[blocks] = self._next[blocks] = self._previous[blocks] = 0
        if len(set(parents.tolist())) == len(parents) and not self._first_child[parents].any():
            self.parents[blocks], self._first_child[parents] = parents, blocks
        else:
            for block, parent in zip(blocks.tolist(), parents.tolist(), strict=True):
                self.attach(block, parent)

    def attach(self, block: int, parent: int) -> None:
        """Puts a block without siblings below `parent`."""
        self.parents[block] = parent
        if parent != ROOT:
            eldest = int(self._first_child[parent])
            self._next[block], self._previous[eldest] = eldest, block
            self._first_child[parent] = block

    def remove(self, block: int) -> list[int]:
        """Takes a block out; returns its children, whose parent is gone now."""
        parent, children = self.parents.item(block), self.children(block)
        before, after = self._previous.item(block), self._next.item(block)
        if before:
            self._next[before] = after
        elif parent >= 0:
            self._first_child[parent] = after
        if after:
            self._previous[after] = before
        if children:
            self.parents[children] = GONE
            self._next[children] = self._previous[children] = 0
        return children

    def clear(self) -> None:
        """Takes out all."""
        self._first_child[:] = self._next[:] = self._previous[:] = 0

    def has_children(self, block: int) -> bool:
        """Whether an indexed block follows this one."""
        return self._first_child.item(block) != 0

    def children(self, block: int) -> list[int]:
        """Indexed blocks whose content follows this one's."""
        found, child = [], self._first_child.item(block)
        while child:
            found.append(child)
            child = self._next.item(child)
        return found

    def subtree(self, block: int) -> list[int]:
        """The block and its descendants, children before parents."""
        order, todo = [], [block]
        while todo:
            order.append(todo.pop())
            todo += self.children(order[-1])
        return order[::-1]
