"""The paged KV-cache memory layer for JAX.

The public names are listed in `__init__.pyi`, which type checkers read too. Each is imported when
it is first used (PEP 562), so that `from jaxkv import BlockManager` loads neither JAX nor Flax.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
