"""Outputs of requests: new tokens, their text, stop texts. Host code: imports no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

from jaxkv.engine.marked_text import MarkedText
from jaxkv.engine.protocols import Tokenizer
from jaxkv.engine.requests import (
    FinishReason,
    Request,
    Sequence,
    SequenceError,
    TextState,
    Timings,
    TokenLogprobs,
)
from jaxkv.errors import JaxkvError


@dataclasses.dataclass(frozen=True, slots=True)
class Extras:
    """Parts of a `RequestOutput` beside its token ids."""

    new_text: str = ""
    text: str = ""
    error: Exception | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


NO_EXTRAS = Extras()


@dataclasses.dataclass(eq=False, slots=True)
class RequestOutput:
    """New tokens of one sample of a request.

    `Engine.step` makes one for each sequence with new tokens, a large part of the host's work: what
    does not change from step to step is looked up on access.

    Attributes:
      finish_reason: None while the sample runs; "stop" (an end token or a stop text), "length"
        (max_tokens or the cache's longest sequence), "abort", or "error".
    """

    finish_reason: FinishReason | None
    _sequence: Sequence
    _tokens: list[int]  # of the sequence, which goes on growing
    _begin: int  # of the new ones
    _end: int
    _extras: Extras = NO_EXTRAS

    def confirm(self) -> None:
        """Counts the text and the end as reported."""
        sequence = self._sequence
        if self._extras is not NO_EXTRAS:
            sequence.text.num_shown = max(sequence.text.num_shown, len(self.text))
        if self.finish_reason is not None:
            sequence.end_reported = True

    @property
    def request_id(self) -> Hashable:
        """Id of the request."""
        return self._sequence.request.id

    @property
    def sample(self) -> int:
        """Number of the sample within its request."""
        return self._sequence.sample

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self._sequence.request.prompt

    @property
    def new_token_ids(self) -> list[int]:
        """Output tokens since the previous output."""
        return self._tokens[self._begin : self._end]

    @property
    def token_ids(self) -> list[int]:
        """All output tokens up to now, the end token included."""
        return self._tokens[len(self.prompt_ids) : self._end]

    @property
    def num_tokens(self) -> int:
        """Number of output tokens up to now."""
        return self._end - len(self.prompt_ids)

    @property
    def new_text(self) -> str:
        """The text that the new tokens complete; "" without a tokenizer."""
        return self._extras.new_text

    @property
    def text(self) -> str:
        """All text up to now, cut before a stop text."""
        return self._extras.text

    @property
    def finished(self) -> bool:
        """Whether this is the last output of the sample."""
        return self.finish_reason is not None

    @property
    def error(self) -> str | None:
        """Error message when the finish reason is "error", else None."""
        error = self._extras.error
        if error is None or type(error) is JaxkvError:
            return None if error is None else str(error)
        return f"{type(error).__name__}: {error}"

    @property
    def exception(self) -> Exception | None:
        """The error itself, with its traceback, when the finish reason is "error"."""
        return self._extras.error

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of the new tokens; None unless requested."""
        return self._extras.logprobs

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of the prompt from its second token on, with the first output."""
        return self._extras.prompt_logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of all output tokens up to now, if they are kept."""
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
        """Number of preemptions of the sample up to now."""
        return self._sequence.num_preemptions

    @property
    def timings(self) -> Timings:
        """Times of the request, as far as they are known."""
        return self._sequence.request.timings

    def __repr__(self) -> str:
        names = ("request_id", "sample", "new_token_ids", "new_text", "num_tokens", "finish_reason",
                 "error", "num_cached_tokens")  # fmt: skip
        return f"RequestOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class Outputs:
    """Collects the outputs of sequences with new tokens since the last call of `take`.

    Decoding text costs more than all other host work for a token. It happens when outputs are made,
    or at once for requests with stop texts.

    Attributes:
      taken: outputs of the last call of `take`: an interrupt on its way back does not lose them.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._special_tokens = tuple(getattr(tokenizer, "special_tokens", ()))
        self._news: dict[Sequence, bool] = {}  # in order; True: only token ids to report
        self._made: list[RequestOutput] | None = None  # by a `take` that did not come to its end
        self.taken: list[RequestOutput] = []

    def __bool__(self) -> bool:
        return bool(self._news or self._made)

    def note(self, sequence: Sequence) -> None:
        """Marks a sequence for the next outputs; best-of samples are marked when all have ended."""
        request = sequence.request
        if request.beam is None and request.params.num_samples == request.params.n:
            self._news[sequence] = False

    def note_all(self, sequences: Iterable[Sequence]) -> None:
        """Marks sequences that have new tokens and, beside their text, nothing else to report."""
        self._news.update(dict.fromkeys(sequences, self._tokenizer is None))

    def choose(self, request: Request) -> None:
        """Selects the outputs of a beam search (best hypotheses) or of best-of sampling."""
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
        """Whether a stop text of the request is complete; cuts the text before it."""
        self._decode(sequence)
        params, text = sequence.request.params, sequence.text
        searched = text.value if text.marked is None else text.marked.value
        found = list[int]()
        if len(sequence.tokens) - len(sequence.request.prompt) > params.min_tokens:
            # A stop text may have begun with earlier tokens, but not have been complete before.
            starts = [max(0, text.num_searched - len(stop) + 1) for stop in params.stop]
            ends = map(searched.find, params.stop, starts)
            found = [at for at in ends if at >= 0]
        if not found:
            text.num_searched = len(searched)
            return False
        text.decoding = True  # an interrupt leaves a text that is decoded, and cut, again
        text.value = text.value[: _plain_length(text, min(found))]
        text.stopped = True
        text.decoding = False
        return True

    def cut(self, sequence: Sequence) -> None:
        """Follows a rollback: decodes the text again; later outputs continue from there."""
        sequence.num_reported = min(sequence.num_reported, len(sequence.tokens))
        shown = sequence.text.num_shown
        sequence.text = TextState(num_shown=shown)
        if self._tokenizer is not None and sequence.request.params.detokenize:
            self._decode(sequence)
            sequence.text.num_shown = min(shown, len(sequence.text.value))

    def copy(self, parent: Sequence, child: Sequence) -> None:
        """Starts a fork at the tokens and the text that its parent has reported."""
        child.num_reported = parent.num_reported
        child.text.num_shown = parent.text.num_shown

    def forget(self, request_ids: Iterable[Hashable]) -> None:
        """Drops unreported outputs of these requests."""
        gone = set(request_ids)
        self._news = {s: bare for s, bare in self._news.items() if s.request.id not in gone}
        if self._made is not None:
            self._made = [made for made in self._made if made.request_id not in gone]

    def take(self) -> list[RequestOutput]:
        """Outputs of all marked sequences, also put into `taken`; clears the marks.

        Interrupted, it loses none: the next call takes what this one had made.

        Raises:
          SequenceError: the tokenizer raised; the other outputs come with the next call.
        """
        if self._made is None:
            made = [self._output(sequence, bare) for sequence, bare in self._news.items()]
            self._made, self._news = made, {}
        for output in self._made:  # most report tokens and nothing else
            output._sequence.num_reported = output._end
            if output.finish_reason is not None or output._extras is not NO_EXTRAS:
                output.confirm()
        self.taken, self._made = self._made, None
        return self.taken

    def _output(self, sequence: Sequence, bare: bool) -> RequestOutput:
        begin, tokens = sequence.num_reported, sequence.tokens
        try:
            extras = NO_EXTRAS if bare else self._extras(sequence, begin)
        except Exception as error:
            raise SequenceError(sequence, error) from error
        return RequestOutput(sequence.finish_reason, sequence, tokens, begin, len(tokens), extras)

    def _decode(self, sequence: Sequence) -> None:
        """Decodes the tokens that the text does not cover yet."""
        text = sequence.text
        if text.decoding or text.num_decoded > len(sequence.tokens):  # interrupted: from the start
            text = sequence.text = TextState(
                num_searched=text.num_searched, num_shown=text.num_shown
            )
        if text.detokenizer is None:
            assert self._tokenizer is not None
            text.detokenizer = self._tokenizer.stream()
            text.num_decoded = len(sequence.request.prompt)
            stops = sequence.request.params.stop
            if any(special in stop for special in self._special_tokens for stop in stops):
                shown: Any = self._tokenizer
                shown = shown.stream(skip_special=False)
                text.marked = MarkedText(shown, self._tokenizer.stream())
        text.decoding = True
        new = sequence.tokens[text.num_decoded :]
        text.num_decoded += len(new)
        text.value += text.detokenizer.push(new)
        if text.marked is not None:
            text.marked.push(new)
        if sequence.finish_reason is not None:
            text.value += text.detokenizer.flush()
        text.decoding = False

    def _extras(self, sequence: Sequence, begin: int) -> Extras:
        request, params = sequence.request, sequence.request.params
        texts, keeps = params.detokenize and self._tokenizer is not None, request.logprobs >= 0
        reported, shown = begin - len(request.prompt), sequence.text.num_shown
        text = self._text(sequence) if texts else ""
        return Extras(
            text[shown:], text, sequence.error,
            sequence.logprobs[reported:] if keeps and params.logprobs is not None else None,
            None if reported else request.prompt_logprobs,
            sequence.cumulative_logprob if keeps else None,
        )  # fmt: skip

    def _text(self, sequence: Sequence) -> str:
        """Text to report up to now. A tail that may become a stop text is held back."""
        # After an error the tokenizer may be its cause: the text stays as it is.
        if not sequence.text.stopped and sequence.error is None:
            self._decode(sequence)
        text = sequence.text
        safe = len(text.value)
        if sequence.finish_reason is None and sequence.request.params.stop:
            searched = text.value if text.marked is None else text.marked.value
            held = _could_begin(searched, sequence.request.params.stop)
            safe = min(safe, _plain_length(text, len(searched) - held))
        return text.value[: max(text.num_shown, safe)]


def _plain_length(text: TextState, end: int) -> int:
    """Characters of the text before the first `end` of the text in which stop texts are looked
    for."""
    return end if text.marked is None else text.marked.plain_length(end)


def _mean_logprob(sequence: Sequence) -> float:
    return sequence.cumulative_logprob / max(1, len(sequence.tokens) - len(sequence.request.prompt))


def _could_begin(text: str, stops: Iterable[str]) -> int:
    """Number of trailing characters with which a stop text could begin."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
