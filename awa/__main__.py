"""``python -m awa`` is the command ``awa``."""

from awa.cli import main

main(prog_name="awa")
