"""A trained team as a service: the HTTP interface that OpenAI's clients speak, and an engine that samples for all requests.

The room imports `sampling`, `remote` and earlier rooms; HTTP needs the extra `serve`. Open `engine.py` first: who is sampled
when. `rows.py` has the two programs that it calls.
"""

from jmarl.lazy import face

__getattr__ = face(__name__, {"http_server": "serve_models", "others": "TeamSeats"})
