"""The NFS front: NFSv4 compounds, layouts and the data server."""
