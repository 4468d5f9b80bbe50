"""Chat templates against prompts written by hand from what transformers documents."""

import datetime
import json

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.models.tokenizer import Tokenizer

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "a < b & 'c' \u20ac"}}


def with_template(template, **special):
    return Tokenizer(Tokenizer.bytes().backend, chat_template=template, special=special)


def folder_with(tmp_path, config=None, **files):
    Tokenizer.bytes().backend.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ messages[0].content }}", "hi"),
        ("{{ bos_token }}|{{ pad_token }}", "<s>|"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{%- generation -%} {{ 1 }} {%- endgeneration -%} x", "1x"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
         "{% if i == 3 %}{% break %}{% endif %}{% endfor %}", "023"),
        ("{% if true %}\n  {% set x = 1 %}\n{{ x }}\n{% endif %}\n", "1\n"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
        ("{{ {'b': 1, 'a': '<\u20ac>'} | tojson }}", '{"b": 1, "a": "<\u20ac>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}",
         '{"a":2,"b":1}'),
        ("{{ '\u20ac' | tojson(ensure_ascii=true) }}", '"\\u20ac"'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ messages | tojson(2) }}", '[{"role": "user", "content": "hi"}]'),
    ],
)  # fmt: skip
def test_templates_render_as_in_transformers(template, prompt):
    assert with_template(template, bos_token="<s>").chat(HI) == prompt


def test_tools_documents_and_further_variables_reach_the_template():
    tokenizer = with_template(
        "{{ tools[0] | tojson }}{{ documents[0].text }}{{ thinking }}{{ add_generation_prompt }}"
    )
    prompt = tokenizer.chat(HI, tools=[TOOL], documents=[{"text": "D"}], thinking="no",
                            add_generation_prompt=False)  # fmt: skip
    assert prompt == json.dumps(TOOL, ensure_ascii=False) + "DnoFalse"


def test_content_in_parts_reaches_the_template():
    tokenizer = with_template("{% for p in messages[0].content %}{{ p.text }};{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokenizer.chat([{"role": "user", "content": parts}]) == "a;b;"


@pytest.mark.parametrize(
    ("template", "message", "error"),
    [
        ("\n{{ 'x' + messages[0].content }}", {"content": None}, "line 2.*TypeError"),
        ("{{ 'x' + messages[0].content }}", {"content": [{"text": "a"}]}, "line 1.*TypeError"),
        ("{{ 'x' + messages[0].content }}", {"role": "user"}, "line 1.*no attribute 'content'"),
        ("{{ 1 / 0 }}", {}, "ZeroDivisionError"),
        ("{{ range(10 ** 9) }}", {}, "OverflowError"),
        ("\n\n{{ raise_exception('only one') }}", {}, r"line 3\) rejected.*: only one"),
        ("{{ messages.append(1) }}", {}, "line 1.*unsafe"),
        ("{{ ''.__class__.__mro__ }}", {}, "line 1.*unsafe"),
        ("\n{% for %}", {}, "not valid, line 2"),
        ("{{ messages | nothing }}", {}, "line 1.*nothing"),
        ("{% generation %}", {}, "line 1.*endgeneration"),
        ("{% include 'file' %}", {}, "line 1"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {}, "RecursionError"),
    ],
)
def test_whatever_a_template_raises_is_one_error_with_its_line(template, message, error):
    with pytest.raises(JaxkvError, match=error) as raised:
        with_template(template).chat([message])
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    "several",
    [
        {"default": "D", "tool_use": "T", "rag": "R"},
        [{"name": name, "template": name[0].upper()} for name in ("default", "tool_use", "rag")],
    ],
)
def test_several_templates(tmp_path, several):
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, {"chat_template": several}))
    assert tokenizer.chat(HI) == "D"
    assert tokenizer.chat(HI, tools=[TOOL]) == "T"
    assert tokenizer.chat(HI, template="rag") == "R"
    with pytest.raises(JaxkvError, match=r"no chat template 'x'.*default, rag, tool_use"):
        tokenizer.chat(HI, template="x")


def test_one_template_serves_tools_too():
    assert with_template("D").chat(HI, tools=[TOOL]) == "D"
    assert with_template({"default": "D", "rag": "R"}).chat(HI, tools=[TOOL]) == "D"
    with pytest.raises(JaxkvError, match=r"no chat template 'default'.*rag"):
        with_template({"rag": "R"}).chat(HI)


def test_a_template_file_comes_before_the_config(tmp_path):
    folder = folder_with(
        tmp_path, {"chat_template": "config"},
        **{"chat_template.jinja": "file \u20ac", "additional_chat_templates__rag.jinja": "R"},
    )  # fmt: skip
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.chat(HI) == "file \u20ac"
    assert tokenizer.chat(HI, template="rag") == "R"


def test_chat_template_json(tmp_path):
    folder = folder_with(tmp_path, {}, **{"chat_template.json": '{"chat_template": "J"}'})
    assert Tokenizer.from_folder(folder).chat(HI) == "J"


@pytest.mark.parametrize("value", [7, ["D"], [{"name": "default"}], {"default": 1}])
def test_a_template_of_another_type_is_refused(tmp_path, value):
    folder = folder_with(tmp_path, {"chat_template": value})
    with pytest.raises(JaxkvError, match=r"tokenizer_config\.json: chat_template must be"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("templates", ["a\r\nb \u20ac", {"default": "D", "rag": "R"}, {"rag": "R"}])
def test_saved_templates_load_again(tmp_path, templates):
    with_template({"default": "old", "stale": "old"}).save(tmp_path)
    with_template(templates).save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).chat_template == templates
    with_template(None).save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).chat_template is None
