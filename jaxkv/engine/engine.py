"""The engine: requests in, tokens out, over one paged cache that all of them share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from jaxkv.config import CacheConfig
from jaxkv.engine.config import SchedulerConfig
from jaxkv.engine.device import Device
from jaxkv.engine.loop import StepLoop
from jaxkv.engine.model_call import ModelRaised
from jaxkv.engine.outputs import Outputs, RequestOutput
from jaxkv.engine.protocols import Model, Tokenizer
from jaxkv.engine.requests import Sequence, SequenceError, Status
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.search import Beam
from jaxkv.engine.statistics import EngineStats
from jaxkv.engine.validation import (
    checked_prompt,
    checked_stop_ids,
    require_beams_fit,
    require_fits,
    require_manager_fits,
    require_order_and_keys,
    require_window,
)
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.manager.block_manager import BlockManager
from jaxkv.progress_bar import progress_bar
from jaxkv.sampling.checks import INT32_MAX, Integer, TokenIds, within
from jaxkv.sampling.params import BeamSearchParams, SamplingParams
from jaxkv.sampling.sampler import ProcessorError

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
      ConfigError: a manager that does not fit the cache, or is given together with its options; a
        `sliding_window` that is not the model's.

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
        require_window(manager, model.config)
        self.manager, self.clock = manager, manager.clock
        self.vocab_size = model.config.vocab_size
        eos = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.eos_token_ids: tuple[int, ...] = TokenIds()("eos_token_ids", eos)
        within("eos_token_ids", self.eos_token_ids, self.vocab_size)
        longest = min(cache.max_len, manager.max_blocks_per_seq * manager.block_size)
        self.max_len = min(longest, model.config.max_position_embeddings)
        self._scheduler = Scheduler(manager, self.config)
        self._device = Device(model, cache, self.config)
        self._outputs = Outputs(tokenizer)
        self._loop = StepLoop(
            manager, self._scheduler, self._device, self._outputs, clock=self.clock, seed=seed
        )
        self._kept: list[RequestOutput] = []  # outputs of other requests while `generate` runs
        self._generating = False
        self._dropped: set[Hashable] = set()  # requests of a `generate` that did not end

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
          priority: under the scheduler's policy "priority", higher priorities are admitted first
            and preempt running requests of lower ones.
          namespace: namespace of its blocks in the prefix cache, as in `BlockManager.allocate`.

        Raises:
          ConfigError: an empty prompt, one longer than the longest sequence, a token id outside the
            vocabulary, an id that is in use, a namespace that cannot be a key, or a request that
            the pool can never hold; with the numbers. Nothing was changed.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise ConfigError(
                f"params must be SamplingParams or BeamSearchParams, got {type(params).__name__}"
            )
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
        within("logit_bias", params.logit_bias, self.vocab_size)
        within("stop_token_ids", params.stop_token_ids, self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise ConfigError(f"stop={params.stop} needs the engine's tokenizer=")
        require_order_and_keys(request_id, priority, namespace)
        if request_id is not None and request_id in self._loop.requests:
            raise ConfigError(f"request {request_id!r} is running already; give another id")
        end = min(len(tokens) + params.max_tokens, self.max_len)
        require_fits(self.manager, len(tokens), end)
        if beams is not None:
            require_beams_fit(self.manager, beams.width, len(tokens), end)
        stop_ids = checked_stop_ids(params.stop_token_ids, self.eos_token_ids, params.ignore_eos)
        if (problem := self._processor_problem(params)) is not None:
            params = dataclasses.replace(params, logits_processor=None)  # it ends at once
        with self._loop.whole:
            request = self._loop.new_request(
                request_id, tokens, params, priority, namespace, stop_ids, end,
                unforked=params.num_samples - 1,
            )  # fmt: skip
            first = self._scheduler.sequence(request, tokens)
            if beams is not None:
                request.beam = Beam(beams, tokens, stop_ids, end)
                request.logprobs = min(request.beam.num_candidates, self.vocab_size)
            # No token is requested, or none fits: only scores of the prompt may be left to compute.
            nothing = end == len(tokens) and not request.wants_prompt_logprobs
            if nothing or problem is not None:
                while request.unforked:
                    request.unforked -= 1
                    self._scheduler.sequence(request, tokens)
                self._loop.open(request)
                self._loop.end(request, "error" if problem else "length", problem)
                return request.id
            self._scheduler.add(first)
            self._loop.open(request)
        return request.id

    def _processor_problem(self, params: SamplingParams) -> ProcessorError | None:
        """What is wrong with a request's logits processor: it ends that request alone."""
        if params.logits_processor is None:
            return None
        try:
            self._device.processors.check(params.logits_processor)
        except ProcessorError as error:
            return error
        return None

    def abort(self, request_id: Hashable) -> None:
        """Ends a request and all its samples. Unknown or finished requests are ignored."""
        with self._loop.whole:
            if (request := self._loop.requests.get(request_id)) is not None:
                self._loop.end(request, "abort")

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
        if seed is not None:
            seed = Integer(0, 2**32 - 1)("seed", seed)
        require_order_and_keys(new_id, 0, None)
        if new_id is not None and new_id in self._loop.requests:
            raise JaxkvError(f"request {new_id!r} is running already; give another id")
        old = parent.request
        with self._loop.whole:
            request = self._loop.new_request(
                new_id, old.prompt, dataclasses.replace(old.params, seed=seed),
                -old.order[0], old.namespace, old.stop_ids, old.end,
            )  # fmt: skip
            request.num_cached_tokens = old.num_cached_tokens
            request.prompt_logprobs = old.prompt_logprobs
            if old.timings.first_token is not None:  # the child has its first token already
                request.timings.first_token = request.timings.submitted
            child = self._scheduler.sequence(request, parent.tokens)
            self._outputs.copy(parent, child)
            child.logprobs = [*parent.logprobs]
            child.cumulative_logprob = parent.cumulative_logprob
            child.processor_state = parent.processor_state
            # A prompt is not computed twice: the child of a request in prefill waits for it.
            if (
                parent.status is not Status.RUNNING
                or self._scheduler.rows.prefilling(parent)
                or not self._scheduler.fork(parent, child)
            ):
                self._scheduler.add(child)  # finds the parent's full blocks in the prefix cache
            self._loop.open(request)
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
        num_tokens = Integer(0, INT32_MAX)("num_tokens", num_tokens)
        if num_tokens > generated:
            raise JaxkvError(f"cannot roll back {num_tokens} tokens: {generated} are generated")
        if sequence.request.processor >= 0:
            raise JaxkvError(
                f"request {request_id!r} has a logits processor, whose state cannot be rolled back"
            )
        if not num_tokens:
            return
        with self._loop.whole:
            self._scheduler.cut(sequence, len(sequence.tokens) - num_tokens)
            if sequence.logprobs:
                del sequence.logprobs[-num_tokens:]
                sequence.cumulative_logprob = sum(one.logprob for one in sequence.logprobs)
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
        draft = list(TokenIds()("draft_tokens", draft_tokens))
        within("draft_tokens", draft, self.vocab_size)
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
            with self._loop.whole:
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

        Raises:
          ModelError: the model returned other logits or another state than it must. What the model
            itself raises comes as it is.
        """
        self._loop.drain()
        began, shapes = time.perf_counter(), self._device.shapes(drafts=drafts)
        with progress_bar(shown=progress) as bar, self._loop.whole:
            task = bar.add_task("compiling", total=len(shapes) + 1)
            self._device.compile_updates()
            for shape in shapes:
                bar.advance(task)
                try:
                    self._device.compile(shape)
                except ModelRaised as raised:
                    raise raised.error from None
        seconds = time.perf_counter() - began
        self._loop.stats.compile_seconds += seconds
        return seconds

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step and returns the outputs since the last call.

        Without work it does nothing. An error inside a step ends the requests of that step, with
        the error in their outputs; the engine goes on. After an interrupt the next call goes on,
        and no token is lost.

        Raises:
          ModelError: as `warm_up`; the requests of the step have ended with the error too.
        """
        return self._deliver(self._advance)

    def _advance(self) -> None:
        """Dispatches the next step and takes in the one before."""
        loop = self._loop
        if self._dropped:  # an interrupt came before they were aborted
            self._drop(())
        if loop.searching:
            loop.drain()  # the next step depends on the chosen hypotheses
        idle = not loop.in_flight
        sent = loop.send()
        while len(loop.in_flight) > bool(sent and self.config.pipeline):
            loop.collect()
        if idle and sent is None and self._scheduler.waiting:
            with loop.whole:
                if (request := self._scheduler.resolve_stall()) is not None:
                    loop.refuse(request)

    def drain(self) -> list[RequestOutput]:
        """Waits for the steps in flight, dispatches none, and returns their outputs.

        Call it before `fork` or `rollback`: a request may end in a step in flight, and they fail on
        a request that has ended.
        """
        return self._deliver(self._loop.drain)

    def _deliver(self, run: Callable[[], None]) -> list[RequestOutput]:
        """Runs a part of the engine and returns the outputs since the last call."""
        out = self._outputs
        out.taken = []
        try:
            run()
            self._take_outputs()
            if not self._generating or not (self._loop.requests or self._loop.in_flight):
                out.taken, self._kept = self._kept + out.taken, []
            return out.taken
        except BaseException:  # what was not returned comes with the next call
            self._kept, out.taken = out.taken + self._kept, []
            raise

    def _take_outputs(self) -> None:
        """Takes outputs since the last call; a request whose output cannot be made ends alone."""
        began = time.perf_counter()
        while True:
            try:
                self._outputs.take()
                return
            except SequenceError as failed:
                with self._loop.whole:
                    self._loop.fail_output(failed.sequence, failed.error)
            finally:
                self._loop.stats.host.detokenize += time.perf_counter() - began

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
        last: dict[Hashable, dict[int, RequestOutput]] = {}
        self._generating, self._outputs.taken = True, []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                ids.append(self._loop.new_id())
                last[ids[-1]] = {}
                self._submit_one(len(ids) - 1, prompt, one, ids[-1])
            places = {request_id: i for i, request_id in enumerate(ids)}
            unfinished = set(ids)
            with progress_bar(shown=progress) as bar:
                task = bar.add_task("generating", total=len(ids))
                while unfinished:
                    outputs = self.step()
                    self._keep_others(last)
                    for output in outputs:
                        if output.request_id not in last:
                            continue
                        last[output.request_id][output.sample] = output
                        if output.finished and not self.is_running(output.request_id):
                            unfinished.discard(output.request_id)
                        if on_token is not None:
                            for token in output.new_token_ids:
                                on_token(places[output.request_id], token)
                    bar.update(task, completed=len(ids) - len(unfinished))
        finally:
            self._keep_others(last)
            self._generating = False
            self._drop(ids)  # unfinished ones, after an error or an interrupt
        return [[last[i][sample] for sample in sorted(last[i])] for i in ids]

    def _keep_others(self, mine: Container[Hashable]) -> None:
        """Keeps those outputs of the last step that belong to other requests."""
        self._kept += [o for o in self._outputs.taken if o.request_id not in mine]
        self._outputs.taken = []

    def _submit_one(
        self, number: int, prompt: str | Seq[int], params: AnyParams, request_id: Hashable
    ) -> None:
        try:
            self.submit(prompt, params, request_id=request_id)
        except ConfigError as error:
            raise ConfigError(f"prompt {number}: {error}") from None

    def _drop(self, request_ids: Iterable[Hashable]) -> None:
        """Aborts requests and drops their outputs."""
        self._dropped.update(request_ids)
        for request_id in self._dropped:
            self.abort(request_id)
        self._outputs.forget(self._dropped)
        self._kept = [o for o in self._kept if o.request_id not in self._dropped]
        self._dropped = set()

    def is_running(self, request_id: Hashable) -> bool:
        """Whether a request has unfinished samples."""
        return request_id in self._loop.requests

    @property
    def has_work(self) -> bool:
        """Whether `step` has work to do or outputs to return."""
        loop = self._loop
        return bool(loop.requests or loop.in_flight or self._outputs or self._kept)

    def stats(self) -> EngineStats:
        """Engine counters, and blocks by use."""
        blocks = self.manager.stats()
        used = blocks.used_slots + self._scheduler.num_unsynced()
        return dataclasses.replace(
            self._loop.stats,
            host=dataclasses.replace(self._loop.stats.host),
            preemptions=self._scheduler.num_preemptions,
            waiting=len(self._scheduler.waiting),
            running=len(self._scheduler.running),
            blocks=dataclasses.replace(blocks, used_slots=used),
        )
