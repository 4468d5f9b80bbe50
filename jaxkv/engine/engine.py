"""The engine: requests in, tokens out, over one paged cache that all of them share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from jaxkv.config import CacheConfig
from jaxkv.engine.config import SchedulerConfig
from jaxkv.engine.device import Device
from jaxkv.engine.loop import StepLoop
from jaxkv.engine.outputs import Outputs, RequestOutput
from jaxkv.engine.protocols import Model, Tokenizer
from jaxkv.engine.requests import Sequence, Status
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.search import Beam
from jaxkv.engine.statistics import EngineStats
from jaxkv.engine.validation import (
    checked_prompt,
    checked_stop_ids,
    require_beams_fit,
    require_fits,
    require_manager_fits,
)
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.manager.block_manager import BlockManager
from jaxkv.progress_bar import progress_bar
from jaxkv.sampling.params import BeamSearchParams, SamplingParams

AnyParams = SamplingParams | BeamSearchParams


class Engine:
    """Continuous batching over a model: a Python object that a research loop drives.

    Every call of `step` dispatches the next step and returns the outputs of the one before. One
    thread drives an engine.

    Args:
      model: an NNX module `model(tokens, state, batch) -> logits, state` with a `config`; see
        `jaxkv.engine.protocols.Model`.
      cache: sizes of the cache; its rows (`max_seqs`) are the sequences that can run at once.
      scheduler: how steps are formed.
      tokenizer: for prompts and outputs as text, and for stop texts, such as
        `jaxkv.models.Checkpoint.tokenizer`; see `jaxkv.engine.protocols.Tokenizer`.
      eos_token_ids: end tokens in place of the model's own.
      seed: seed for the seeds of requests without one.
      manager: the block manager to use, without sequences or cached blocks; None: one made for the
        cache.
      clock: monotonic clock, seconds; the block manager runs on it too. Default: the given
        manager's, else `time.perf_counter`.
      manager_options: options of the `BlockManager`: prefix_index, eviction, watermark, ...

    Raises:
      ConfigError: a manager that does not fit the cache, or is given together with its options.

    Example:
      >>> import jaxkv
      >>> from flax import nnx
      >>> from jaxkv.models import Llama, LlamaConfig
      >>> config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=16, num_layers=1,
      ...                      num_heads=2, num_kv_heads=1, head_dim=4)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> engine = jaxkv.Engine(model, jaxkv.CacheConfig.for_model(config, max_len=64))
      >>> request = engine.submit([1, 2, 3], jaxkv.SamplingParams(max_tokens=5))
      >>> sum(len(output.new_token_ids) for output in engine.stream())
      5
    """

    def __init__(
        self,
        model: Model,
        cache: CacheConfig,
        scheduler: SchedulerConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Seq[int] | None = None,
        seed: int = 0,
        manager: BlockManager | None = None,
        clock: Callable[[], float] | None = None,
        **manager_options: Any,
    ):
        self.cache, self.config = cache, scheduler or SchedulerConfig()
        self.tokenizer = tokenizer
        if manager is None:
            clock = clock or time.perf_counter
            manager = BlockManager.for_config(cache, clock=clock, **manager_options)
        else:
            require_manager_fits(manager, cache, clock, manager_options)
        self.manager, self.clock = manager, manager.clock
        self.vocab_size = model.config.vocab_size
        eos = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.eos_token_ids = tuple(eos)
        longest = min(cache.max_len, manager.max_blocks_per_seq * manager.block_size)
        self.max_len = min(longest, model.config.max_position_embeddings)
        self._scheduler = Scheduler(manager, self.config)
        self._device = Device(model, cache, self.config)
        self._outputs = Outputs(tokenizer)
        self._loop = StepLoop(
            manager, self._scheduler, self._device, self._outputs, clock=self.clock, seed=seed
        )
        self._kept: list[RequestOutput] = []  # outputs of other requests while `generate` ran

    # -- requests ----------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Seq[int],
        params: AnyParams | None = None,
        *,
        request_id: Hashable = None,
        priority: int = 0,
        namespace: Any = None,
    ) -> Hashable:
        """Submits a request for the tokens after a prompt; returns its id.

        Args:
          prompt: token ids, or text if there is a tokenizer.
          params: sampling or beam-search parameters; greedy by default. A beam search reports its
            hypotheses at its end, best first, as samples.
          request_id: id of the request; None: a number.
          priority: under the scheduler's policy "priority", higher priorities are admitted first.
          namespace: namespace of its blocks in the prefix cache, as in `BlockManager.allocate`.

        Raises:
          ConfigError: an empty prompt, one longer than the longest sequence, a token id outside the
            vocabulary, an id that is in use, or a request that the pool can never hold; with the
            numbers. Nothing was changed.
        """
        params = params or SamplingParams()
        beams = params if isinstance(params, BeamSearchParams) else None
        if beams is not None:
            params = SamplingParams(
                max_tokens=beams.max_tokens, stop_token_ids=beams.stop_token_ids,
                ignore_eos=beams.ignore_eos, detokenize=beams.detokenize,
            )  # fmt: skip
        assert isinstance(params, SamplingParams)
        tokens = checked_prompt(
            prompt, self.tokenizer, max_len=self.max_len, vocab_size=self.vocab_size
        )
        if params.stop and self.tokenizer is None:
            raise ConfigError(f"stop={params.stop} needs the engine's tokenizer=")
        if request_id is not None and request_id in self._loop.requests:
            raise ConfigError(f"request {request_id!r} is running already; give another id")
        end = min(len(tokens) + params.max_tokens, self.max_len)
        require_fits(self.manager, len(tokens), end)
        if beams is not None:
            require_beams_fit(self.manager, beams.width, len(tokens), end)
        stop_ids = checked_stop_ids(params.stop_token_ids, self.eos_token_ids, params.ignore_eos)
        request = self._loop.new_request(
            request_id, tokens, params, priority, namespace, stop_ids, end,
            unforked=params.num_samples - 1,
        )  # fmt: skip
        first = self._scheduler.sequence(request, tokens)
        if end == len(tokens):  # no token is requested, or none fits
            request.unforked = 0
            self._loop.finish(first, "length")
            return request.id
        if beams is not None:
            request.beam = Beam(beams, len(tokens), stop_ids, end)
            request.logprobs = 2 * beams.width
            self._loop.searching.append(request)
        self._scheduler.add(first)
        return request.id

    def abort(self, request_id: Hashable) -> None:
        """Ends a request and all its samples. Unknown or finished requests are ignored."""
        if (request := self._loop.requests.get(request_id)) is not None:
            request.unforked = 0
            for sequence in list(request.samples):
                self._loop.finish(sequence, "abort")

    def fork(
        self, request_id: Hashable, *, new_id: Hashable = None, seed: int | None = None
    ) -> Hashable:
        """Submits a request that continues from another one's current tokens and shares its blocks.

        With `rollback` and `abort` this is tree search. The new request has its own seed.

        Args:
          request_id: a running request of one sample.
          new_id: id of the new request; None: a number.
          seed: seed of the new request; None: one drawn by the engine.

        Returns:
          The new request's id.

        Raises:
          JaxkvError: no such request is running, it has several samples, or the id is in use.
        """
        parent = self._running_sample(request_id)
        if new_id is not None and new_id in self._loop.requests:
            raise JaxkvError(f"request {new_id!r} is running already; give another id")
        old = parent.request
        request = self._loop.new_request(
            new_id, old.prompt, dataclasses.replace(old.params, seed=seed), 0, old.namespace,
            old.stop_ids, old.end,
        )  # fmt: skip
        request.num_cached_tokens = old.num_cached_tokens
        request.prompt_logprobs = old.prompt_logprobs
        if old.timings.first_token is not None:  # the child has its first token already
            request.timings.first_token = request.timings.submitted
        child = self._scheduler.sequence(request, parent.tokens)
        self._outputs.copy(parent, child)
        child.logprobs, child.cumulative_logprob = [*parent.logprobs], parent.cumulative_logprob
        runs = parent.status is Status.RUNNING
        # A prompt is not computed twice: the child of a request in prefill waits for it.
        if (
            not runs
            or self._scheduler.rows.prefilling(parent)
            or not self._scheduler.fork(parent, child)
        ):
            child.processor_state = (
                self._device.processor_state(old.processor, parent.row)
                if runs
                else parent.processor_state
            )
            self._scheduler.add(child)  # finds the parent's full blocks in the prefix cache
        self._loop.apply_changes()
        return request.id

    def rollback(self, request_id: Hashable, num_tokens: int) -> None:
        """Removes the last generated tokens of a running request, which continues from there.

        A request draws the same tokens again after a rollback, since a seed never changes; fork it
        to draw others.

        Raises:
          JaxkvError: no such request is running, it has several samples or a logits processor
            (whose state cannot be rolled back), or fewer tokens than `num_tokens`.
        """
        sequence = self._running_sample(request_id)
        generated = len(sequence.tokens) - len(sequence.request.prompt)
        if not 0 <= num_tokens <= generated:
            raise JaxkvError(f"cannot roll back {num_tokens} tokens: {generated} are generated")
        if sequence.request.processor >= 0:
            raise JaxkvError(
                f"request {request_id!r} has a logits processor, whose state cannot be rolled back"
            )
        if not num_tokens:
            return
        sequence.tokens = sequence.tokens[:-num_tokens]
        if sequence.logprobs:
            gone = sequence.logprobs[-num_tokens:]
            del sequence.logprobs[-num_tokens:]
            sequence.cumulative_logprob -= sum(x.logprob for x in gone)
        self._scheduler.cut(sequence)
        self._outputs.cut(sequence)

    def verify(self, request_id: Hashable, draft_tokens: Seq[int]) -> list[int]:
        """Speculative decoding: keeps the tokens of a draft that the model would have sampled.

        One step computes all of them. Each token is sampled as `step` would have sampled it, with
        its own key, so that the output is the same as without drafts (speculative sampling,
        https://arxiv.org/abs/2211.17192, with a draft model that is certain).

        Args:
          request_id: a running request of one sample whose prompt is computed.
          draft_tokens: guess at the tokens after those of its last output, such as a
            `PromptLookup`'s; may be empty.

        Returns:
          The tokens since its last output: the accepted part of the draft, and one more.

        Raises:
          JaxkvError: no such request is running, its prompt is still to be computed, or it has
            several samples or a logits processor.
          ConfigError: a token outside the vocabulary.
        """
        draft = [int(token) for token in draft_tokens]
        if draft and not (min(draft) >= 0 and max(draft) < self.vocab_size):
            raise ConfigError(f"draft {draft} has tokens outside the vocabulary")
        sequence = self._one_sample(request_id)
        if sequence.request.processor >= 0:
            raise JaxkvError(
                f"request {request_id!r} has a logits processor, which verify cannot run"
            )
        known = sequence.num_reported
        if sequence.finish_reason is None:
            rows = self._scheduler.rows
            if sequence.status is not Status.RUNNING or rows.prefilling(sequence):
                raise JaxkvError(
                    f"the prompt of request {request_id!r} is not computed yet; call step first"
                )
            came = sequence.tokens[known:]  # by steps in flight
            draft = draft[len(came) :] if draft[: len(came)] == came else []
            room = min(rows.left(sequence), self.config.max_tokens_per_step) - 1
            self._loop.verify(sequence, draft[:room])
        return sequence.tokens[known:]

    def _one_sample(self, request_id: Hashable) -> Sequence:
        """The only sample of a running request, after the steps in flight."""
        request = self._loop.requests.get(request_id)
        if request is None:
            raise JaxkvError(
                f"no request {request_id!r} is running; {len(self._loop.requests)} are"
            )
        self._loop.drain()
        if request.unforked or len(request.samples) > 1 or request.beam is not None:
            raise JaxkvError(
                f"request {request_id!r} has several samples; submit one request for each"
            )
        return request.samples[0]

    def _running_sample(self, request_id: Hashable) -> Sequence:
        sequence = self._one_sample(request_id)
        if sequence.finish_reason is not None:
            raise JaxkvError(f"request {request_id!r} has ended: {sequence.finish_reason}")
        return sequence

    # -- steps -------------------------------------------------------------------------------

    def warm_up(self, *, drafts: bool = False, progress: bool = True) -> float:
        """Compiles all step shapes, so that no request waits for compilation; returns the seconds.

        The shapes follow from the scheduler's buckets. Log-probabilities, logits processors and
        prompts with more samples than their bucket has tokens compile when first requested. With
        JAX's compilation cache (`jax.config.update("jax_compilation_cache_dir", ...)`) other
        processes reuse the programs.

        Args:
          drafts: also compile the steps of `verify`.
          progress: show a progress bar on standard error.
        """
        self._loop.drain()
        began, shapes = time.perf_counter(), self._device.shapes(drafts=drafts)
        with progress_bar(shown=progress) as bar:
            task = bar.add_task("compiling", total=len(shapes) + 1)
            self._device.compile_updates()
            for shape in shapes:
                bar.advance(task)
                self._device.compile(shape)
        seconds = time.perf_counter() - began
        self._loop.stats.compile_seconds += seconds
        return seconds

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step and returns the outputs since the last call.

        Without work it does nothing. An error inside a step ends the requests of that step, with
        the error in their outputs; the engine goes on.
        """
        if self._loop.searching:
            self._loop.drain()  # the next step depends on the chosen hypotheses
        idle = not self._loop.in_flight
        sent = self._loop.send()
        while len(self._loop.in_flight) > bool(sent and self.config.pipeline):
            self._loop.collect(self._loop.in_flight.popleft())
        if idle and sent is None and self._scheduler.waiting:
            self._loop.refuse(self._scheduler.waiting[0])
        return self._take_outputs()

    def drain(self) -> list[RequestOutput]:
        """Waits for the steps in flight, dispatches none, and returns their outputs.

        Call it before `fork` or `rollback`: a request may end in a step in flight, and they fail on
        a request that has ended.
        """
        self._loop.drain()
        return self._take_outputs()

    def _take_outputs(self) -> list[RequestOutput]:
        began = time.perf_counter()
        outputs, self._kept = self._kept + self._outputs.take(), []
        self._loop.stats.host.detokenize += time.perf_counter() - began
        return outputs

    def stream(self) -> Iterator[RequestOutput]:
        """Yields outputs as they arrive, until no request is left."""
        while self.has_work:
            yield from self.step()

    def generate(
        self,
        prompts: Seq[str | Seq[int]],
        params: AnyParams | Seq[AnyParams] | None = None,
        *,
        progress: bool = True,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[RequestOutput]]:
        """Runs prompts to their ends; returns the last output of each of their samples.

        Requests submitted earlier run beside them; `step` returns their outputs later.

        Args:
          prompts: token ids or texts.
          params: parameters for all prompts, or one for each.
          progress: show a progress bar on standard error.
          on_token: called with (prompt index, token id) as each token arrives.

        Raises:
          ConfigError: as `submit`, before anything runs.
        """
        if params is None or isinstance(params, SamplingParams | BeamSearchParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(params)} sampling parameters")
        ids: list[Hashable] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                ids.append(self.submit(prompt, one))
        except ConfigError as error:
            self._drop(ids)
            raise ConfigError(f"prompt {len(ids)}: {error}") from None
        last: dict[Hashable, dict[int, RequestOutput]] = {request_id: {} for request_id in ids}
        places = {request_id: i for i, request_id in enumerate(ids)}
        open_ids, others = set(ids), list[RequestOutput]()
        try:
            with progress_bar(shown=progress) as bar:
                task = bar.add_task("generating", total=len(ids))
                while open_ids:
                    for output in self.step():
                        if output.request_id in last:
                            last[output.request_id][output.sample] = output
                            if on_token is not None:
                                for token in output.new_token_ids:
                                    on_token(places[output.request_id], token)
                        else:
                            others.append(output)
                    open_ids &= self._loop.requests.keys()
                    bar.update(task, completed=len(ids) - len(open_ids))
        finally:
            self._drop(ids)  # unfinished ones, after an interrupt
            self._kept += others
        return [[last[i][sample] for sample in sorted(last[i])] for i in ids]

    def _drop(self, request_ids: Iterable[Hashable]) -> None:
        """Aborts requests and drops their outputs."""
        for request_id in request_ids:
            self.abort(request_id)
        self._outputs.forget(request_ids)

    def is_running(self, request_id: Hashable) -> bool:
        """Whether a request has unfinished samples."""
        return request_id in self._loop.requests

    @property
    def has_work(self) -> bool:
        """Whether `step` has work to do or outputs to return."""
        return bool(self._loop.requests or self._loop.in_flight or self._outputs or self._kept)

    def stats(self) -> EngineStats:
        """Engine counters, and blocks by use."""
        blocks = self.manager.stats()
        used = blocks.used_slots + self._scheduler.num_unsynced()
        return dataclasses.replace(
            self._loop.stats,
            host=dataclasses.replace(self._loop.stats.host),
            waiting=len(self._scheduler.waiting),
            running=len(self._scheduler.running),
            blocks=dataclasses.replace(blocks, used_slots=used),
        )
