"""`python -m jaxkv` is the command `jaxkv`."""

from jaxkv.cli import main

main()
