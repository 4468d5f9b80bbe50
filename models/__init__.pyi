"""The public names of jaxkv.models. Each is imported when it is first used."""

from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import load as load
from .config import Llama3Scaling as Llama3Scaling
from .config import LlamaConfig as LlamaConfig
from .errors import CheckpointError as CheckpointError
from .files import default_model as default_model
from .files import read_config as read_config
from .llama import Llama as Llama
from .orbax_checkpoint import save_orbax as save_orbax
from .tokenizer import Tokenizer as Tokenizer
