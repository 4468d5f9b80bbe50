"""What an engine has done, in numbers. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses

from jaxkv.manager.records import Stats


@dataclasses.dataclass
class HostSeconds:
    """Seconds of the host's own work, waiting for the device apart.

    Attributes:
      schedule: choosing what a step computes, blocks included.
      plan: collecting what the device must be told.
      dispatch: building batches and sending them off; compiling not counted.
      process: taking tokens in.
      detokenize: making outputs and their text.
      wait: for the device.
    """

    schedule: float = 0.0
    plan: float = 0.0
    dispatch: float = 0.0
    process: float = 0.0
    detokenize: float = 0.0
    wait: float = 0.0

    @property
    def work(self) -> float:
        """All but waiting."""
        return self.schedule + self.plan + self.dispatch + self.process + self.detokenize


@dataclasses.dataclass
class EngineStats:
    """Counts since the engine began.

    Attributes:
      steps: dispatches.
      decode_steps: of them, those without prompt tokens.
      prompt_tokens: prompt tokens that were computed, again after preemption included.
      generated_tokens: tokens that were made.
      preemptions: times that a sequence lost its blocks.
      peak_running: most sequences that ran at once.
      compile_seconds: in steps that had to be compiled first, or read from JAX's cache.
      decode_tokens: tokens of decode steps that came while nothing was compiled.
      decode_seconds: and the time between them.
      host: where the host's time went.
      waiting: sequences that wait for blocks.
      running: sequences that have some.
      blocks: of the pool; None until asked through `Engine.stats`.
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
