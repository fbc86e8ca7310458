"""`python -m jmarl`, the same as the command `jmarl`."""

from jmarl.cli.main import main

raise SystemExit(main())
