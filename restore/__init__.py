"""From a prompt to live cache objects: identity, candidates, verified reading."""
