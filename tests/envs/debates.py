"""A task and speeches that the tests of debates share."""

from __future__ import annotations

TASK = {
    "motion": "Towns should plant more trees.",
    "background": "Many streets are bare of shade in July.",
    "pro_points": ["Shade keeps old people healthy in hot weather."],
    "con_points": ["Roots damage the pipes below old pavements."],
}
PRO = [
    "First, trees cool a street, because leaves give off water all day. A study of nine towns found the shade under them eight "
    "degrees cooler, so that old and healthy people alike went out in the hot weather. For example, a square near my school "
    "is full in August. Finally, planting costs a town little, therefore even poor districts can afford it.",
    "To begin with, my opponent fears roots, although good planning puts trees where no pipe lies. Research by gardeners "
    "shows which kinds stay small. According to their lists, limes and maples suit narrow streets. In conclusion, a town that "
    "plants now has shade in ten years, whereas waiting only means another decade of heat.",
]
CON = [
    "First, roots lift stones and damage the old pavements, because they look for water in pipes below. Data from insurers "
    "count thousands of broken drains. For example, my street was dug up twice within 12 months. Finally, the town must sweep "
    "the leaves, therefore each tree is a bill that never ends.",
    "Secondly, watering young trees in dry summers takes lorries, although reservoirs are low. According to our town hall, "
    "half of them die within a year. Even if they live, they shade no one for decades. To sum up, awnings cool people today, "
    "whereas a survey found most new trees useless for a whole generation of roots.",
]
