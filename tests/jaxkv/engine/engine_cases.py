"""Engines over one small model and one shape of cache, so that tests share what is compiled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv import BlockManager, CacheConfig, Engine, SamplingParams, SchedulerConfig

MAX_LEN, BLOCK, MAX_SEQS = 64, 4, 4
# One form of decode steps: compiling takes most of these tests' time.
SCHEDULER = SchedulerConfig(
    max_tokens_per_step=16, prefill_buckets=(16,), decode_buckets=(MAX_SEQS,)
)


def prompt_of(length, seed=0, vocab=61):
    return np.random.default_rng([seed, length]).integers(0, vocab, length).tolist()


def engine_of(model, blocks=40, *, scheduler=None, max_seqs=MAX_SEQS, block_size=BLOCK, **options):
    """An engine whose manager has this many usable blocks. The device's pool is always the same."""
    cache = CacheConfig.for_model(
        model.config, max_len=MAX_LEN, block_size=block_size, max_seqs=max_seqs, num_blocks=65
    )
    scheduler = dataclasses.replace(SCHEDULER, **(scheduler or {}))
    own: dict[str, Any] = {"eos_token_ids": ()} | {
        name: options.pop(name) for name in ("eos_token_ids", "tokenizer") if name in options
    }
    small = dataclasses.replace(cache, num_blocks=blocks + 1)
    manager = BlockManager.for_config(small, debug=True, **options)
    return Engine(model, cache, scheduler, seed=3, manager=manager, **own)


def greedy(max_tokens, **changes):
    return SamplingParams(max_tokens=max_tokens, **changes)


def run(engine, steps=400):
    """Steps until no work is left; {(request, sample): last output}."""
    last = {}
    for _ in range(steps):
        for output in engine.step():
            key = output.request_id, output.sample
            if key in last:
                assert output.token_ids == last[key].token_ids + output.new_token_ids
            last[key] = output
        if not engine.has_work:
            verify_idle(engine)
            return last
    raise AssertionError(f"still at work after {steps} steps: {engine.stats()}")


def tokens_of(outputs):
    return {key: (o.token_ids, o.finish_reason) for key, o in outputs.items()}


def verify_idle(engine):
    """No request, step in flight or block reference is left."""
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.blocks.active) == (0, 0, 0), stats
    assert not engine._loop.requests
    assert not engine._scheduler._prefixes._owners
    assert not engine._loop.searching
    assert not engine._loop.in_flight
    engine.manager.take_plan()
    engine.manager.check()


@nnx.jit
def _dense(model, tokens):
    return model.dense(tokens)


def dense_logits(model, ids):
    """f32[len(ids), vocab_size] without any cache."""
    padded = np.zeros(MAX_LEN, np.int32)  # one length: one compile
    padded[: len(ids)] = ids
    return np.asarray(_dense(model, jnp.asarray(padded)[None]))[0, : len(ids)]


def dense_greedy(model, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        logits = dense_logits(model, ids)[-1]
        # Far more than rounding on another processor, so that no test depends on it.
        second, best = np.sort(logits)[-2:]
        assert best - second > 1e-5 * np.abs(logits).max(), "a near tie: take another prompt"
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def dense_logprobs(model, ids):
    """f32[len(ids), vocab_size]."""
    return np.asarray(jax.nn.log_softmax(dense_logits(model, ids), axis=-1))
