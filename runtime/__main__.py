"""`python -m plait` and `torchrun -m plait`: the command line without the script."""

from plait.cli import entry

if __name__ == "__main__":
    entry()
