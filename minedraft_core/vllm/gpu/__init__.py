"""CUDA with vLLM's V2 model runner: the drafter on a device of its own, or beside the target, with no CPU synchronisation in between."""
