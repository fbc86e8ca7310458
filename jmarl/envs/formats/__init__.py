"""Forms in which models write what environments read: fenced blocks of Markdown, and tool calls.

Imports nothing of this package. Open `native_calls.py` first.
"""
