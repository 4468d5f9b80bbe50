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
        self._news: dict[Sequence, bool] = {}  # in order; whether there are only token ids to tell

    def __bool__(self) -> bool:
        return bool(self._news)

    def note(self, sequence: Sequence) -> None:
        """Something about it is to be told; of a best-of request only when all have ended."""
        request = sequence.request
        if request.beam is None and request.params.num_samples == request.params.n:
            self._news[sequence] = False

    def note_all(self, sequences: Iterable[Sequence]) -> None:
        """Each has new tokens, and nothing else to be told but their text."""
        self._news.update(dict.fromkeys(sequences, self._tokenizer is None))

    def choose(self, request: Request) -> None:
        """The best hypotheses of a beam search; the best samples where some were drawn to spare."""
        params, best = request.params, request.beam and request.beam.results()
        if request.beam is not None:
            for rank, sequence in enumerate(request.samples[: len(best or [0])]):
                sequence.sample = rank
                if best:
                    sequence.tokens, sequence.finish_reason = best[rank].tokens, best[rank].reason
                    sequence.cumulative_logprob = best[rank].logprob
                self._news[sequence] = False
        elif params.num_samples > params.n:
            ended = [s for s in request.samples if s.finish_reason in ("stop", "length")]
            best = sorted(ended or request.samples, key=_mean_logprob, reverse=True)[: params.n]
            for rank, sequence in enumerate(best):
                sequence.sample = rank
                self._news[sequence] = False

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
        sequence.told = min(sequence.told, len(sequence.tokens))
        sequence.detokenizer, sequence.text, sequence.searched = None, "", 0
        if self._tokenizer is not None and sequence.request.params.detokenize:
            self._decode(sequence)
            sequence.shown = min(sequence.shown, len(sequence.text))

    def forget(self, request_ids: Iterable[Hashable]) -> None:
        """Nothing is to be told of these requests."""
        gone = set(request_ids)
        self._news = {s: bare for s, bare in self._news.items() if s.request.id not in gone}

    def take(self) -> list[RequestOutput]:
        """Outputs of the sequences with news."""
        news, self._news = self._news, {}
        outputs = []
        for sequence, bare in news.items():
            begin, tokens = sequence.told, sequence.tokens
            sequence.told = end = len(tokens)
            extras = NO_EXTRAS if bare else self._extras(sequence, begin)
            outputs.append(
                RequestOutput(sequence.finish_reason, sequence, tokens, begin, end, extras)
            )
        return outputs

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

    def _extras(self, sequence: Sequence, begin: int) -> Extras:
        request, params = sequence.request, sequence.request.params
        texts, keeps = params.detokenize and self._tokenizer is not None, request.logprobs >= 0
        reported = begin - len(request.prompt)
        new_text = self._new_text(sequence) if texts else ""
        return Extras(
            new_text, sequence.text[: sequence.shown], sequence.error,
            sequence.logprobs[reported:] if keeps and params.logprobs is not None else None,
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
