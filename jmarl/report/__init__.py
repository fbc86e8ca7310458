"""The report of runs: one HTML file with curves, settings, held-out results, goodput and completions, or a live page.

Reads run directories and imports no jax. Open `page.py` first; `page.html`, `*.css` and `*.js` are what the file consists
of, and `serve.py` serves it while a run goes on.
"""

from jmarl.lazy import face

__getattr__ = face(
    __name__,
    {
        "comparison": "LAST Comparison check_own",
        "diagnosis": "diagnose_runs",
        "load": "metrics",
        "page": "write_report",
        "serve": "address_of open_server",
    },
)
