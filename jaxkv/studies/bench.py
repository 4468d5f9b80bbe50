"""Speed of an engine on a workload: continuous batching, static batches, one by one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.engine.statistics import EngineStats
from jaxkv.errors import JaxkvError
from jaxkv.sampling.params import SamplingParams
from jaxkv.studies.workload import Workload

if TYPE_CHECKING:  # studies run without JAX; an engine comes as an argument
    from jaxkv.engine.engine import Engine


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a workload. Everything is compiled beforehand; requests are greedy.

    Attributes:
      mode: how the requests were batched.
      seconds: time from the first request to the last token.
      generated_tokens: number of requested tokens.
      computed_prompt_tokens: number of prompt tokens computed in steps: without those found in the
        cache, with padding and recomputed ones.
      first_token_s: (median, 95th percentile) of the time to a request's first token.
      token_s: (median, 95th percentile) over requests of the mean time between later tokens.
      steps: number of dispatches.
      preemptions: number of preemptions of running sequences.
      host_ms: host time per step by part, in milliseconds; "wait" is the wait for the device.
      token_ids: generated token ids of each request.
    """

    mode: str
    seconds: float
    generated_tokens: int
    computed_prompt_tokens: int
    first_token_s: tuple[float, float]
    token_s: tuple[float, float]
    steps: int
    preemptions: int
    host_ms: dict[str, float]
    token_ids: list[list[int]] = dataclasses.field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, prompts included in the time."""
        return self.generated_tokens / self.seconds


def continuous(engine: Engine, load: Workload, *, progress: bool = False) -> Measured:
    """Submits all requests at once; the engine admits waiting ones as others end."""
    return _measure("continuous batching", engine, load, [range(len(load.prompts))], progress)


def static_batches(engine: Engine, load: Workload, *, progress: bool = False) -> Measured:
    """Runs batches of as many requests as there are rows, one batch after the other.

    Prompts and outputs of a batch are padded to the longest prompt and the longest output in it.
    """
    rows = engine.cache.max_seqs
    batches = [range(i, min(i + rows, len(load.prompts)))
               for i in range(0, len(load.prompts), rows)]  # fmt: skip
    prompts, max_tokens = list(load.prompts), list(load.max_tokens)
    for batch in batches:
        longest = max(len(load.prompts[i]) for i in batch)
        most = max(load.max_tokens[i] for i in batch)
        for i in batch:
            # In front and different for each request, so that no lookup finds padding.
            padding = [(i + j) % engine.vocab_size for j in range(longest - len(prompts[i]))]
            prompts[i] = padding + prompts[i]
            max_tokens[i] = min(most, engine.max_len - longest)
    padded = dataclasses.replace(load, prompts=prompts, max_tokens=max_tokens)
    done = _measure("static batches", engine, padded, batches, progress)
    tokens = [ids[:n] for ids, n in zip(done.token_ids, load.max_tokens, strict=True)]
    return dataclasses.replace(done, generated_tokens=sum(map(len, tokens)), token_ids=tokens)


def one_by_one(engine: Engine, load: Workload, *, progress: bool = False) -> Measured:
    """Runs each request alone."""
    single = [range(i, i + 1) for i in range(len(load.prompts))]
    return _measure("one by one", engine, load, single, progress)


def _measure(
    mode: str, engine: Engine, load: Workload, batches: list[range], progress: bool
) -> Measured:
    params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False)
              for n in load.max_tokens]  # fmt: skip
    engine.manager.reset_prefix_cache()
    before, began, outputs = engine.stats(), engine.clock(), []
    for batch in batches:
        prompts = [load.prompts[i] for i in batch]
        outputs += engine.generate(prompts, [params[i] for i in batch], progress=progress)
    seconds, after = engine.clock() - began, engine.stats()
    finals = list(itertools.chain.from_iterable(outputs))
    errors = {output.error for output in finals if output.error is not None}
    if errors:
        raise JaxkvError(f"{mode}: {errors.pop()}")
    timings = [output.timings for output in finals]
    # Since the start of the run, not since the start of a batch.
    first = [(t.first_token or 0) - began for t in timings]
    later = [
        ((t.finished or 0) - (t.first_token or 0)) / (output.num_tokens - 1)
        for t, output in zip(timings, finals, strict=True)
        if output.num_tokens > 1
    ]
    return Measured(
        mode, seconds, sum(output.num_tokens for output in finals),
        after.prompt_tokens - before.prompt_tokens, _middle_and_tail(first),
        _middle_and_tail(later), after.steps - before.steps,
        after.preemptions - before.preemptions, _host_ms(before, after),
        [output.token_ids for output in finals],
    )  # fmt: skip


def _middle_and_tail(values: Iterable[float]) -> tuple[float, float]:
    array = np.array(list(values) or [np.nan])
    return float(np.median(array)), float(np.percentile(array, 95))


def _host_ms(before: EngineStats, after: EngineStats) -> dict[str, float]:
    steps = max(1, after.steps - before.steps)
    names = [field.name for field in dataclasses.fields(before.host)]
    return {
        name: 1e3 * (getattr(after.host, name) - getattr(before.host, name)) / steps
        for name in names
    }
