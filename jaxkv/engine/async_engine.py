"""An engine shared by coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import Any

from jaxkv.engine.engine import AnyParams, Engine
from jaxkv.engine.outputs import RequestOutput
from jaxkv.errors import JaxkvError


class AsyncEngine:
    """An `Engine` whose requests are iterated by coroutines of one event loop.

    Steps run in a thread, one after the other, while a request is unfinished. A request is aborted
    when its iteration stops.

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
        # None: the end of the outputs.
        self._queues: dict[Hashable, asyncio.Queue[RequestOutput | BaseException | None]] = {}
        self._lock = asyncio.Lock()  # one thread at a time uses the engine
        self._stepping: asyncio.Task[None] | None = None

    async def generate(
        self, prompt: str | Sequence[int], params: AnyParams | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yields the outputs of one request as they arrive; arguments as in `Engine.submit`.

        Raises:
          ConfigError: as `Engine.submit`.
          JaxkvError: the engine itself failed.
        """
        async with self._lock:
            request_id = self.engine.submit(prompt, params, **options)
        queue = self._queues[request_id] = asyncio.Queue()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._run())
        try:
            while (output := await queue.get()) is not None:
                if isinstance(output, BaseException):
                    raise JaxkvError("the engine failed") from output
                yield output
        finally:
            del self._queues[request_id]
            async with self._lock:
                self.engine.abort(request_id)

    async def _run(self) -> None:
        """Runs steps while there is work."""
        try:
            while self.engine.has_work:
                async with self._lock:
                    outputs = await asyncio.to_thread(self.engine.step)
                for output in outputs:
                    if (queue := self._queues.get(output.request_id)) is not None:
                        queue.put_nowait(output)
                for request_id, queue in self._queues.items():
                    if not self.engine.is_running(request_id):
                        queue.put_nowait(None)
                await asyncio.sleep(0)  # coroutines that wait for the lock come first
        except BaseException as error:
            for queue in self._queues.values():
                queue.put_nowait(error)
            raise
