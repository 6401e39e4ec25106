"""The metadata server: namespace, journal, jobs and the store; it never opens a backend."""

if __name__ != "hsfs.mdserver":
    raise ImportError("import hsfs.mdserver, not mdserver: the bare name would load a second copy")
