"""Requests for a model out of a trace: how long they are, and what their prompts share.

Host code: imports no JAX.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from jaxkv.errors import ConfigError
from jaxkv.studies.traces import Trace


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests that are there from the start.

    Attributes:
      name: for titles.
      prompts: token ids of each.
      max_tokens: tokens that each generates.

    Example:
      >>> from jaxkv.studies.traces import load_trace
      >>> from jaxkv.studies.workload import Workload
      >>> load = Workload.of(load_trace("azure-conv"), requests=3, scale=8, vocab_size=100,
      ...                    max_len=512)
      >>> [len(prompt) for prompt in load.prompts], load.max_tokens
      ([47, 50, 110], [6, 14, 7])
    """

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]

    @classmethod
    def of(
        cls, trace: Trace, *, requests: int, vocab_size: int, max_len: int, scale: float = 1.0,
        seed: int = 0,
    ) -> Workload:  # fmt: skip
        """The first requests of a trace, of random tokens; equal hash ids stand for equal ones.

        Args:
          trace: where the lengths come from.
          requests: how many, at most.
          vocab_size: of the model.
          max_len: longest prompt and output together; longer prompts are cut.
          scale: lengths are divided by it.
          seed: of the tokens.

        Raises:
          ConfigError: no requests asked for, a scale that is not positive, no room for any prompt.
        """
        if requests < 1 or scale <= 0 or max_len < 2:
            raise ConfigError(
                f"{requests=}, {scale=} and {max_len=} leave nothing to run: give at least one "
                "request, a positive scale and room for two tokens"
            )
        trace = trace.head(requests)
        per_id = max(1, round(trace.tokens_per_id / scale))
        prompts, max_tokens = [], []
        for i in range(len(trace)):
            output = max(1, min(round(int(trace.output_tokens[i]) / scale), max_len - 1))
            length = max(1, min(round(int(trace.input_tokens[i]) / scale), max_len - output))
            shared = [
                np.random.default_rng([seed, 0, block]).integers(0, vocab_size, per_id)
                for block in trace.ids(i).tolist()
            ]
            own = np.random.default_rng([seed, 1, i]).integers(0, vocab_size, length)
            tokens = np.concatenate([*shared, own])[:length]
            prompts.append(tokens.tolist())
            max_tokens.append(output)
        name = f"{len(trace)} requests of {trace.name}" + (f", 1/{scale:g}" if scale != 1 else "")
        return cls(name, prompts, max_tokens)

    @property
    def max_len(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(p) + n for p, n in zip(self.prompts, self.max_tokens, strict=True))

    def save(self, path: Path) -> None:
        """JSON for other programs: {"requests": [{"prompt_ids": [...], "max_tokens": n}, ...]}."""
        pairs = zip(self.prompts, self.max_tokens, strict=True)
        requests = [{"prompt_ids": prompt, "max_tokens": n} for prompt, n in pairs]
        path.write_text(json.dumps({"name": self.name, "requests": requests}))
