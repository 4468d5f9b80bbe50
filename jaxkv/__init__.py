"""The paged KV-cache memory layer for JAX."""

from jaxkv.attention import attention as attention
from jaxkv.block_manager import Allocation as Allocation
from jaxkv.block_manager import BlockManager as BlockManager
from jaxkv.block_manager import Plan as Plan
from jaxkv.block_manager import Stats as Stats
from jaxkv.config import CacheConfig as CacheConfig
from jaxkv.errors import ConfigError as ConfigError
from jaxkv.errors import InvariantError as InvariantError
from jaxkv.errors import JaxkvError as JaxkvError
from jaxkv.errors import OutOfBlocksError as OutOfBlocksError
from jaxkv.errors import StaleStateError as StaleStateError
from jaxkv.errors import UnknownSequenceError as UnknownSequenceError
from jaxkv.generate import Generation as Generation
from jaxkv.generate import GenerationStats as GenerationStats
from jaxkv.generate import generate as generate
from jaxkv.loop import Output as Output
from jaxkv.sampling import SamplingParams as SamplingParams
from jaxkv.state import Batch as Batch
from jaxkv.state import PagedState as PagedState
from jaxkv.state import advance as advance
from jaxkv.state import apply_plan as apply_plan
from jaxkv.state import init_state as init_state
