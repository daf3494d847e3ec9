"""``python -m crash``; a module apart, since the processes of ``run`` cannot import this one."""

import sys

from .run import main

sys.exit(main())
