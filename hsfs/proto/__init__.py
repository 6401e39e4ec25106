"""Sans-IO codecs of the wire protocols: no event loop, no sockets."""
