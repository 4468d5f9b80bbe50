"""The Flax Llama that drives the cache, its loaders and the tiny trainer."""

from jaxkv.models.config import LlamaConfig as LlamaConfig
from jaxkv.models.llama import Llama as Llama
from jaxkv.models.load import Checkpoint as Checkpoint
from jaxkv.models.load import default_model as default_model
from jaxkv.models.load import load as load
from jaxkv.models.orbax_checkpoint import save_orbax as save_orbax
from jaxkv.models.rope import Llama3Scaling as Llama3Scaling
from jaxkv.models.tokenizer import Tokenizer as Tokenizer
from jaxkv.models.weights import CheckpointError as CheckpointError
