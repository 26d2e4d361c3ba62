"""Entry point of ``python -m paragrad``."""

from paragrad.cli.main import main

main()
