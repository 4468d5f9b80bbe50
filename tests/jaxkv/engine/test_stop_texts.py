"""Stop texts with special tokens, and texts that stay in step with rollbacks and forks."""

import numpy as np
import pytest
from engine_cases import greedy
from following import Following
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

import jaxkv
from jaxkv.engine.marked_text import MarkedText
from jaxkv.models.tokenizer import Tokenizer

END = 256


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer.bytes().backend
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(backend)


def engine_saying(tokens, tokenizer):
    """An engine whose model says these tokens in turn, again and again."""
    table = np.zeros((257, 257), np.float32)
    for before, after in zip(tokens, [*tokens[1:], tokens[0]], strict=True):
        table[before, after] = 20.0
    model = Following(table)
    cache = jaxkv.CacheConfig.for_model(model.config, max_len=64, block_size=4, max_seqs=2)
    scheduler = jaxkv.SchedulerConfig(
        max_tokens_per_step=16, prefill_buckets=(16,), decode_buckets=(2,)
    )
    return jaxkv.Engine(model, cache, scheduler, tokenizer=tokenizer)


@pytest.mark.parametrize(("stop", "text", "num_tokens"), [
    ("<|end|>", "hi", 3), ("hi<|end|>", "", 3), ("i<|end|>x", "h", 4), ("<|end|>x", "hi", 4),
    ("end", None, 20), ("<|end|><|end|>", None, 20), ("xhi<|end|>", "hi", 7),
])  # fmt: skip
def test_a_stop_text_may_contain_special_tokens(tokenizer, stop, text, num_tokens):
    engine = engine_saying([ord("x"), ord("h"), ord("i"), END], tokenizer)
    engine.submit([ord("x")], greedy(20, stop=stop))
    outputs = list(engine.stream())
    last = outputs[-1]
    assert last.num_tokens == num_tokens
    assert last.finish_reason == ("stop" if text is not None else "length")
    assert last.text == (text if text is not None else "hixhixhixhixhix")
    # Nothing was told that the stop text takes back.
    assert "".join(output.new_text for output in outputs) == last.text


@given(st.lists(st.sampled_from([*b"ab", END]), max_size=12), st.data())
def test_the_length_without_special_tokens(tokens, data):
    backend = Tokenizer.bytes().backend
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer = Tokenizer(backend)
    marked = MarkedText(tokenizer.stream(skip_special=False), tokenizer.stream())
    marked.push(tokens)
    shown = [(7, 0) if token == END else (1, 1) for token in tokens]
    assert len(marked.value) == sum(a for a, _ in shown)
    cut = data.draw(st.integers(0, len(tokens)))
    end = sum(a for a, _ in shown[:cut])
    assert marked.plain_length(end) == sum(b for _, b in shown[:cut])


WORD = [ord("a"), *"é".encode(), *"☃".encode(), ord("z")]


@pytest.mark.parametrize("count", range(1, 8))
def test_a_rollback_into_a_character_tells_no_text_again(tokenizer, count):
    engine = engine_saying(WORD, tokenizer)
    request = engine.submit([ord("a")], greedy(20))
    told, tokens = "", []
    while len(told) < 4:
        for output in [*engine.step(), *engine.drain()]:
            told, tokens = told + output.new_text, output.token_ids
    engine.rollback(request, count)
    told = bytes(tokens[:-count]).decode(errors="ignore")  # of what is left
    for output in engine.stream():
        told += output.new_text
        assert output.text == told
    assert told == "é☃zaé☃zaé☃z"


@pytest.mark.parametrize("steps", range(2, 9))
def test_a_forks_text_goes_on_where_its_parents_is(tokenizer, steps):
    engine = engine_saying(WORD, tokenizer)
    request = engine.submit([ord("a")], greedy(20))
    told = ""
    for _ in range(steps):
        told += "".join(output.new_text for output in engine.step())
    told += "".join(output.new_text for output in engine.drain())
    child, texts = engine.fork(request), {request: told}
    texts[child] = told
    for output in engine.stream():
        texts[output.request_id] += output.new_text
        assert output.text == texts[output.request_id]
        assert len(output.text) >= len(told)
    assert texts[child] == texts[request] == "é☃zaé☃zaé☃z"
