"""The one package that imports vLLM: its scheduler, worker and sampler extended through the hooks it offers for that."""
