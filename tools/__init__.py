"""The command line: check, log, stats and demo."""
