import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from cases import QUICK
from flax import nnx

import jaxkv
from jaxkv.models import Llama, LlamaConfig


def test_a_head_dim_that_is_not_hidden_size_over_heads():
    config = LlamaConfig(
        vocab_size=31, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=8,
        num_kv_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    model = Llama(config, rngs=nnx.Rngs(0))
    attention = model.layers[0].attention
    assert attention.qkv_proj.weight[...].shape == (128 + 2 * 2 * 16, 64)  # q: 128 of 64
    assert attention.o_proj.weight[...].shape == (64, 128)
    cache = jaxkv.CacheConfig.for_model(config, max_len=64, block_size=4, max_seqs=1)
    assert cache.block_bytes == 4 * 2 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, float32
    state = jaxkv.init_state(cache)
    assert state.kv_pages.shape[3:] == (2, 4, 16)
    prompt = np.random.default_rng(0).integers(0, 31, 11).tolist()
    output = jaxkv.generate(model, [prompt], jaxkv.SamplingParams(max_tokens=6)).outputs[0]
    want = model.dense(jnp.asarray([prompt + output.token_ids]))[0]
    assert output.token_ids == want[10:-1].argmax(-1).tolist()
    # One forward pass, in blocks that are not in order.
    tables = state.block_tables.at[0, :3].set(jnp.array([5, 2, 7]))
    state = dataclasses.replace(state, block_tables=tables)
    every = jaxkv.Batch.ragged([0], [0], [11], num_tokens=11, num_seqs=1, padding_row=1)
    every = dataclasses.replace(every, logits_at=np.arange(11))
    graph, params = nnx.split(model)
    step = jax.jit(lambda params, *args: nnx.merge(graph, params)(*args), compiler_options=QUICK)
    logits, _ = step(params, jnp.asarray(prompt), state, every)
    np.testing.assert_allclose(logits, want[:11], atol=1e-5)
