"""The published experiments as data files, run arm by arm and resumed where they stopped. See docs/experiments.md."""
