"""Engine counters. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses

from jaxkv.manager.records import Stats


@dataclasses.dataclass
class HostSeconds:
    """Seconds of host work, by part, and of waiting for the device.

    Attributes:
      schedule: choosing the work of steps, blocks included.
      plan: collecting table changes.
      dispatch: building batches and dispatching them, without compilation.
      process: taking tokens in.
      detokenize: making outputs and their text.
      wait: waiting for the device.
    """

    schedule: float = 0.0
    plan: float = 0.0
    dispatch: float = 0.0
    process: float = 0.0
    detokenize: float = 0.0
    wait: float = 0.0

    @property
    def work(self) -> float:
        """Seconds of all parts but waiting."""
        return self.schedule + self.plan + self.dispatch + self.process + self.detokenize


@dataclasses.dataclass
class EngineStats:
    """Counters since the engine was made.

    Attributes:
      steps: dispatches.
      decode_steps: dispatches without prompt tokens.
      prompt_tokens: computed prompt tokens, recomputed ones included.
      generated_tokens: sampled tokens.
      preemptions: number of preemptions.
      peak_running: most sequences that ran at once.
      compile_seconds: seconds of steps that were compiled first, or read from JAX's cache.
      decode_tokens: tokens of decode steps during which nothing was compiled.
      decode_seconds: seconds between the arrivals of these tokens.
      host: host seconds by part.
      waiting: sequences that wait for blocks.
      running: sequences with blocks.
      blocks: blocks of the pool by use; filled in by `Engine.stats`.
    """

    steps: int = 0
    decode_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    peak_running: int = 0
    compile_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    host: HostSeconds = dataclasses.field(default_factory=HostSeconds)
    waiting: int = 0
    running: int = 0
    blocks: Stats | None = None
