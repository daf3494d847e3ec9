"""mlx-lm: binding a model, capturing its caches, recording and resuming prompts."""
