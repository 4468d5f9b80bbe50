"""`jaxkv generate`: text generation from a checkpoint, with statistics of the paged cache."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv._util import to_json
from jaxkv.cli.options import add_engine_options, load_model, prefix_index
from jaxkv.cli.text import read_lines
from jaxkv.engine.config import SchedulerConfig
from jaxkv.errors import ConfigError
from jaxkv.sampling.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from jaxkv.engine.generate import Generation


def add_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    p.description = "Generates text through a paged KV cache. Several prompts decode as one batch."
    p.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="prompts to continue; - reads prompts from standard input, one per line",
    )
    p.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="file of further prompts, one per line; - is standard input",
    )
    p.add_argument(
        "--chat", action="store_true", help="apply the model's chat template to each prompt"
    )
    add_engine_options(p)
    p.add_argument(
        "--max-tokens", type=int, default=64, metavar="N",
        help="maximum number of tokens to generate per sample (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--temperature", type=float, default=0.0, metavar="X",
        help="sampling temperature; 0 is greedy (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--top-k", type=int, default=0, metavar="N",
        help="sample from the N most likely tokens; 0 is off (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--top-p", type=float, default=1.0, metavar="P",
        help="sample from the most likely tokens with a total probability of P; 1 is off "
        "(default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--seed", type=int, default=0, metavar="N",
        help="seed of the sampler (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--n", type=int, default=1, metavar="N", help="samples per prompt (default: %(default)s)"
    )
    p.add_argument(
        "--beam-width", type=int, default=0, metavar="N",
        help="number of beams of a beam search; 0 is off (default: %(default)s)",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from rich.console import Console

    from jaxkv.engine.generate import default_cache, generate
    from jaxkv.progress_bar import progress_bar

    texts = []
    for prompt in args.prompts:
        texts += [line for line in read_lines("-") if line.strip()] if prompt == "-" else [prompt]
    if args.prompts_file is not None:
        texts += [line for line in read_lines(args.prompts_file) if line.strip()]
    if not texts:
        raise ConfigError("no prompt; give PROMPT, - for standard input, or --prompts-file with "
                          "one prompt per line")  # fmt: skip
    params: SamplingParams | BeamSearchParams = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        n=args.n,
        max_tokens=args.max_tokens,
    )
    if args.beam_width:
        if args.n > 1 or args.temperature > 0:
            raise ConfigError(
                "--beam-width cannot be combined with --n or --temperature: beam search does not "
                "sample"
            )
        params = BeamSearchParams(width=args.beam_width, max_tokens=args.max_tokens)
    samples = params.num_samples
    checkpoint, _ = load_model(args)
    tokenizer = checkpoint.tokenizer
    if args.chat:
        rendered = [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
        prompts = [tokenizer.encode(text, add_bos=False) for text in rendered]
    else:
        prompts = [tokenizer.encode(text) for text in texts]
    config = checkpoint.model.config
    cache = default_cache(
        config,
        prompts,
        params,
        block_size=args.block_size,
        num_blocks=getattr(args, "num_blocks", None),
        dtype=args.dtype,
    )
    streaming = len(prompts) == samples == 1 and not args.json
    stream = tokenizer.stream()
    with progress_bar() as progress:
        task = progress.add_task("generating", total=len(prompts) * samples * args.max_tokens)

        def on_token(_: int, token: int) -> None:
            progress.advance(task)
            if streaming:
                if progress.live.is_started:
                    progress.stop()  # from here on the text shows the progress
                    print("" if args.chat else texts[0], end="")
                if token not in config.eos_token_ids:
                    print(stream.push([token]), end="", flush=True)

        result = generate(
            checkpoint.model, prompts, params, cache=cache, on_token=on_token,
            scheduler=SchedulerConfig(decode_steps_per_dispatch=args.steps_per_dispatch),
            prefix_index=prefix_index(args),
        )  # fmt: skip
    outputs = [
        {
            "prompt": text,
            "text": tokenizer.decode(output.token_ids),
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "num_cached_tokens": output.num_cached_tokens,
        }
        for text, output in zip(
            [text for text in texts for _ in range(samples)], result.outputs, strict=True
        )
    ]
    if args.json:
        stats = dataclasses.asdict(result.stats) | {
            "time_to_first_token": [o.time_to_first_token for o in result.outputs],
            "block_size": cache.block_size,
            "num_blocks": cache.num_blocks,
        }
        print(to_json({"outputs": outputs, "stats": stats}))
        return 0
    if streaming:
        print(stream.flush())
    else:
        for output in outputs:
            print(f"{'' if args.chat else output['prompt']}{output['text']}\n")
    # Statistics are no part of a result that another program reads.
    Console(stderr=not sys.stdout.isatty()).print(_table(result, cache.block_size))
    return 0


def _table(result: Generation, block_size: int) -> Table:
    from rich.table import Table

    stats = result.stats
    first = [o.time_to_first_token for o in result.outputs if o.time_to_first_token is not None]
    table = Table(show_header=False)
    mib = 2**20
    rows = [
        ("prompt tokens", f"{stats.prompt_tokens}"),
        ("generated tokens", f"{stats.generated_tokens}"),
        ("time to first token", f"{max(first):.2f} s" if first else "-"),
        ("time spent compiling", f"{stats.compile_seconds:.2f} s"),
        ("decode speed", f"{stats.decode_tokens_per_s:.1f} tokens/s"),
        ("blocks used", f"{stats.peak_blocks} of {block_size} tokens"),
        ("KV bytes in blocks", f"{stats.kv_bytes / mib:.1f} MiB"),
        (f"contiguous cache of {stats.max_len} tokens", f"{stats.contiguous_bytes / mib:.1f} MiB"),
    ]
    for row in rows:
        table.add_row(*row)
    return table
