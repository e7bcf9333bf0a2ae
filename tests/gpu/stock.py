"""Runs by itself, without a line of this project: a stock SGLang engine with an exported drafter, greedy.

python stock.py JOB.json OUT.json     job: target, drafter, algorithm, depth, prompts (lists of ids), max_tokens, eos
"""

import json
import sys


def main(job_file: str, out_file: str) -> None:
    import sglang

    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    engine = sglang.Engine(
        model_path=job["target"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend="triton",
        mem_fraction_static=0.5,
        max_running_requests=32,
        speculative_algorithm=job["algorithm"],
        speculative_draft_model_path=job["drafter"],
        speculative_num_steps=job["depth"],
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=job["depth"] + 1,
    )
    sampling = {"temperature": 0.0, "max_new_tokens": job["max_tokens"], "stop_token_ids": [job["eos"]]}
    answers = engine.generate(input_ids=job["prompts"], sampling_params=sampling)
    found = [
        {"ids": a["output_ids"], "histogram": a["meta_info"].get("spec_correct_drafts_histogram", [])} for a in answers
    ]
    engine.shutdown()
    ours = sorted(name for name in sys.modules if name.split(".")[0] in ("services", "deploy", "actors"))
    with open(out_file, "w", encoding="utf-8") as file:
        json.dump({"answers": found, "own_modules": ours}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
