"""Says where the stability study is now."""

import sys

sys.exit("the stability study is `python -m studies.stability` now, with the same arguments")
