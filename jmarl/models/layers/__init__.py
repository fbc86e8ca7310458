"""What a layer of the decoder is made of, for one agent: attention, recurrence (`delta.py`), experts, products; and layers
of several kinds.

Imports what the platforms need, the config and the weights; the decoder imports it. Open `attention.py` first.
"""
