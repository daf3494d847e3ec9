"""``python -m walkback``."""

from .tools.main import main

main()
