"""The Flax Llama that runs on the cache, its loaders and the tiny trainer.

The public names are listed in `__init__.pyi` and are imported when first used: reading a config
loads neither JAX nor Flax.
"""

import lazy_loader

if __name__ != "jaxkv.models":  # a second copy would have classes and errors of its own
    raise ImportError(f"the folder models is the package jaxkv.models; import jaxkv.models, not "
                      f"{__name__}")  # fmt: skip

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
