"""Checks the pipeline on a GPU machine, in order of risk: `python -m tests.gpu.check STAGE ... --target FOLDER --draft FOLDER`.

Stages: `kernels` (each kernel against its reference), `start` (the engine starts with the drafter on the next device and on the target's
own), `twin` (the target as its own drafter: nearly every draft is accepted, greedy and sampled, also under preemption, chunked prompts and
prefix caching), `sync` (no call waits for a device), `greedy` (the same tokens as plain decoding, but for ties), `tensor_parallel` (greedy
over two devices, and over four where there are), `acceptance` (by position, against vLLM's own speculative decoding), `tetris` (greedy as
above with half of the drafts verified, and what that loses), `eagle` and `eagle3` (the drafts of a head, token for token those of vLLM's
own EAGLE: see `eagle_stage`), `eagle_tensor_parallel` (the same over two devices), `speed` (gap and hidden share with the shapes in
--shapes, a head's with --method, and vLLM's own speculative decoding beside it), `sweep` (draft lengths --depths with the same shapes),
`pearl` (lookahead: hits and exactness), `lookahead` (what a hit gains and a miss costs), `features` (what a request can ask for, as plain
decoding answers it), `sampling` (the law of sampled tokens, against plain decoding), `serve` (over HTTP, with this server and with vLLM's
own), `switch` (modes and draft lengths change under load), `soak` (--minutes of mixed load in each mode), `step` (a draft step alone, in
each way of running it), `tiles` (how its products are best cut and its attention is best spread, by whole steps).

Prints one line for each finding and ends with 1 where one is bad; an engine that fails is a finding, and the next one goes on. --json keeps
findings and figures. Without CUDA the stages from `pearl` on can be tried on the CPU pipeline.
"""
