"""The Flax Llama that drives the cache, its loaders and the tiny trainer."""

from models.config import LlamaConfig as LlamaConfig
from models.llama import Llama as Llama
from models.load import Checkpoint as Checkpoint
from models.load import default_model as default_model
from models.load import load as load
from models.orbax_checkpoint import save_orbax as save_orbax
from models.rope import Llama3Scaling as Llama3Scaling
from models.tokenizer import Tokenizer as Tokenizer
from models.weights import CheckpointError as CheckpointError
