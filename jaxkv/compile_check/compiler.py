"""Ahead-of-time compilation for GPUs you do not have, in a separate process.

The process imports the library once and then forks for every step. This keeps the output of the C++
side apart per step, limits the damage of a compiler crash to one row, and prevents a step from
finding its kernel already compiled (the compiler prints nothing about a kernel in its cache).
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

import jax
import numpy as np
from jax.sharding import Mesh

from jaxkv.compile_check.launches import Launches, dump_options
from jaxkv.compile_check.programs import Program, programs
from jaxkv.compile_check.report import (
    Resources,
    Row,
    count_atomic_scatters,
    count_kernels,
    count_pool_copies,
    count_rematerialised,
    ptxas_remarks,
)
from jaxkv.compile_check.targets import Target
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.pallas_kernels.paged_attention import supports
from jaxkv.pallas_kernels.target import compile_for, compiler_options

WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the process itself runs on the CPU
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # the compiler needs neither driver nor cuDNN
    "JAX_ENABLE_COMPILATION_CACHE": "0",  # cached kernels print nothing
    "OPENBLAS_NUM_THREADS": "1",  # a process with threads must not fork
    "MOSAIC_GPU_DUMP_PTXAS": "1",  # registers and spills
    "MOSAIC_GPU_DUMP_PTX": "1",  # threads of a thread block
    "MOSAIC_GPU_DUMP_RESOURCES": "1",  # shared memory
}
_AT_ONCE = 8  # concurrent compilers; each takes a core and up to 1 GB


def check_wheels() -> None:
    """Checks that the compiler is installed, in jax's version.

    Raises:
      ConfigError: it is not; the error gives the command that installs it.
    """
    wanted = importlib.metadata.version("jax")
    for wheel in WHEELS:
        try:
            found = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found != wanted:
            raise ConfigError(
                f"compiling for a GPU needs {wheel} {wanted}, the version of jax, but "
                f"{'it is not installed' if found is None else f'{found} is installed'}: "
                f"run `uv run --group aot jaxkv compile-check`, or "
                f'`pip install "jax[cuda13-local]=={wanted}"` and then `jaxkv compile-check`'
            )


def compile_all(jobs: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Compiles (target, program) pairs, several at once; yields rows as they are finished.

    Raises:
      ConfigError: the compiler is not installed.
      JaxkvError: the compiling process ended early.
    """
    check_wheels()
    with subprocess.Popen(
        [sys.executable, "-m", "jaxkv.compile_check.compiler", json.dumps(jobs)],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        start_new_session=True,  # so that all its children can be ended with it
    ) as process:
        assert process.stdout is not None
        try:
            for _ in jobs:
                yield pickle.load(process.stdout)
        except EOFError:
            raise JaxkvError(
                f"the compiling process exited early with status {process.wait()}"
            ) from None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def main() -> None:
    """Entry point of the compiling process; writes pickled rows to standard output."""
    waiting = json.loads(sys.argv[1])
    every, running = programs(), {}
    while waiting or running:
        while waiting and len(running) < min(_AT_ONCE, os.cpu_count() or 1):
            target, name = (
                waiting.pop()
            )  # from the end: whole models, which take longest, come last
            job = _Job(Target.load(target), every[name])
            running[job.process.sentinel] = job
        for sentinel in multiprocessing.connection.wait(running):
            pickle.dump(running.pop(sentinel).row(), sys.stdout.buffer)
            sys.stdout.flush()


class _Job:
    """A step that is compiled in a separate process."""

    def __init__(self, target: Target, program: Program):
        self._empty = Row(
            target.name,
            program.name,
            program.num_devices,
            program.pool_bytes,
            max_launches=program.max_launches,
        )
        self._log = tempfile.TemporaryFile(  # noqa: SIM115, lives as long as the job
            "w+", encoding="utf-8", errors="replace"
        )
        context = multiprocessing.get_context("fork")
        self._rows, sender = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_compile, args=(target, program, self._empty, self._log, sender)
        )
        self.process.start()
        sender.close()

    def row(self) -> Row:
        """Returns the row of the step, or of its error."""
        try:
            return self._rows.recv()
        except EOFError:
            self.process.join()
            self._log.seek(0)
            printed = self._log.read().strip().splitlines() or ["it printed nothing"]
            # A stack trace may follow the error of LLVM or XLA.
            said = [line for line in printed if re.search(r"\b(ERROR|FATAL|Check failed)\b", line)]
            died = f"the compiler exited with {self.process.exitcode}: {(said or printed)[-1]}"
            return dataclasses.replace(self._empty, error=died)


def _compile(target: Target, program: Program, row: Row, log: TextIO, rows: Connection) -> None:
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    try:
        row = _compiled(target, program, row, log)
    except Exception as error:  # any error is a row of the table
        row = dataclasses.replace(row, error=f"{type(error).__name__}: {error}")
    rows.send(row)


def _compiled(target: Target, program: Program, row: Row, log: TextIO) -> Row:
    began = time.perf_counter()
    attention, fallback, dump, launches = None, None, {}, None
    with (
        compile_for("gpu", target.compute_capability) as pipelines,
        tempfile.TemporaryDirectory() as folder,
    ):
        if program.call is not None:
            claimed, reason = supports("mosaic_gpu", **program.call)
            fallback = None if claimed else reason
            dump = dump_options(folder)
        devices = target.devices(program.num_devices)
        function, args = program.build(Mesh(np.array(devices), ("heads",)))
        # Kernels are lowered for the default device's generation, whatever the mesh.
        with jax.default_device(devices[0]):
            compiled = (
                jax.jit(function, donate_argnums=0, compiler_options=compiler_options() | dump)
                .lower(*args)
                .compile()
            )
        if dump:
            launches = Launches.read(Path(folder))
    seconds = time.perf_counter() - began
    ctypes.CDLL(None).fflush(None)  # the output of C++ is still in its buffers
    log.seek(0)
    output = log.read()
    resources = Resources.parse(output)
    blocks = resources and resources.blocks_per_sm(target)
    in_flight = min((p.stages * p.tile_bytes for p in pipelines), default=None)
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    assert hlo is not None
    assert memory is not None
    kernels = count_kernels(hlo)
    if program.call is not None:
        attention = "mosaic_gpu" if kernels else "xla"
    return dataclasses.replace(
        row,
        attention=attention,
        kernels=kernels,
        fallback=fallback,
        resources=resources,
        launches=launches,
        rematerialised=count_rematerialised(hlo),
        remarks=ptxas_remarks(output),
        blocks_per_sm=blocks,
        bytes_in_flight=None if blocks is None or in_flight is None else blocks * in_flight,
        alias_bytes=memory.alias_size_in_bytes,
        pool_copies=count_pool_copies(hlo, program.pool_elements),
        atomic_scatters=count_atomic_scatters(hlo, program.pool_elements),
        temp_bytes=memory.temp_size_in_bytes,
        seconds=seconds,
    )


if __name__ == "__main__":
    main()
