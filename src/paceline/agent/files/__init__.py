"""Code, data and results on this node: caches, transfers, paths that stay inside a folder."""
