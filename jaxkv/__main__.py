"""`python -m jaxkv` is the command `jaxkv`."""

from jaxkv.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
