"""Removes one synchronisation of the GPU kernels, to see that a test notices.

    python mutations.py POINT TEST

runs a test file or one test with the statement POINT removed from its module. `points` finds the
statements: each wait, arrival, fence and commit, and the loop that refills the ring.
"""

import ast
import importlib.machinery
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

PACKAGE = "jaxkv.pallas_kernels.paged_attention"
MODULES = ("decode_gpu", "prefill_gpu", "pages_gpu", "products_gpu", "decode_ampere",
           "prefill_ampere", "pages_ampere")  # fmt: skip
CALLS = ("barrier_wait", "barrier_arrive", "commit_smem", "wait_smem_to_gmem")
PATIENCE = 15.0  # seconds for an arrival that was removed


def points() -> list[str]:
    """Statements that can be removed, each as "module.function: call", numbered if repeated."""
    return [point for module in MODULES for point, _, _ in _statements(module, _tree(module))]


def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(f"{PACKAGE}.{module}")
    assert spec is not None
    assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
    return ast.parse(spec.loader.get_data(spec.loader.path))


def _statements(module: str, tree: ast.AST) -> Iterator[tuple[str, list[ast.stmt], int]]:
    """(point, list of statements, its index there) of each removable statement."""
    seen = Counter()

    def visit(node: Any, function: str) -> Iterator[tuple[str, list[ast.stmt], int]]:
        function = getattr(node, "name", function)
        bodies: list[Any] = [getattr(node, field, None) for field in ("body", "orelse")]
        for body in (x for x in bodies if isinstance(x, list)):
            for i, statement in enumerate(body):
                if isinstance(statement, ast.Expr) and _is_point(statement.value):
                    call = ast.unparse(statement.value).removeprefix("plgpu.")
                    point = f"{module}.{function}: {call}"
                    seen[point] += 1
                    yield point + f" #{seen[point]}" * (seen[point] > 1), body, i
                else:
                    yield from visit(statement, function)

    yield from visit(tree, module)


def _is_point(value: ast.expr) -> bool:
    call = ast.unparse(value)
    return call.startswith(tuple(f"plgpu.{name}(" for name in CALLS)) or ", refill, " in call


def without(point: str) -> ast.Module:
    """The module of a point, without its statement."""
    module = point.split(".")[0]
    tree = _tree(module)
    for found, body, i in list(_statements(module, tree)):
        if found == point:
            body[i] = ast.copy_location(ast.Pass(), body[i])
            return tree
    raise ValueError(f"{point!r} is not one of {points()}")


def main() -> int:
    """Runs pytest with the point removed."""
    import pytest
    import races

    point, test = sys.argv[1:]
    races.PATIENCE = PATIENCE
    changed, name = without(point), f"{PACKAGE}.{point.split('.')[0]}"
    real, loaded = importlib.machinery.SourceFileLoader.get_code, []

    def get_code(self, fullname):
        if fullname != name:
            return real(self, fullname)
        loaded.append(name)
        return compile(changed, self.path, "exec")

    importlib.machinery.SourceFileLoader.get_code = get_code
    status = pytest.main([test, "-n", "0", "-x", "-p", "no:cacheprovider", "--no-header"])
    assert loaded, f"{name} was not imported"
    return status


if __name__ == "__main__":
    sys.exit(main())
