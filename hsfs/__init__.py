"""hsfs: one tree over many silos."""

__version__ = "0.1.0.dev0"
