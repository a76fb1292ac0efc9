"""vLLM's CPU backend (V1 runner, synchronous scheduling) with the drafter in a process on its own cores."""
