"""Facts and their order: events, the fold, the LMDB log, HEAD, and the compactor."""
