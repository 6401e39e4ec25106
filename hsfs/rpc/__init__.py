"""Frames RPC: the client of the metadata server, later of the peers."""
