"""Plan a run before there is a GPU: compile its programs for a device that is not here, and count what they need.

The room imports everything up to `runs`. Open `plan.py` first.
"""

from jmarl.lazy import face

__getattr__ = face(
    __name__,
    {
        "devices": "find_gpu",
        "fit": "choose_settings line_of prove",
        "plan": "describe_team lines_of make_plan",
        "steps": "has_weights lines_of_steps time_steps",
    },
)
