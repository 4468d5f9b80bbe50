"""Faults of models, requests and users' code: each ends what it concerns, and nothing else."""

import dataclasses
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import dense_greedy, engine_of, greedy, prompt_of, run, tokens_of
from flax import nnx

import jaxkv
from jaxkv import BeamSearchParams, ConfigError, JaxkvError, LogitsProcessor, SamplingParams
from jaxkv.engine import scheduler
from jaxkv.errors import ModelError


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    vocab_size: int = 8
    eos_token_ids: tuple = ()
    max_position_embeddings: int = 64
    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 4


class Following(nnx.Module):
    """A model in which what follows a token depends on it alone."""

    def __init__(self, table, **config):
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))
        self.config = TinyConfig(vocab_size=len(table), **config)

    def __call__(self, tokens, state, batch):
        return self.table[...][tokens[batch.logit_tokens]], jaxkv.advance(state, batch)


# -- models ----------------------------------------------------------------------------------


class Raises(Following):
    def __call__(self, tokens, state, batch):
        raise ZeroDivisionError("in the third layer")


class ReturnsLogitsAlone(Following):
    def __call__(self, tokens, state, batch):
        return super().__call__(tokens, state, batch)[0]


class ForgetsTheState(Following):
    def __call__(self, tokens, state, batch):
        return super().__call__(tokens, state, batch)[0], state


class DropsTheAttentionsState(Following):
    def __call__(self, tokens, state, batch):
        x = jnp.ones((len(tokens), 1, 4))
        jaxkv.attention(x, x, x, state, 0, batch)
        return super().__call__(tokens, state, batch)


class ReturnsLogitsOfAllTokens(Following):
    def __call__(self, tokens, state, batch):
        return self.table[...][jnp.tile(tokens, 2)], jaxkv.advance(state, batch)


class HasAnotherVocabulary(Following):
    def __call__(self, tokens, state, batch):
        logits, state = super().__call__(tokens, state, batch)
        return logits[:, :-1], state


class ReturnsIntegers(Following):
    def __call__(self, tokens, state, batch):
        logits, state = super().__call__(tokens, state, batch)
        return logits.astype(jnp.int32), state


class ChangesTheStatesType(Following):
    def __call__(self, tokens, state, batch):
        logits, state = super().__call__(tokens, state, batch)
        return logits, dataclasses.replace(state, kv_pages=state.kv_pages.astype(jnp.bfloat16))


FAULTY = {
    Raises: (ZeroDivisionError, "in the third layer"),
    ReturnsLogitsAlone: (ModelError, r"expected \(logits, state\)"),
    ForgetsTheState: (ModelError, "returned the state that it was given"),
    DropsTheAttentionsState: (ModelError, "dropped the state that jaxkv.attention returned"),
    ReturnsLogitsOfAllTokens: (ModelError, "logits of shape"),
    HasAnotherVocabulary: (ModelError, r"logits of shape \(\d+, 7\), expected .*vocab_size=8"),
    ReturnsIntegers: (ModelError, "dtype int32"),
    ChangesTheStatesType: (ModelError, "kv_pages is bfloat16"),
}


@pytest.mark.parametrize("kind", FAULTY)
def test_a_model_that_fails_raises_where_the_user_is(kind):
    model, (error, message) = kind(np.eye(8)), FAULTY[kind]
    cache = jaxkv.CacheConfig.for_model(model.config, max_len=64, max_seqs=2)
    with pytest.raises(error, match=message) as raised:
        jaxkv.generate(model, [[1, 2]], greedy(3), cache=cache)
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert kind is not Raises or "__call__" in frames
    engine = jaxkv.Engine(model, cache)
    with pytest.raises(error, match=message):
        engine.warm_up(progress=False)
    engine.submit([1, 2], greedy(3))
    with pytest.raises(error, match=message):
        engine.step()
    (output,) = engine.step()  # its request has ended, with the error itself
    assert output.finish_reason == "error"
    assert isinstance(output.exception, error)
    assert not engine.has_work


