"""The job runner: all backend I/O outside a client's own reads."""
