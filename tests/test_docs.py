"""The README and the pages of docs/: their examples run, their links lead somewhere."""

import re
from collections import Counter
from pathlib import Path

import pytest

import jaxkv

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=name
)
def test_examples_run_in_order(page, capsys):
    text, names = page.read_text(), {}
    for block in BLOCK.finditer(text):
        above = text.count("\n", 0, block.start(1))  # so that a traceback names the page's line
        exec(compile("\n" * above + block[1], name(page), "exec"), names)
    if page.name == "README.md":
        engine, _, library = capsys.readouterr().out.partition("\n\nThe answer is:")
        assert engine == " Paris."
        assert library.startswith(" Paris.")


def test_pages_that_have_examples():
    counts = {name(page): len(BLOCK.findall(page.read_text())) for page in PAGES}
    for page in ("README.md", "docs/get-started.md", "docs/concepts.md", "docs/gpu.md"):
        assert counts[page], page
    assert sum(counts.values()) > 20


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page):
    """Of the README too, which the documentation's build does not see."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_public_name_is_in_the_reference():
    pages = [page.read_text() for page in PAGES if page.parent.name == "api"]
    documented = Counter(re.findall(r"^::: jaxkv\.(\w+)$", "\n".join(pages), re.MULTILINE))
    assert documented == Counter(jaxkv.__all__)  # pyright: ignore[reportAttributeAccessIssue]
