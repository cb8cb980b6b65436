"""`python -m whimbrel`: the command line."""

from whimbrel.cli.main import main

main()