# -- one request's faults --------------------------------------------------------------------


@pytest.mark.parametrize(("params", "options", "message"), [
    (dict(stop_token_ids=(61,)), {}, "stop_token_ids has token ids outside the vocabulary of 61"),
    (dict(logit_bias={61: 1.0}), {}, "logit_bias has token ids outside the vocabulary of 61"),
    ({}, dict(namespace=1.5), "namespace=1.5"),
    ({}, dict(namespace=object()), "namespace="),
    ({}, dict(namespace={1, 2}), "namespace="),
    ({}, dict(namespace=np.zeros(3)), "namespace="),
    ({}, dict(priority=1.5), "priority=1.5 must be an integer"),
    ({}, dict(request_id=[1]), r"request_id=\[1\] must be hashable"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_at_submission(small_model, params, options, message):
    engine = engine_of(small_model)
    with pytest.raises(ConfigError, match=message):
        engine.submit([1, 2], SamplingParams(**params), **options)
    assert not engine.has_work


def test_end_tokens_outside_the_vocabulary_are_refused(small_model):
    with pytest.raises(ConfigError, match="eos_token_ids has token ids outside the vocabulary"):
        engine_of(small_model, eos_token_ids=(2, 61))


@pytest.mark.parametrize("prompt", [b"12", {1: 2}, None, 5, np.array(3), [[1]], [1, None]])
def test_what_is_not_a_prompt(small_model, prompt):
    with pytest.raises(ConfigError, match="prompt"):
        engine_of(small_model).submit(prompt)


def test_a_row_that_cannot_be_filled_ends_its_request_alone(small_model, monkeypatch):
    from jaxkv.sampling.sampler import SamplerState

    fill = SamplerState.fill

    def fails(self, row, token_ids, params, **options):
        if params.top_k == 5:
            raise OverflowError("Python int too large to convert to C long")
        fill(self, row, token_ids, params, **options)

    monkeypatch.setattr(SamplerState, "fill", fails)
    engine = engine_of(small_model)
    running = engine.submit(prompt_of(6), greedy(9))
    engine.step()
    bad = engine.submit(prompt_of(5), greedy(4, top_k=5))
    beside = engine.submit(prompt_of(7), greedy(6))
    outputs = run(engine)
    assert outputs[bad, 0].finish_reason == "error"
    assert isinstance(outputs[bad, 0].exception, OverflowError)
    assert outputs[running, 0].token_ids == dense_greedy(small_model, prompt_of(6), 9)
    assert outputs[beside, 0].token_ids == dense_greedy(small_model, prompt_of(7), 6)


class FailsAt:
    """A tokenizer whose streams raise at one token."""

    def __init__(self, token):
        self.token = token

    def encode(self, text):
        return [ord(x) % 61 for x in text]

    def stream(self):
        return self

    def push(self, token_ids):
        if self.token in token_ids:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        return "x" * len(token_ids)

    def flush(self):
        return ""


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_tokenizer_that_raises_ends_the_request_of_its_text(small_model, stop):
    expected = {n: dense_greedy(small_model, prompt_of(n), 8) for n in (5, 6, 7)}
    token = next(t for t in expected[6] if t not in expected[5] and t not in expected[7])
    engine = engine_of(small_model, tokenizer=FailsAt(token))
    for n in (5, 6, 7):
        engine.submit(prompt_of(n), greedy(8, stop=stop), request_id=n)
    outputs = run(engine)
    assert outputs[5, 0].token_ids == expected[5]
    assert outputs[7, 0].token_ids == expected[7]
    assert outputs[7, 0].text == "x" * 8
    assert outputs[6, 0].finish_reason == "error"
    assert "UnicodeDecodeError" in outputs[6, 0].error


# -- logits processors -----------------------------------------------------------------------


class Unhashable:
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other):
        raise ValueError("not comparable")

    def __call__(self, logits, state, tokens, length):
        return jnp.where(jnp.arange(len(logits)) == 7, logits + 99, logits), state


PROCESSORS = {
    "raises": (tuple, lambda *_: 1 / 0, "ZeroDivisionError"),
    "its init raises": (lambda: 1 / 0, lambda logits, s, t, n: (logits, s), "ZeroDivisionError"),
    "returns logits alone": (tuple, lambda logits, s, t, n: logits, r"expected \(logits, state\)"),
    "another shape": (lambda: jnp.zeros(3), lambda logits, s, t, n: (logits, jnp.zeros(4)), "init"),
    "another dtype": (
        lambda: jnp.zeros(3),
        lambda logits, s, t, n: (logits, s.astype(int)),
        "init",
    ),
    "another structure": (lambda: (1, 2), lambda logits, s, t, n: (logits, [1, 2]), "structure"),
    "other logits": (tuple, lambda logits, s, t, n: (logits[:5], s), r"logits of shape \(5\)"),
    "integer logits": (tuple, lambda logits, s, t, n: (logits.astype(int), s), "dtype int"),
    "a state of text": (lambda: "text", lambda logits, s, t, n: (logits, s), "logits processor"),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_that_breaks_its_promise_ends_its_requests_alone(small_model, name):
    init, apply, message = PROCESSORS[name]
    engine, processor = engine_of(small_model, max_seqs=2), LogitsProcessor(init, apply)
    good = engine.submit(prompt_of(5), greedy(6))
    engine.step()
    for i in range(3):  # also those that would have waited for a row
        engine.submit(prompt_of(6), greedy(6, logits_processor=processor), request_id=f"bad{i}")
    outputs = run(engine)
    assert outputs[good, 0].token_ids == dense_greedy(small_model, prompt_of(5), 6)
    for i in range(3):
        output = outputs[f"bad{i}", 0]
        assert (output.finish_reason, output.token_ids) == ("error", [])
        with pytest.raises(JaxkvError, match=message):
            raise output.exception
    assert outputs[good, 0].num_preemptions == 0


def test_processors_without_a_hash_work(small_model):
    engine = engine_of(small_model)
    processor = LogitsProcessor(tuple, Unhashable())
    for i in range(2):
        engine.submit(prompt_of(5 + i), greedy(4, logits_processor=processor), request_id=i)
    engine.step()
    assert len(engine._device.processors) == 1
    assert {tuple(output.token_ids) for output in run(engine).values()} == {(7, 7, 7, 7)}


def callback_processor(fails_at):
    """Adds 0 through a callback, which raises at a length."""

    def check(length):
        if int(length) == fails_at:
            raise RuntimeError(f"at {fails_at}")
        return np.float32(0)

    def apply(logits, n, tokens, length):
        zero = jax.ShapeDtypeStruct((), np.float32)
        logits = jnp.where(jnp.arange(len(logits)) == n * 7 % len(logits), logits + 30.0, logits)
        return logits + jax.pure_callback(check, zero, length, vmap_method="sequential"), n + 1

    return LogitsProcessor(lambda: jnp.int32(0), apply)


def test_of_several_processors_the_one_whose_callback_raises_ends(small_model):
    engine = engine_of(small_model)
    good, bad = callback_processor(-1), callback_processor(9)
    engine.submit(prompt_of(5), greedy(9), request_id="plain")
    engine.submit(prompt_of(6), greedy(9, logits_processor=good), request_id="good")
    engine.submit(prompt_of(6, 1), greedy(9, logits_processor=bad), request_id="bad")
    outputs = run(engine)
    assert outputs["plain", 0].token_ids == dense_greedy(small_model, prompt_of(5), 9)
    # Its state went on where it was, though everything was computed again.
    assert outputs["good", 0].token_ids == [n * 7 % 61 for n in range(9)]
    assert outputs["bad", 0].finish_reason == "error"
    assert outputs["bad", 0].token_ids == [
        n * 7 % 61 for n in range(len(outputs["bad", 0].token_ids))
    ]
    assert "at 9" in outputs["bad", 0].error


def test_a_processors_state_survives_a_lost_cache_and_preemption(small_model, monkeypatch):
    engine = engine_of(small_model, 7, max_seqs=2)  # too few blocks for both
    processor = callback_processor(-1)
    for i in range(2):
        params = greedy(14, logits_processor=processor)
        engine.submit(prompt_of(5 + i), params, request_id=i)
    engine.submit(prompt_of(4), greedy(4), request_id="fails")
    send, calls = engine._device.send, []

    def fails(work, plan):
        calls.append(None)
        if any(s.request.id == "fails" for s in work.sequences):
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return send(work, plan)

    monkeypatch.setattr(engine._device, "send", fails)
    for _ in range(6):
        engine.step()
    engine._loop.whole.torn = True  # as an interrupt leaves it
    outputs = run(engine)
    for i in range(2):
        assert outputs[i, 0].token_ids == [n * 7 % 61 for n in range(14)]
    assert engine.stats().preemptions > 0


def test_slots_of_processors_are_used_again(small_model):
    engine, most = engine_of(small_model, max_seqs=2), 0
    engine.submit(prompt_of(4), greedy(40), request_id="long")
    for i in range(4):
        processor = LogitsProcessor(tuple, lambda logits, state, tokens, length: (logits, state))
        engine.submit(prompt_of(5), greedy(2, logits_processor=processor), request_id=i)
        while engine.is_running(i):
            engine.step()
            most = max(most, len(engine._device.processors))
    assert most == 1
    run(engine)
    assert not len(engine._device.processors)


# -- groups ----------------------------------------------------------------------------------


def test_two_beam_searches_that_need_each_others_rows(small_model):
    engine = engine_of(small_model, 48, max_seqs=3)
    widths = {"three": 3, "two": 2}
    for name, width in widths.items():
        params = BeamSearchParams(width=width, max_tokens=6)
        engine.submit([1, 2, 3], params, request_id=name)
    together = tokens_of(run(engine))
    for name, width in widths.items():
        engine = engine_of(small_model, 48, max_seqs=3)
        engine.submit([1, 2, 3], BeamSearchParams(width=width, max_tokens=6), request_id=name)
        alone = tokens_of(run(engine))
        assert len(alone) == width
        assert {key: value for key, value in together.items() if key[0] == name} == alone


@pytest.mark.parametrize("blocks", [13, 18, 40])
def test_beam_searches_under_pressure_equal_each_alone(small_model, blocks):
    requests = {i: (prompt_of(3 + 2 * i), BeamSearchParams(width=2 + i % 2, max_tokens=7))
                for i in range(4)}  # fmt: skip
    engine = engine_of(small_model, blocks)
    for name, (prompt, params) in requests.items():
        engine.submit(prompt, params, request_id=name)
        engine.submit(prompt, greedy(9), request_id=("plain", name))
    together = tokens_of(run(engine, 2000))
    for name, (prompt, params) in requests.items():
        engine = engine_of(small_model)
        engine.submit(prompt, params, request_id=name)
        alone = tokens_of(run(engine))
        assert {key: value for key, value in together.items() if key[0] == name} == alone


def test_a_step_that_fails_for_a_part_of_a_search_ends_all_of_it(small_model, monkeypatch):
    engine = engine_of(small_model)
    engine.submit(prompt_of(9), BeamSearchParams(width=3, max_tokens=8), request_id="beams")
    engine.submit(prompt_of(8), greedy(4, n=2), request_id="samples")
    other = engine.submit(prompt_of(7), greedy(9))
    for _ in range(3):
        engine.step()
    send = engine._device.send

    def fails(work, plan):
        monkeypatch.setattr(engine._device, "send", send)
        work.decodes.sequences[:] = [
            s for s in work.decodes.sequences if s.sample == 0 and s.request.id != other
        ]
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._device, "send", fails)
    outputs = run(engine)
    ends = {key: output.finish_reason for key, output in outputs.items()}
    assert {reason for (name, _), reason in ends.items() if name != other} == {"error"}
    assert {name for name, _ in ends} == {"beams", "samples", other}
    assert outputs[other, 0].token_ids == dense_greedy(small_model, prompt_of(7), 9)


def test_a_failed_step_leaves_no_fork_behind(small_model, monkeypatch):
    """What a fork had begun must not reach the row of another request."""
    drawn = SamplingParams(max_tokens=12, temperature=1.0, seed=4)
    alone = engine_of(small_model)
    alone.submit(prompt_of(6), drawn, request_id="kept")
    expected = run(alone)["kept", 0].token_ids
    engine = engine_of(small_model)
    two = SamplingParams(max_tokens=9, temperature=1.0, n=2)
    engine.submit(prompt_of(5), two, request_id="two")
    fill = engine._device.fill_rows

    def fails(sequences):
        monkeypatch.setattr(engine._device, "fill_rows", fill)
        raise RuntimeError("while rows are filled")

    monkeypatch.setattr(engine._device, "fill_rows", fails)
    engine.submit(prompt_of(8), two, request_id="three")
    engine.step()
    engine.submit(prompt_of(6), drawn, request_id="kept")
    outputs = run(engine)
    assert outputs["kept", 0].token_ids == expected
    assert not engine._scheduler.unfilled


# -- rollback --------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_rollback_keeps_what_is_computed_and_not_told_yet(small_model, block_size):
    """Blocks whose KV is computed must not be given back because the manager hears of them late."""
    for at in range(3, 12):
        engine = engine_of(small_model, block_size=block_size)
        engine.submit([9], greedy(14), request_id="first")
        engine.submit([7], greedy(14), request_id="second")
        seen = {}
        while len(seen.get("second", [])) < at:
            for output in engine.step():
                seen[output.request_id] = output.token_ids
        engine.drain()
        engine.rollback("second", 1)
        last = {}
        for output in engine.stream():
            last[output.request_id] = output.token_ids
        assert last["first"] == dense_greedy(small_model, [9], 14)
        assert last["second"] == dense_greedy(small_model, [7], 14)


# -- what users expect -----------------------------------------------------------------------


def test_a_prompt_is_scored_without_generating(small_model):
    scores = {}
    for max_tokens in (0, 1):
        engine = engine_of(small_model)
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=True, logprobs=2)
        engine.submit(prompt_of(21), params, request_id="a")
        engine.submit(prompt_of(5), greedy(3), request_id="beside")
        outputs = run(engine)
        assert len(outputs["a", 0].token_ids) == max_tokens
        assert outputs["a", 0].finish_reason == "length"
        scores[max_tokens] = outputs["a", 0].prompt_logprobs
    assert len(scores[0]) == 20
    assert scores[0] == scores[1]


@pytest.mark.parametrize("length", [1, 63, 64])
def test_prompts_up_to_the_longest_sequence_are_scored(small_model, length):
    engine = engine_of(small_model)
    params = SamplingParams(max_tokens=5, prompt_logprobs=True)
    engine.submit(prompt_of(length), params, request_id="a")
    output = run(engine)["a", 0]
    assert len(output.prompt_logprobs or []) == length - 1
    assert len(output.token_ids) == min(5, 64 - length)


def test_each_sample_ends_where_no_token_is_requested(small_model):
    engine = engine_of(small_model)
    engine.submit([1, 2], SamplingParams(max_tokens=0, n=3), request_id="a")
    assert tokens_of(run(engine)) == {("a", i): ([], "length") for i in range(3)}


def test_a_prompt_that_fills_the_last_block_with_one_token_to_come(small_model):
    engine = engine_of(small_model, 4)  # 16 slots; the 17th token is never written
    request = engine.submit(prompt_of(16), greedy(1))
    assert run(engine)[request, 0].token_ids == dense_greedy(small_model, prompt_of(16), 1)
    with pytest.raises(ConfigError, match="need 5 blocks"):
        engine.submit(prompt_of(16), greedy(2))


@pytest.mark.parametrize(("max_seqs", "blocks"), [(2, 40), (4, 12)])
def test_a_higher_priority_preempts_lower_ones(small_model, max_seqs, blocks):
    engine = engine_of(small_model, blocks, max_seqs=max_seqs, scheduler=dict(policy="priority"))
    low = [prompt_of(9, i) for i in range(2)]
    for i, prompt in enumerate(low):
        engine.submit(prompt, greedy(14), request_id=f"low{i}")
    for _ in range(4):
        engine.step()
    engine.submit(prompt_of(17), greedy(3), request_id="urgent", priority=10)
    ended, last = [], {}
    while engine.has_work:
        for output in engine.step():
            last[output.request_id] = output.token_ids
            ended += [output.request_id] if output.finished else []
    assert ended[0] == "urgent"
    assert engine.stats().preemptions >= 1
    for i, prompt in enumerate(low):
        assert last[f"low{i}"] == dense_greedy(small_model, prompt, 14)


def test_equal_priorities_do_not_preempt(small_model):
    engine = engine_of(small_model, max_seqs=1, scheduler=dict(policy="priority"))
    engine.submit(prompt_of(4), greedy(9), request_id=0, priority=3)
    engine.step()
    engine.submit(prompt_of(5), greedy(3), request_id=1, priority=3)
    run(engine)
    assert engine.stats().preemptions == 0


def test_beams_go_on_beside_several_end_tokens():
    """Two ends are a little likelier than going on, after which all is certain."""
    table = np.zeros((8, 8))
    table[1, [6, 7, 2]] = 3.0, 2.9, 2.8
    table[2, 3] = table[3, 4] = table[4, 5] = table[5, 6] = 20.0
    model = Following(table, eos_token_ids=(6, 7))
    cache = jaxkv.CacheConfig.for_model(model.config, max_len=32, block_size=4, max_seqs=2)
    params = BeamSearchParams(width=1, max_tokens=8, length_penalty=2.0)
    ((output,),) = jaxkv.Engine(model, cache).generate([[1]], params, progress=False)
    assert output.token_ids == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=3, logprobs=64), BeamSearchParams(max_tokens=3, width=8),
])  # fmt: skip
def test_more_candidates_than_the_vocabulary_has(params):
    model = Following(np.random.default_rng(0).normal(size=(8, 8)))
    cache = jaxkv.CacheConfig.for_model(model.config, max_len=32, block_size=4, max_seqs=8)
    outputs = jaxkv.Engine(model, cache).generate([[1, 2]], params, progress=False)[0]
    for output in outputs:
        assert output.finish_reason == "length"
        assert all(len(one.top) == 8 for one in output.logprobs or [])


def test_the_end_of_a_request_costs_the_same_however_many_are_open(small_model, monkeypatch):
    """Counts what an abort reads: neither the open requests nor the waiting list are searched."""
    order, read = scheduler._order, []

    def counted(sequence):
        read.append(sequence)
        return order(sequence)

    counts = []
    for num_open in (10, 1000):
        engine = engine_of(small_model)
        for i in range(num_open):
            engine.submit([1, 2, 3], greedy(4), request_id=i)
        read.clear()
        monkeypatch.setattr(scheduler, "_order", counted)
        engine.abort(num_open // 2)
        monkeypatch.setattr(scheduler, "_order", order)
        counts.append(len(read))
    assert 1 <= counts[0] <= counts[1] <= counts[0] + 8
