"""FUSE sessions: adapters between the kernel and the Vfs, without decisions of their own."""
