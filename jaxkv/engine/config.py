"""Configuration of an engine's steps. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxkv.errors import ConfigError
from jaxkv.sampling.checks import INT32_MAX, Buckets, Check, Flag, Integer, Optional, require


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Configuration of an engine's steps.

    Attributes:
      max_tokens_per_step: most prompt tokens of a step (the chunk size); decodes come on top.
      prefill_buckets: numbers of prompt tokens that steps are compiled for; the largest is
        `max_tokens_per_step`.
      decode_buckets: numbers of sequences that decode steps are compiled for, the largest at least
        the cache's `max_seqs`; None: the powers of two below `max_seqs`, and `max_seqs`.
      policy: order of admission: "fcfs" (first come, first served) or "priority" (higher first;
        running requests of lower priority are preempted for those that wait).
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
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.max_tokens_per_step != self.prefill_buckets[-1]:
            raise ConfigError(
                f"max_tokens_per_step={self.max_tokens_per_step} must equal the largest of "
                f"prefill_buckets={self.prefill_buckets}"
            )
        require(self.policy in ("fcfs", "priority"), "policy", self.policy, "'fcfs' or 'priority'")


_CHECKS: dict[str, Check] = {
    "max_tokens_per_step": Integer(1, INT32_MAX),
    "prefill_buckets": Buckets(),
    "decode_buckets": Optional(Buckets()),
    "decode_steps_per_dispatch": Integer(1, INT32_MAX),
    "defer_shared_prefixes": Flag(),
    "pipeline": Flag(),
    "check_state": Flag(),
}
