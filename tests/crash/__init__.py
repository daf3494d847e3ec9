"""Crash anywhere: what a cache goes through, and who looks at what is left of it.

A **layer** is one way to break a cache: the power lost, a process killed, a call that fails, a byte
that rots. Each runs histories, counts the distinct states that it looked at, and says what was
wrong in any (``layer.py``). ``python -m crash`` runs all of them at length; the tests run a share.

The oracle is a ``World`` (``world.py``): which bytes the history put under which keys. Nothing that
the product computes is in it.
"""
