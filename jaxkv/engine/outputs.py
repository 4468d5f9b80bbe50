"""What users hear of their requests: new tokens, their text, stop texts. Host code, no JAX."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from jaxkv.engine.requests import NO_EXTRAS, Extras, Request, RequestOutput, Sequence


class Outputs:
    """Sequences with news since the last call of `take`.

    Text costs more than all else the host does for a token, so it is made when the outputs are, and
    where a request has stop texts at once.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._news: dict[Sequence, None] = {}  # in order

    def __bool__(self) -> bool:
        return bool(self._news)

    def note(self, sequence: Sequence) -> None:
        """Something about it is to be told; of a best-of request only when all have ended."""
        request = sequence.request
        if request.beam is None and request.params.num_samples == request.params.n:
            self._news[sequence] = None

    def note_all(self, sequences: Iterable[Sequence]) -> None:
        """Something about each is to be told, at once."""
        self._news.update(dict.fromkeys(sequences))

    def choose(self, request: Request) -> None:
        """The best hypotheses of a beam search; the best samples where some were drawn to spare."""
        params, best = request.params, request.beam and request.beam.results()
        if request.beam is not None:
            for rank, sequence in enumerate(request.samples[: len(best or [0])]):
                sequence.sample = rank
                if best:
                    sequence.tokens, sequence.finish_reason = best[rank].tokens, best[rank].reason
                    sequence.cumulative_logprob = best[rank].logprob
                self._news[sequence] = None
        elif params.num_samples > params.n:
            ended = [s for s in request.samples if s.finish_reason in ("stop", "length")]
            best = sorted(ended or request.samples, key=_mean_logprob, reverse=True)[: params.n]
            for rank, sequence in enumerate(best):
                sequence.sample = rank
                self._news[sequence] = None

    def finds_stop_text(self, sequence: Sequence) -> bool:
        """Whether one of its stop texts is complete; the text ends before it."""
        request = sequence.request
        self._decode(sequence)
        searched, sequence.searched = sequence.searched, len(sequence.text)
        if len(sequence.tokens) - len(request.prompt) <= request.params.min_tokens:
            return False
        # A stop text may have begun with earlier tokens, but not have been complete before.
        ends = [sequence.text.find(x, max(0, searched - len(x) + 1)) for x in request.params.stop]
        found = [at for at in ends if at >= 0]
        if found:
            sequence.text = sequence.text[: min(found)]
            sequence.text_is_over = True
        return bool(found)

    def cut(self, sequence: Sequence) -> None:
        """Some of its last tokens are no more; its text is made anew, and shown from there on."""
        generated = len(sequence.tokens) - len(sequence.request.prompt)
        sequence.reported = min(sequence.reported, generated)
        sequence.detokenizer, sequence.text, sequence.searched = None, "", 0
        if self._tokenizer is not None and sequence.request.params.detokenize:
            self._decode(sequence)
            sequence.shown = min(sequence.shown, len(sequence.text))

    def forget(self, request_ids: Iterable[Hashable]) -> None:
        """Nothing is to be told of these requests."""
        gone = set(request_ids)
        self._news = {s: None for s in self._news if s.request.id not in gone}

    def take(self) -> list[RequestOutput]:
        """Outputs of the sequences with news."""
        news, self._news = self._news, {}
        return [self._output(sequence) for sequence in news]

    def _decode(self, sequence: Sequence) -> None:
        """Brings a sequence's text up to its tokens."""
        if sequence.detokenizer is None:
            sequence.detokenizer = self._tokenizer.stream()
            sequence.decoded = len(sequence.request.prompt)
        new = sequence.tokens[sequence.decoded :]
        sequence.decoded += len(new)
        sequence.text += sequence.detokenizer.push(new)
        if sequence.finish_reason is not None:
            sequence.text += sequence.detokenizer.flush()

    def _output(self, sequence: Sequence) -> RequestOutput:
        request, tokens, reported = sequence.request, sequence.tokens, sequence.reported
        new = tokens[len(request.prompt) + reported :]
        sequence.reported = count = reported + len(new)
        texts = request.params.detokenize and self._tokenizer is not None
        bare = not texts and request.logprobs < 0 and sequence.error is None
        extras = NO_EXTRAS if bare else self._extras(sequence, reported, texts)
        return RequestOutput(new, count, sequence.finish_reason, sequence, tokens, extras)

    def _extras(self, sequence: Sequence, reported: int, texts: bool) -> Extras:
        request, new_text = sequence.request, self._new_text(sequence) if texts else ""
        keeps, wants = request.logprobs >= 0, request.params.logprobs is not None
        return Extras(
            new_text, sequence.text[: sequence.shown], sequence.error,
            sequence.logprobs[reported:] if keeps and wants else None,
            None if reported else request.prompt_logprobs,
            sequence.cumulative_logprob if keeps else None,
        )  # fmt: skip

    def _new_text(self, sequence: Sequence) -> str:
        """What can be shown since the last output; what may yet become a stop text is held back."""
        if not sequence.text_is_over:
            self._decode(sequence)
        safe = len(sequence.text)
        if sequence.finish_reason is None:
            safe -= _could_begin(sequence.text, sequence.request.params.stop)
        text = sequence.text[sequence.shown : safe]
        sequence.shown = max(sequence.shown, safe)
        return text


def _mean_logprob(sequence: Sequence) -> float:
    return sequence.cumulative_logprob / max(1, len(sequence.tokens) - len(sequence.request.prompt))


def _could_begin(text: str, stops: Iterable[str]) -> int:
    """Characters at the end of a text with which a stop text could begin."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
