"""Configuration of an engine's steps. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxkv.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Configuration of an engine's steps.

    Attributes:
      max_tokens_per_step: most prompt tokens of a step (the chunk size); decodes come on top.
      prefill_buckets: numbers of prompt tokens that steps are compiled for; the largest is
        `max_tokens_per_step`.
      decode_buckets: numbers of sequences that decode steps are compiled for, the largest at least
        the cache's `max_seqs`; None: the powers of two below `max_seqs`, and `max_seqs`.
      policy: order of admission: "fcfs" (first come, first served) or "priority" (higher first).
      decode_steps_per_dispatch: decode steps that the device runs per dispatch when no prompt
        waits.
      defer_shared_prefixes: whether a request waits while another computes a prefix of both.
      pipeline: whether the next step is dispatched before the tokens of this one arrive.
      check_state: whether each step compares the cache with its manager (`jaxkv.check_state`), for
        debugging: every step is waited for.

    Raises:
      ConfigError: a value out of range.
    """

    max_tokens_per_step: int = 256
    prefill_buckets: tuple[int, ...] = (16, 64, 256)
    decode_buckets: tuple[int, ...] | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    decode_steps_per_dispatch: int = 1
    defer_shared_prefixes: bool = True
    pipeline: bool = True
    check_state: bool = False

    def __post_init__(self) -> None:
        buckets = self.prefill_buckets
        for name in ("prefill_buckets", "decode_buckets"):
            sizes = getattr(self, name)
            if sizes is not None and (
                not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1
            ):
                raise ConfigError(
                    f"{name} must be strictly increasing and start at 1 or more, got {sizes}"
                )
        if self.max_tokens_per_step != buckets[-1]:
            raise ConfigError(
                f"max_tokens_per_step={self.max_tokens_per_step} must equal the largest of "
                f"prefill_buckets={buckets}"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy must be one of 'fcfs', 'priority', got {self.policy!r}")
        if self.decode_steps_per_dispatch < 1:
            raise ConfigError(
                f"decode_steps_per_dispatch={self.decode_steps_per_dispatch} must be at least 1"
            )
