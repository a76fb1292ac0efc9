"""vLLM's own EAGLE on CPU against `eagle_reference`: `python -m tests.gpu.eagle_native METHOD`.

Token for token, in float32, one request after the other. With `eagle_numbers` this says that our drafts are vLLM's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from vllm import LLM, SamplingParams

from tests.gpu.eagle_reference import ReferenceHead, ReferenceTarget
from tests.gpu.heads import write_head, write_target

K, TOKENS, VOCAB = 4, 48, 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=["eagle", "eagle3"])
    method = parser.parse_args().method
    with tempfile.TemporaryDirectory() as folder:
        target, head = Path(folder, "target"), Path(folder, "head")
        write_target(target, VOCAB, torch.float32)
        write_head(head, target, method, torch.float32)
        engine = LLM(
            str(target),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=2,
            kv_cache_memory_bytes=1 << 26,
            speculative_config={"method": method, "model": str(head), "num_speculative_tokens": K},
        )
        drafter = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
        drafts: list[list[int]] = []
        propose = drafter.propose

        def keep(*args: object, **kwargs: object) -> torch.Tensor:
            proposed = propose(*args, **kwargs)
            drafts.append(proposed[0].tolist())
            return proposed

        drafter.propose = keep
        reference, guesser = ReferenceTarget(target), ReferenceHead(head, target, method)
        for start, length in ((100, 20), (137, 3)):
            drafts.clear()
            text = [(start + 11 * at) % VOCAB for at in range(length)]
            params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
            written = list(engine.generate({"prompt_token_ids": text}, params, use_tqdm=False)[0].outputs[0].token_ids)
            following, accepted = [*written], []
            text.append(following.pop(0))
            for found in drafts:
                seen = reference.run(text[:-1])
                wanted = guesser.drafts(text, seen.sources(method), K)
                assert found == wanted, f"after {len(text)} tokens: {found}, and not {wanted}"
                if len(following) <= K:
                    break
                accepted.append(next((at for at, draft in enumerate(found) if draft != following[at]), K))
                text += [following.pop(0) for _ in range(accepted[-1] + 1)]
            assert text[length:] == written[: len(text) - length]
            sys.stdout.write(f"{method}: {len(accepted)} drafts as expected, accepted {accepted}\n")
            assert max(accepted) > 0


if __name__ == "__main__":
    main()
