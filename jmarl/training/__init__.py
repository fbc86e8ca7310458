"""Old names of modules, kept for scripts that import them. New code imports `jmarl.preferences`."""

import sys

from jmarl import preferences
from jmarl.preferences import encoding

sys.modules |= {f"{__name__}.preferences": preferences, f"{__name__}.preferences.encoding": encoding}
