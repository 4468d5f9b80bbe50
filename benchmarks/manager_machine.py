"""A million random operations on the block manager, all its bookkeeping verified after each.

    uv run benchmarks/manager_machine.py --steps 1000000

Runs the state machine of the tests: both indexes, all policies, every operation, against an oracle
in which the KV at a position is a hash of the namespace and of all tokens before it.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

TESTS = Path(__file__).parent.parent / "tests" / "jaxkv" / "manager"
STEPS = 50  # operations per example


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="number of operations")
    args = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    spec = importlib.util.spec_from_file_location("machine", TESTS / "test_manager_machine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    began, verified = time.perf_counter(), 0
    columns = (*Progress.get_default_columns(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("operations", total=args.steps)

        class Counted(module.Machine):
            """Counts the verified operations."""

            def check_invariants(self, *rest, **options):
                nonlocal verified
                verified += 1
                progress.advance(task)
                super().check_invariants(*rest, **options)

        while verified < args.steps:
            run_state_machine_as_test(
                Counted,
                settings=settings(
                    max_examples=max(1, min(2000, (args.steps - verified) // STEPS)),
                    stateful_step_count=STEPS, deadline=None, database=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )  # fmt: skip
    seconds = time.perf_counter() - began
    print(f"{verified:,} operations, each verified, in {seconds:,.0f} s: no errors")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
