"""The radix tree behind `PrefixIndex`: an edge is a run of blocks, split where sequences part.

Source: RadixAttention (SGLang, arXiv 2312.07104), with edges split at block boundaries only. The
ref counts of blocks act as path locks: a sequence references every block of its prefix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.manager.prefix.keys import BlockKeys
from jaxkv.manager.prefix.tree import ROOT


class _Node:
    """A node: an edge of the tree, and the subtree below it.

    Attributes:
      parent: parent node; None for the root of a namespace.
      first: index of the edge's first block in its sequence.
      keys: content of each block of the edge.
      blocks: block ids; 0 for a removed block with descendants (a tombstone).
      children: child nodes, by the first key of their edge.
      namespace: for a root, the bytes of its namespace.
    """

    __slots__ = ("blocks", "children", "first", "keys", "namespace", "parent")

    def __init__(self, parent: _Node | None, first: int, keys: list[bytes], blocks: list[int]):
        self.namespace = b""
        self.parent, self.first, self.keys, self.blocks = parent, first, keys, blocks
        self.children: dict[bytes, _Node] = {}


class RadixIndex:
    """A tree of token runs. A match compares the content itself, so that nothing can collide."""

    def __init__(self, tokens: np.ndarray, parents: np.ndarray, *, gaps: bool):
        del parents, gaps  # known from the tree itself
        num_blocks = len(tokens)
        self._roots: dict[bytes, _Node] = {}
        self._node_of: list[_Node | None] = [None] * num_blocks
        self._depth = [0] * num_blocks  # index of the block in its sequence
        self._size = 0

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy: nodes as a list, parents first, since a deep tree nests too deeply."""
        nodes = list(self._roots.values())
        for node in nodes:  # grows while it is read
            nodes += node.children.values()
        number = {id(node): i for i, node in enumerate(nodes)}
        flat = [
            (number.get(id(n.parent)), n.first, list(n.keys), list(n.blocks), n.namespace)
            for n in nodes
        ]
        return {"nodes": flat, "depth": list(self._depth), "size": self._size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._roots, self._depth, self._size = {}, state["depth"], state["size"]
        self._node_of = [None] * len(self._depth)
        nodes: list[_Node] = []
        parent: int | None
        for parent, first, keys, blocks, namespace in state["nodes"]:
            node = _Node(None if parent is None else nodes[parent], first, keys, blocks)
            node.namespace = namespace
            nodes.append(node)
            if node.parent is None:
                self._roots[namespace] = node
            else:
                node.parent.children[keys[0]] = node
            for block in blocks:
                if block:
                    self._node_of[block] = node

    def match(self, keys: BlockKeys, parent: int) -> np.ndarray:
        node, at = self._locate(keys.root, parent)
        contents = keys.contents()
        found: list[int] = []
        while node is not None and (rest := len(contents) - len(found)):
            if at == len(node.keys):
                node, at = node.children.get(contents[len(found)]), 0
                continue
            edge = node.keys[at : at + rest]
            wanted = contents[len(found) : len(found) + len(edge)]
            if edge != wanted:
                same = next(i for i, key in enumerate(edge) if key != wanted[i])
                found += node.blocks[at : at + same]
                break
            found += node.blocks[at : at + len(edge)]
            at += len(edge)
        while found and not found[-1]:  # tombstones
            found.pop()
        return np.array(found, np.int64)

    def _locate(self, root: bytes, parent: int) -> tuple[_Node | None, int]:
        """Node of the preceding block, and the position behind that block in the node's edge."""
        if parent == ROOT:
            return self._roots.get(root), 0
        node = self._node_of[parent]
        return node, 0 if node is None else self._depth[parent] + 1 - node.first

    def add(self, keys: BlockKeys, start: int, parent: int, blocks: list[int]) -> int:
        first = keys.first + start
        new = keys.contents()[start : start + len(blocks)]
        if parent == ROOT:
            node, at = self._roots.setdefault(keys.root, _Node(None, 0, [], [])), 0
            node.namespace = keys.root
        else:
            node, at = self._locate(keys.root, parent)
            assert node is not None, f"block {parent} is not in the tree"
        for i, (key, block) in enumerate(zip(new, blocks, strict=True)):
            if at == len(node.keys) and key in node.children:
                node, at = node.children[key], 0
            if at == len(node.keys) or node.keys[at] != key:
                self._grow(node, at, first + i, new[i:], list(blocks[i:]))
                break
            node.blocks[at] = block  # replaces a tombstone
            self._node_of[block], self._depth[block] = node, first + i
            at += 1
        self._size += len(blocks)
        return len(blocks)

    def _grow(self, node: _Node, at: int, first: int, new: list[bytes], blocks: list[int]) -> None:
        """Adds a run of blocks behind the first `at` blocks of an edge."""
        if at < len(node.keys):
            node = self._split(node, at)
        if node.children or node.parent is None:
            node.children[new[0]] = node = _Node(node, first, new, blocks)
        else:  # extend a leaf: decoding makes no chain of one-block nodes
            node.keys += new
            node.blocks += blocks
        for i, block in enumerate(blocks):
            self._node_of[block] = node
            self._depth[block] = first + i

    def _split(self, node: _Node, at: int) -> _Node:
        """Splits an edge; the front part becomes a new node, which is returned.

        The caller has just walked the front, so that moving it costs no more than that walk.
        """
        assert node.parent is not None
        front = _Node(node.parent, node.first, node.keys[:at], node.blocks[:at])
        node.parent.children[front.keys[0]] = front
        del node.keys[:at], node.blocks[:at]
        node.parent, node.first = front, node.first + at
        front.children[node.keys[0]] = node
        for block in front.blocks:
            if block:
                self._node_of[block] = front
        return front

    def remove(self, block: int, block_hash: bytes) -> None:
        node = self._node_of[block]
        assert node is not None
        node.blocks[self._depth[block] - node.first] = 0
        self._node_of[block] = None
        self._size -= 1
        while not node.children:  # remove tombstones without descendants
            above = node.parent
            if above is None:
                del self._roots[node.namespace]
                break
            first = node.keys[0]
            while node.blocks and not node.blocks[-1]:
                node.blocks.pop()
                node.keys.pop()
            if node.blocks:
                break
            del above.children[first]
            node = above

    def clear(self) -> None:
        self._roots.clear()
        self._node_of = [None] * len(self._node_of)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    adds_leaves = False  # a tree has to be walked to each parent

    def add_leaves(self, hashes: list[bytes], blocks: list[int]) -> None:
        raise AssertionError("adds_leaves is False")

    def __contains__(self, key: bytes) -> bool:
        raise AssertionError("adds_leaves is False")
