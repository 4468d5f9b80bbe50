"""Random requests through random engines: the tokens equal those of each request alone."""

import numpy as np
import pytest
from engine_cases import dense_logits, engine_of, prompt_of, run

from jaxkv import SamplingParams


def random_request(rng, prefixes):
    """A prompt that may share its beginning with others, and parameters."""
    prompt = [*prefixes[int(rng.integers(len(prefixes)))], *prompt_of(int(rng.integers(1, 12)),
              int(rng.integers(1000)))]  # fmt: skip
    count = int(rng.integers(1, 16))
    if rng.random() < 0.5:
        return prompt, SamplingParams(max_tokens=count)
    return prompt, SamplingParams(
        max_tokens=count, temperature=float(rng.uniform(0.5, 2)), seed=int(rng.integers(99)),
        top_k=int(rng.choice([0, 5])), top_p=float(rng.choice([1.0, 0.9])),
        repetition_penalty=float(rng.choice([1.0, 1.2])), n=int(rng.choice([1, 1, 3])),
    )  # fmt: skip


def random_engine(model, rng):
    return engine_of(
        model,
        blocks=int(rng.integers(11, 40)),  # the longest request takes 11
        max_seqs=int(rng.choice([1, 4])),
        prefix_index=[None, "hash", "radix"][int(rng.integers(3))],
        eviction=str(rng.choice(["lru", "decayed", "s3fifo"])),
        scheduler=dict(
            pipeline=bool(rng.integers(2)),
            decode_steps_per_dispatch=int(rng.choice([1, 4])),
            defer_shared_prefixes=bool(rng.integers(2)),
            decode_buckets=[None, (4,), (4,)][int(rng.integers(3))],
        ),
    )


def drive(engine, requests, rng):
    """Submits at random times and aborts some; {request: tokens of its samples}."""
    aborted, tokens = set(), {}
    for i, (prompt, params) in enumerate(requests):
        engine.submit(prompt, params, request_id=i)
        for _ in range(int(rng.integers(4))):
            for output in engine.step():
                tokens.setdefault(output.request_id, {})[output.sample] = output.token_ids
        if rng.random() < 0.1:
            aborted.add(i)
            engine.abort(i)
    for (request, sample), output in run(engine).items():
        tokens.setdefault(request, {})[sample] = output.token_ids
    return {i: tokens[i] for i in range(len(requests)) if i not in aborted}


def close_call(model, prompt, tokens, others):
    """Whether two greedy outputs part where the two likeliest logits are within 1e-4."""
    at = next(i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b)
    logits = np.sort(dense_logits(model, prompt + tokens[:at])[-1])
    return logits[-1] - logits[-2] < 1e-4


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(i, marks=pytest.mark.slow) for i in range(6, 100))]
)
def test_each_request_gives_what_it_gives_alone(small_model, seed):
    rng = np.random.default_rng(seed)
    prefixes = [[], prompt_of(8, 1), prompt_of(13, 2), prompt_of(13, 2)[:9]]
    requests = [random_request(rng, prefixes) for _ in range(9)]
    results = drive(random_engine(small_model, rng), requests, rng)
    for i, samples in results.items():
        prompt, params = requests[i]
        alone = engine_of(small_model)
        alone.submit(prompt, params, request_id="alone")
        for (_, sample), output in run(alone).items():
            if samples[sample] != output.token_ids:
                assert params.temperature == 0
                assert close_call(small_model, prompt, output.token_ids, samples[sample])
