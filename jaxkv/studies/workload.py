"""Requests for a model, with the lengths and the shared prefixes of a trace.

Host code: imports no JAX.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from jaxkv._util import to_json
from jaxkv.errors import ConfigError
from jaxkv.studies.traces import Trace


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests that are all submitted at the start.

    Attributes:
      name: name in titles.
      prompts: token ids of each prompt.
      max_tokens: number of tokens that each request generates.

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
        """Makes random prompts for a trace's first requests; equal hash ids give equal tokens.

        Args:
          trace: source of the lengths and hash ids.
          requests: maximum number of requests.
          vocab_size: vocabulary size of the model.
          max_len: maximum length of prompt and output together; longer prompts are cut.
          scale: divisor of the lengths.
          seed: seed of the random tokens.

        Raises:
          ConfigError: `requests` or `scale` is not positive, or `max_len` is below 2.
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
        """Length of the longest request, prompt and output, in tokens."""
        return max(len(p) + n for p, n in zip(self.prompts, self.max_tokens, strict=True))

    def save(self, path: Path) -> None:
        """Writes JSON: {"requests": [{"prompt_ids": [...], "max_tokens": n}, ...]} and the name."""
        pairs = zip(self.prompts, self.max_tokens, strict=True)
        requests = [{"prompt_ids": prompt, "max_tokens": n} for prompt, n in pairs]
        text = to_json({"name": self.name, "requests": requests})
        path.write_text(text, encoding="utf-8")
