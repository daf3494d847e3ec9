"""``walkback serve``: mlx-lm's server over a cache."""

import logging
import os
import sys

import typer

from ..integration.serving.server import serve as run_server
from .output import CLEAN, run


def serve(context: typer.Context) -> None:
    """Serve a model as mlx_lm.server does, resuming prompts from RAM and SSD, also after a restart.

    All flags of mlx_lm.server are taken.
    """
    run(lambda: _serve(context.args))


def _serve(arguments: list[str]) -> int:
    run_server(arguments)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Everything is durable and closed. mlx 0.32 aborts at exit if a thread besides the main one has
    # computed, as mlx-lm's server does: so it ended 9 of 12 times that it was stopped.
    os._exit(CLEAN)
