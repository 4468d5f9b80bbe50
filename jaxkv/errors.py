"""Errors raised by jaxkv: each states what was wrong, with numbers, and how to fix it."""


class JaxkvError(Exception):
    """Base class of the errors that jaxkv raises on purpose."""


class ConfigError(JaxkvError, ValueError):
    """An invalid or unsupported configuration; the message names the field."""


class OutOfBlocksError(JaxkvError):
    """Too few blocks are available for a call. Nothing was changed.

    Attributes:
      asked: blocks that the call needed.
      free: blocks that were available.
    """

    def __init__(self, message: str, *, asked: int, free: int):
        super().__init__(message)
        self.asked = asked
        self.free = free


class UnknownSequenceError(JaxkvError, KeyError):
    """No live sequence has this id: it was never allocated, or was freed."""

    def __str__(self) -> str:  # KeyError would quote the message
        return str(self.args[0])


class InvariantError(JaxkvError):
    """`BlockManager.check()` found inconsistent records; names the block and the sequence."""


class StateError(JaxkvError, ValueError):
    """A plan that does not follow a state, or a state that differs from its manager."""


class StaleStateError(JaxkvError, RuntimeError):
    """A `PagedState` was used after its donation to a step."""


class ModelError(JaxkvError):
    """A model broke its promise to the engine; see `jaxkv.engine.protocols.Model`."""
