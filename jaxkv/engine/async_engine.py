"""An engine shared by coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import AsyncGenerator, Hashable, Sequence
from typing import Any

from jaxkv.engine.engine import AnyParams, Engine
from jaxkv.engine.outputs import RequestOutput
from jaxkv.errors import JaxkvError


@dataclasses.dataclass(eq=False)
class _Consumer:
    """A coroutine that iterates a request.

    Attributes:
      loop: its event loop.
      submission: arguments of `Engine.submit`.
      arrived: what it has not read yet; None is the end.
      request_id: id of its request, once submitted.
      gone: whether it reads no further.
    """

    loop: asyncio.AbstractEventLoop
    submission: tuple[tuple[Any, ...], dict[str, Any]]
    arrived: asyncio.Queue[RequestOutput | BaseException | None]
    request_id: Hashable = None
    gone: bool = False

    def send(self, item: RequestOutput | BaseException | None) -> None:
        """Passes an item on, from another thread."""
        try:
            self.loop.call_soon_threadsafe(self.arrived.put_nowait, item)
        except RuntimeError:  # the event loop was closed without a word
            self.gone = True


class AsyncEngine:
    """An `Engine` whose requests are iterated by coroutines of one event loop.

    A thread of its own drives the engine while a request is unfinished, and ends with the last one:
    no task or executor of an event loop is needed to run, or to abort, a request. A request is
    aborted when its iteration stops, however it stops. While the thread runs nothing else may use
    the engine. Event loops may follow one another.

    Example:
      >>> import asyncio, jaxkv
      >>> from flax import nnx
      >>> from jaxkv.models import Llama, LlamaConfig
      >>> config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=16, num_layers=1,
      ...                      num_heads=2, num_kv_heads=1, head_dim=4)
      >>> engine = jaxkv.Engine(Llama(config, rngs=nnx.Rngs(0)),
      ...                       jaxkv.CacheConfig.for_model(config, max_len=64))
      >>> async def count(engine, prompt):
      ...     params = jaxkv.SamplingParams(max_tokens=4)
      ...     return sum([len(o.new_token_ids) async for o in engine.generate(prompt, params)])
      >>> async def main():
      ...     shared = jaxkv.AsyncEngine(engine)
      ...     return await asyncio.gather(count(shared, [1, 2]), count(shared, [3]))
      >>> asyncio.run(main())
      [4, 4]
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._arrivals: deque[_Consumer] = deque()
        self._leavers: deque[_Consumer] = deque()
        self._reading: dict[Hashable, _Consumer] = {}  # of the thread alone
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    async def generate(
        self, prompt: str | Sequence[int], params: AnyParams | None = None, **options: Any
    ) -> AsyncGenerator[RequestOutput]:
        """Yields the outputs of one request as they arrive; arguments as in `Engine.submit`.

        Raises:
          ConfigError: as `Engine.submit`.
          JaxkvError: the engine itself failed.
        """
        submission = (prompt, params), options
        consumer = _Consumer(asyncio.get_running_loop(), submission, asyncio.Queue())
        ended = False
        try:
            self._arrivals.append(consumer)
            self._run()
            while not ended:
                item = await consumer.arrived.get()
                ended = not isinstance(item, RequestOutput)
                if isinstance(item, BaseException):
                    raise item
                if item is not None:
                    yield item
        finally:
            # Nothing is awaited here: a second cancellation finds no place to come in.
            consumer.gone = True
            if not ended:
                self._leavers.append(consumer)
                self._run()

    def _run(self) -> None:
        """Makes sure that the thread runs."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, name="jaxkv-engine")
                self._thread.start()

    def _drive(self) -> None:
        """Runs steps while there is work or a consumer to serve."""
        while True:
            works = True
            try:
                self._turn()
            except BaseException as error:
                self._fail(error)
                works = False  # another step might fail as well, with nobody to be told
            with self._starting:  # a consumer that comes later starts another thread
                if not (self._arrivals or self._leavers or (works and self.engine.has_work)):
                    self._thread = None
                    return

    def _turn(self) -> None:
        """Serves those who came and left, runs one step, and passes its outputs on."""
        while self._leavers:
            self._release(self._leavers.popleft())
        while self._arrivals:
            self._submit(self._arrivals.popleft())
        outputs = self.engine.step()
        for output in outputs:
            if (consumer := self._reading.get(output.request_id)) is not None:
                consumer.send(output)
                if consumer.gone:
                    self._leavers.append(consumer)
        for output in outputs:
            if not output.finished or self.engine.is_running(output.request_id):
                continue
            if (consumer := self._reading.pop(output.request_id, None)) is not None:
                consumer.send(None)

    def _submit(self, consumer: _Consumer) -> None:
        args, options = consumer.submission
        if consumer.gone:
            return
        try:
            consumer.request_id = self.engine.submit(*args, **options)
            self._reading[consumer.request_id] = consumer
        except Exception as error:  # a bad request is its own consumer's matter
            consumer.send(error)

    def _release(self, consumer: _Consumer) -> None:
        """Ends the request of a consumer that has left, unless it has ended."""
        if self._reading.get(consumer.request_id) is consumer:
            del self._reading[consumer.request_id]
            self.engine.abort(consumer.request_id)

    def _fail(self, error: BaseException) -> None:
        """Passes a failure of the engine on to all consumers, and ends their requests."""
        reading, self._reading = self._reading, {}
        for consumer in reading.values():
            failure = JaxkvError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            consumer.send(failure)
        for request_id in reading:
            with contextlib.suppress(Exception):  # the consumers have the first error
                self.engine.abort(request_id)
