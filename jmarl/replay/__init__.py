"""Make a step of a run again, bit for bit, and ask "what if": replace one message, play on with the same random keys.

A guest of the core: it reads a run directory, never writes to it, and imports everything up to `runs`. Open `steps.py` first.
"""

from jmarl.lazy import face

__getattr__ = face(
    __name__,
    {
        "steps": "OpenStep RemadeStep open_step make_again",
        "messages": "find_message path_of return_of say",
        "values": "alternatives credit value_of",
    },
)
