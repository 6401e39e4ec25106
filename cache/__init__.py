"""Tier 0: verified cache files on local disk and their index."""

if __name__ != "hsfs.cache":
    raise ImportError("import hsfs.cache, not cache: the bare name would load a second copy")
