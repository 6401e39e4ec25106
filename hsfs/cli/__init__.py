"""The command line, one module per verb: the only composition roots."""
