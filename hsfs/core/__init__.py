"""Frozen values, the exception tree, every Protocol and the pure decisions: no I/O."""
