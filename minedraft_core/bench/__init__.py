"""Benchmark of one engine: a closed loop of equal requests in each mode, measured from the engine's own records. See docs/benchmark.md."""
