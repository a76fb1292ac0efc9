"""Training of a small drafter on what its target writes: corpus, distillation, evaluation, export."""
