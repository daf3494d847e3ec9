"""mlx-lm's server over a cache: its prompt cache, batches and requests joined to walkback."""
