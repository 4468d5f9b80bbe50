"""The errors that jaxkv raises on purpose: what was wrong, with numbers, and the way out."""


class JaxkvError(Exception):
    """Base of every error that jaxkv raises on purpose."""


class ConfigError(JaxkvError, ValueError):
    """A configuration that cannot be honoured; the message names the field."""


class OutOfBlocksError(JaxkvError):
    """The pool cannot give the blocks asked for. Nothing was changed.

    Attributes:
      asked: blocks the call needed.
      free: blocks it could have had.
    """

    def __init__(self, message: str, *, asked: int, free: int):
        super().__init__(message)
        self.asked = asked
        self.free = free


class UnknownSequenceError(JaxkvError, KeyError):
    """No live sequence has this id (never allocated, or freed)."""

    def __str__(self) -> str:  # KeyError would print the message quoted
        return str(self.args[0])


class InvariantError(JaxkvError):
    """`BlockManager.check()` found the bookkeeping broken; names the block and the sequence."""


class StaleStateError(JaxkvError, RuntimeError):
    """A `PagedState` was used after it had been donated to a step."""
