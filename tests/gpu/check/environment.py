"""Settings of the libraries, to be made before they are imported."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
# A forked engine would keep settings of vLLM that this process has read before a stage changes them.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
