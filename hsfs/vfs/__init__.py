"""POSIX semantics over the metadata server, cache and backends; knows no FUSE and no NFS."""
