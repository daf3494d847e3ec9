"""``python -m crash``; a module apart, since the processes of ``run`` cannot import this one."""

import os
import sys

from .run import main

# What is drawn from a set is the same in each of its processes, and in each run.
os.environ["PYTHONHASHSEED"] = "0"
sys.exit(main())
