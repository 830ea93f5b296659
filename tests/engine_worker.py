"""One vLLM engine in a process of its own: `python engine_worker.py job.json`."""

import json
import sys
from pathlib import Path


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    from vllm import LLM, SamplingParams

    llm = LLM(skip_tokenizer_init=True, **job["engine"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    sampling = SamplingParams(
        temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    path.with_suffix(".out").write_text(json.dumps([o.outputs[0].token_ids for o in outputs]))
    if job.get("logits"):
        save_logits(llm, job["prompts"], path.with_suffix(".logits"))


def save_logits(llm, prompts: list[list[int]], out: Path) -> None:
    """Logits at every position of the prompts, teacher-forced."""
    from safetensors.torch import save_file

    from vllm_spense import equality

    equality.record_logits(llm)
    found = {str(i): equality.prompt_logits(llm, ids) for i, ids in enumerate(prompts)}
    save_file({name: logits.contiguous() for name, logits in found.items()}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
