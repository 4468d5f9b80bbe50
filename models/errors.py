"""The error of files that cannot be loaded."""

from __future__ import annotations

from jaxkv.errors import JaxkvError


class CheckpointError(JaxkvError):
    """A checkpoint that is incomplete, damaged, or does not match its config."""
