"""Benchmarks: hsfs beside a rival or beside the physical limit, in one run. See README.md."""
