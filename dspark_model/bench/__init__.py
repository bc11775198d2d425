"""Measurements on a GPU: a Kimi K3 rank, timing of captured work, and what `scripts/bench_step.py` times."""
