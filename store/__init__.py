"""What stands on disk: payload files, the one write ordering, budget, eviction, recovery."""
