"""Metrics, traces and the audit channel."""
