"""Run `experiments.pages.magrpo`, which had this name."""

from experiments.pages.magrpo import *  # noqa: F403
from experiments.pages.magrpo import main

if __name__ == "__main__":
    main()
