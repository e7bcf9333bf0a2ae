"""Runs by itself, without a line of this project: a stock SGLang engine, with an exported drafter or without one.

python stock.py JOB.json OUT.json     job: target, drafter (null: none), algorithm, depth, prompts (lists of ids),
    batches (how many of the prompts at once), repeats, temperature, max_tokens, eos
"""

import json
import sys
import time


def engine_arguments(job):
    arguments = {
        "model_path": job["target"],
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "mem_fraction_static": 0.5,
        "max_running_requests": 32,
        "sampling_backend": "pytorch",
    }
    if job["drafter"] is None:
        return arguments
    return arguments | {
        "speculative_algorithm": job["algorithm"],
        "speculative_draft_model_path": job["drafter"],
        "speculative_num_steps": job["depth"],
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": job["depth"] + 1,
        "speculative_use_rejection_sampling": job["temperature"] > 0,
    }


def generated(engine, prompts, sampling):
    """Of one call: seconds, and ids and histogram of each answer."""
    started = time.monotonic()
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    seconds = time.monotonic() - started
    key = "spec_correct_drafts_histogram"
    return {
        "seconds": seconds,
        "answers": [{"ids": a["output_ids"], "histogram": a["meta_info"].get(key, [])} for a in answers],
    }


def main(job_file, out_file):
    import sglang

    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    engine = sglang.Engine(**engine_arguments(job))
    sampling = {"temperature": job["temperature"], "max_new_tokens": job["max_tokens"], "stop_token_ids": [job["eos"]]}
    cells = []
    for batch in job["batches"]:
        calls = [generated(engine, job["prompts"][:batch], sampling) for _ in range(job["repeats"])]
        cells.append({"batch": batch, "calls": calls})
    engine.shutdown()
    ours = sorted(name for name in sys.modules if name.split(".")[0] in ("services", "deploy", "actors"))
    with open(out_file, "w", encoding="utf-8") as file:
        json.dump({"cells": cells, "own_modules": ours}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
