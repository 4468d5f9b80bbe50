"""Docstrings as mkdocstrings reads them."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Doctests under `Example:` are code.

    griffe knows the section as `Examples:`. Under the singular it reads them as Markdown, in which
    `>>>` is a quotation.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
