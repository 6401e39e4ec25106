"""Adapters of the places where bytes already live, one module per kind, and their decorators."""

if __name__ != "hsfs.backends":
    raise ImportError("import hsfs.backends, not backends: the bare name would load a second copy")
