"""Outputs of requests: new tokens, their text, stop texts. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable

from jaxkv.engine.protocols import Tokenizer
from jaxkv.engine.requests import FinishReason, Request, Sequence, TextState, Timings, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class Extras:
    """What an output has beside token ids; see `RequestOutput`."""

    new_text: str = ""
    text: str = ""
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


NO_EXTRAS = Extras()


@dataclasses.dataclass(eq=False, slots=True)
class RequestOutput:
    """What a step brought for one sample of a request.

    There is one for each sequence and step, and making them is a large part of what a step costs
    the host: what does not change from step to step is looked up when somebody asks.

    Attributes:
      finish_reason: None while it goes on; "stop" (an end token or a stop text), "length"
        (max_tokens or the cache's longest sequence), "abort", or "error".
    """

    finish_reason: FinishReason | None
    _sequence: Sequence
    _tokens: list[int]  # of the sequence, which goes on growing
    _begin: int  # of the new ones
    _end: int
    _extras: Extras = NO_EXTRAS

    @property
    def request_id(self) -> Hashable:
        """The request."""
        return self._sequence.request.id

    @property
    def sample(self) -> int:
        """Which of its samples."""
        return self._sequence.sample

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""
        return self._sequence.request.prompt

    @property
    def new_token_ids(self) -> list[int]:
        """Tokens of this step."""
        return self._tokens[self._begin : self._end]

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far, the end token included."""
        return self._tokens[len(self.prompt_ids) : self._end]

    @property
    def num_tokens(self) -> int:
        """How many they are."""
        return self._end - len(self.prompt_ids)

    @property
    def new_text(self) -> str:
        """The text that the new tokens complete; "" without a tokenizer."""
        return self._extras.new_text

    @property
    def text(self) -> str:
        """All text so far, up to a stop text."""
        return self._extras.text

    @property
    def finished(self) -> bool:
        """Whether this is the sample's last output."""
        return self.finish_reason is not None

    @property
    def error(self) -> str | None:
        """What went wrong, if something did."""
        return self._extras.error

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Of the new tokens, if asked for."""
        return self._extras.logprobs

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Of the prompt from its second token on, if asked for; with the first output."""
        return self._extras.prompt_logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """Of all tokens so far, if log-probabilities are kept."""
        return self._extras.cumulative_logprob

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the request's submission to its first token; None before that."""
        timings = self.timings
        return None if timings.first_token is None else timings.first_token - timings.submitted

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was found in the cache."""
        return self._sequence.request.num_cached_tokens or 0

    @property
    def num_preemptions(self) -> int:
        """How often the sample has lost its blocks by now."""
        return self._sequence.num_preemptions

    @property
    def timings(self) -> Timings:
        """Of the request, as far as they are known by now."""
        return self._sequence.request.timings

    def __repr__(self) -> str:
        names = ("request_id", "sample", "new_token_ids", "new_text", "num_tokens", "finish_reason",
                 "error", "num_cached_tokens")  # fmt: skip
        return f"RequestOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class Outputs:
    """Sequences with news since the last call of `take`.

    Text costs more than all else the host does for a token, so it is made when the outputs are, and
    where a request has stop texts at once.
    """

    def __init__(self, tokenizer: Tokenizer | None):
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
        request, text = sequence.request, sequence.text
        self._decode(sequence)
        searched, text.num_searched = text.num_searched, len(text.value)
        if len(sequence.tokens) - len(request.prompt) <= request.params.min_tokens:
            return False
        # A stop text may have begun with earlier tokens, but not have been complete before.
        ends = [text.value.find(x, max(0, searched - len(x) + 1)) for x in request.params.stop]
        found = [at for at in ends if at >= 0]
        if found:
            text.value = text.value[: min(found)]
            text.stopped = True
        return bool(found)

    def cut(self, sequence: Sequence) -> None:
        """Its last tokens were taken back: decodes its text again, shown from there on."""
        sequence.num_reported = min(sequence.num_reported, len(sequence.tokens))
        shown = sequence.text.num_shown
        sequence.text = TextState(num_shown=shown)
        if self._tokenizer is not None and sequence.request.params.detokenize:
            self._decode(sequence)
            sequence.text.num_shown = min(shown, len(sequence.text.value))

    def copy(self, parent: Sequence, child: Sequence) -> None:
        """A fork has reported, and shown, what its parent has."""
        child.num_reported = parent.num_reported
        child.text.num_shown = parent.text.num_shown

    def forget(self, request_ids: Iterable[Hashable]) -> None:
        """Nothing is to be told of these requests."""
        gone = set(request_ids)
        self._news = {s: bare for s, bare in self._news.items() if s.request.id not in gone}

    def take(self) -> list[RequestOutput]:
        """Outputs of the sequences with news."""
        news, self._news = self._news, {}
        outputs = []
        for sequence, bare in news.items():
            begin, tokens = sequence.num_reported, sequence.tokens
            sequence.num_reported = end = len(tokens)
            extras = NO_EXTRAS if bare else self._extras(sequence, begin)
            outputs.append(
                RequestOutput(sequence.finish_reason, sequence, tokens, begin, end, extras)
            )
        return outputs

    def _decode(self, sequence: Sequence) -> None:
        """Brings a sequence's text up to its tokens."""
        text = sequence.text
        if text.detokenizer is None:
            assert self._tokenizer is not None
            text.detokenizer = self._tokenizer.stream()
            text.num_decoded = len(sequence.request.prompt)
        new = sequence.tokens[text.num_decoded :]
        text.num_decoded += len(new)
        text.value += text.detokenizer.push(new)
        if sequence.finish_reason is not None:
            text.value += text.detokenizer.flush()

    def _extras(self, sequence: Sequence, begin: int) -> Extras:
        request, params = sequence.request, sequence.request.params
        texts, keeps = params.detokenize and self._tokenizer is not None, request.logprobs >= 0
        reported = begin - len(request.prompt)
        new_text = self._new_text(sequence) if texts else ""
        return Extras(
            new_text, sequence.text.value[: sequence.text.num_shown], sequence.error,
            sequence.logprobs[reported:] if keeps and params.logprobs is not None else None,
            None if reported else request.prompt_logprobs,
            sequence.cumulative_logprob if keeps else None,
        )  # fmt: skip

    def _new_text(self, sequence: Sequence) -> str:
        """What can be shown since the last output; what may yet become a stop text is held back."""
        text = sequence.text
        if not text.stopped:
            self._decode(sequence)
        safe = len(text.value)
        if sequence.finish_reason is None:
            safe -= _could_begin(text.value, sequence.request.params.stop)
        new = text.value[text.num_shown : safe]
        text.num_shown = max(text.num_shown, safe)
        return new


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
