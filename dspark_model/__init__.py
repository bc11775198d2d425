"""MLA-shaped DSpark drafters for speculative decoding: model definition, paged latent pool, worker, generation.

Importing the package touches no GPU and imports neither triton, cutlass nor transformers.
"""

from dspark_model.checkpoint import CheckpointError, EmbeddingChoice, embeddings_bit_equal
from dspark_model.config import DrafterConfig, RopeConfig
from dspark_model.config_keys import ConfigError
from dspark_model.external_pool import ExternalLatentPool
from dspark_model.generation import Generation, compare_greedy, generate, generate_plain
from dspark_model.kv_pool import LatentKVPool, PrefixHandle
from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.packing import pack_linears
from dspark_model.page_allocator import CapacityError
from dspark_model.presets import Preset, load_config
from dspark_model.sampling import SamplingParams
from dspark_model.serving_config import PoolConfig, RuntimeConfig
from dspark_model.step_io import ContextChunk, GenerationRows, StepInput, StepOutput
from dspark_model.worker import DFlashWorker

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "ContextChunk",
    "DFlashWorker",
    "DrafterConfig",
    "EmbeddingChoice",
    "ExternalLatentPool",
    "Generation",
    "GenerationRows",
    "LatentKVPool",
    "MLADSparkForCausalLM",
    "PoolConfig",
    "Preset",
    "PrefixHandle",
    "RopeConfig",
    "RuntimeConfig",
    "SamplingParams",
    "StepInput",
    "StepOutput",
    "compare_greedy",
    "embeddings_bit_equal",
    "generate",
    "generate_plain",
    "load_config",
    "pack_linears",
]
