"""Chat templates: Jinja programs that turn messages into a prompt, as transformers renders them."""

from __future__ import annotations

import datetime
import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxkv.errors import JaxkvError
from jaxkv.models.files import read_json

# One template, or several by name as in a tokenizer_config.json: "default", "tool_use", "rag" ...
Templates = str | Mapping[str, str]


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what an assistant said, for training; it renders its contents."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes <, >, & and ' for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


_ENVIRONMENT = _environment()


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Renders a chat template.

    Raises:
      JaxkvError: the template is not valid, rejects the messages or fails on them; the error names
        the line of the template.

    Example:
      >>> render("{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
      ...        {"messages": [{"role": "user", "content": "a < b"}]})
      '"a < b"'
    """
    try:
        return _ENVIRONMENT.from_string(template).render(variables)
    except jinja2.TemplateSyntaxError as error:
        what = f"the chat template is not valid, line {error.lineno}: {error.message}"
        raise JaxkvError(what) from None
    except Exception as error:  # a template is a program: it can raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
        where = f" (line {lines[-1]})" if lines else ""
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise JaxkvError(f"the chat template{where} rejected the messages: {kind}{error}") from None


def choose(templates: Templates | None, name: str | None, *, tools: Sequence[Any] | None) -> str:
    """The named template; by default "tool_use" if there are tools and it exists, else "default".

    Raises:
      JaxkvError: there is no such template; the error lists those that exist.
    """
    if not templates:
        raise JaxkvError("this checkpoint has no chat template; drop --chat")
    if isinstance(templates, str):
        templates = {"default": templates}
    wanted = name or ("tool_use" if tools is not None and "tool_use" in templates else "default")
    if wanted not in templates:
        raise JaxkvError(f"there is no chat template {wanted!r}; the checkpoint has "
                         f"{', '.join(sorted(templates))}")  # fmt: skip
    return templates[wanted]


def checked(value: Any, where: str) -> Templates | None:
    """A `chat_template` field: a string, a list of {name, template}, or templates by name.

    Raises:
      JaxkvError: another value.
    """
    if isinstance(value, list) and all(
        isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in value
    ):
        value = {entry["name"]: entry["template"] for entry in value}
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict) and all(isinstance(v, str) for v in (*value, *value.values())):
        return value
    raise JaxkvError(
        f"{where}: chat_template must be a string, a list of objects with name and template, or an "
        f"object of templates by name, got {type(value).__name__}"
    )


def read_templates(folder: Path, config: Mapping[str, Any]) -> Templates | None:
    """Templates of a folder: template files first, then `tokenizer_config.json`, then
    `chat_template.json`.

    Raises:
      JaxkvError: a file that is not UTF-8, or a field of another type.
    """
    main, more = folder / "chat_template.jinja", folder / "additional_chat_templates"
    named = {"default": _read(main)} if main.exists() else {}
    named |= {path.stem: _read(path) for path in sorted(more.glob("*.jinja"))}
    if named:
        return named["default"] if named.keys() == {"default"} else named
    template = checked(config.get("chat_template"), f"{folder / 'tokenizer_config.json'}")
    path = folder / "chat_template.json"
    if template is None and path.exists():
        template = checked(read_json(path).get("chat_template"), str(path))
    return template


def write_templates(folder: Path, templates: Templates | None) -> None:
    """Writes the files that `read_templates` reads, and removes those of an earlier tokenizer."""
    named = {"default": templates} if isinstance(templates, str) else dict(templates or {})
    main, more = folder / "chat_template.jinja", folder / "additional_chat_templates"
    for path in (main, folder / "chat_template.json", *more.glob("*.jinja")):
        path.unlink(missing_ok=True)
    for name, template in named.items():
        path = main if name == "default" else more / f"{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        # Bytes: a text file would change the ends of lines on some systems.
        path.write_bytes(template.encode())


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise JaxkvError(f"{path} is not UTF-8 text: {error}") from None
