"""Measures continuous batching in Hugging Face transformers on the CPU, in float32.

Needs an environment with torch (a CPU build), transformers==5.24.0, gguf and accelerate, which
transformers requires to read a GGUF file.

Usage::

    python benchmarks/peers/hf_generate_batch.py --workload workload.json --gguf smollm2-f32.gguf
        [--threads 2] [--max-seqs 32] [--max-batch-tokens 512] [--json out.json]

workload.py describes the workload file; tests/data/make_llama_cpp.py makes a float32 GGUF.

Runs the engine of `model.generate_batch`, but submits the requests to its manager one by one, since
generate_batch has one max_new_tokens for all of them. A step is one forward pass over a token of
every sequence that is decoding and prompt tokens of others, up to max_batch_tokens in all. Eager
PyTorch: the paged cache and the scheduler are transformers' own.

Of the attention implementations that continuous batching accepts, "sdpa" and "eager" run on a CPU.
Both concatenate the keys of all sequences of a step, and a mask restricts each query to its own
sequence; flash attention, which would not need that, is not available for the CPU.

"seconds" is the time from the first request's submission to the last token, after a warm-up with
other prompts; "first_token_s" counts from the same start, so that it includes waiting. "cpu_share"
is the fraction of the threads' time in which they ran. Eager PyTorch has serial parts between its
parallel operations, so it is below 1 even on an idle machine.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers
import workload
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

ATTENTION = {"sdpa": "sdpa", "eager": "paged|eager"}
PAGE_SIZE = 256  # the default; keys are read token by token, whatever the page size


def load(args: argparse.Namespace) -> transformers.PreTrainedModel:
    """The model, asserted to be float32, on the CPU and with the requested attention."""
    model = AutoModelForCausalLM.from_pretrained(
        args.gguf.resolve().parent,
        gguf_file=args.gguf.name,
        dtype=torch.float32,
        attn_implementation=ATTENTION[args.attention],
    )
    model.eval()
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    assert model.config._attn_implementation == ATTENTION[args.attention]
    return model


def serve(
    manager: transformers.ContinuousBatchingManager, requests: list[workload.Request]
) -> tuple[list[workload.Served], tuple[float, float]]:
    """Serves all requests; returns their results and the total wall and processor seconds."""
    places: dict[str, int] = {}
    served: dict[int, workload.Served] = {}
    progress = workload.Progress(len(requests))
    began = time.perf_counter()
    clock = workload.Clock()
    for i, request in enumerate(requests):
        name = manager.add_request(
            request.prompt_ids, max_new_tokens=request.max_tokens, record_timestamps=True
        )
        places[name] = i
    while len(served) < len(requests):
        output = manager.get_result(timeout=1)
        if output is None:
            if not manager.is_running():
                raise SystemExit("the generation thread has ended") from (
                    manager.background_thread_status.fatal_error
                )
            continue
        if output.error is not None:
            raise SystemExit(f"{output.request_id} failed: {output.error}")
        served[places[output.request_id]] = workload.Served(
            output.generated_tokens, output.timestamps[0] - began
        )
        progress.finished()
    return [served[i] for i in range(len(requests))], clock.read()


def main() -> None:
    parser = workload.arguments("Continuous batching of Hugging Face transformers on the CPU.")
    parser.add_argument(
        "--max-batch-tokens", type=int, default=512, help="tokens per step, at most"
    )
    parser.add_argument(
        "--attention", choices=list(ATTENTION), default="sdpa", help="attention implementation"
    )
    args = parser.parse_args()
    requests = workload.read(args.workload)
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = load(args)

    positions = max(request.positions for request in requests)
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=args.max_seqs * -(-positions // PAGE_SIZE),  # enough for all at their longest
        safety_margin=0.0,
        max_batch_tokens=args.max_batch_tokens,
        max_requests_per_batch=args.max_seqs,
        allow_block_sharing=False,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1)  # -1: no token ends a request
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=config
        ) as manager,
    ):
        serve(manager, workload.warm_up_requests(args.max_seqs, model.config.vocab_size))
        steps = manager.current_batch
        served, seconds = serve(manager, requests)
        steps = manager.current_batch - steps
    settings = {
        "max_batch_tokens": args.max_batch_tokens,
        "attention": args.attention,
        "page_size": PAGE_SIZE,
        "num_blocks": config.num_blocks,
        "steps": steps,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    version = f"transformers {transformers.__version__}"
    workload.report("transformers", version, args, requests, served, seconds, settings)


if __name__ == "__main__":
    main()
