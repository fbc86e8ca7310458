"""CoMLRL's module paths under `comlrl.utils`.

Open `reward_processor.py` first.
"""

from jmarl.comlrl.utils.checkpoint import read_checkpoint_metadata as read_checkpoint_metadata
from jmarl.comlrl.utils.distributed import DistributedContext as DistributedContext
from jmarl.comlrl.utils.distributed import local_context as local_context
from jmarl.comlrl.utils.distributed import unwrap_model as unwrap_model
from jmarl.comlrl.utils.formatters import build_formatters as build_formatters
from jmarl.comlrl.utils.model_loading import infer_model_name as infer_model_name
from jmarl.comlrl.utils.model_loading import resolve_model_sources as resolve_model_sources
from jmarl.comlrl.utils.reference_kl import clone_reference_models as clone_reference_models
from jmarl.comlrl.utils.reference_kl import load_reference_models_from_sources as load_reference_models_from_sources
from jmarl.comlrl.utils.reference_kl import reference_kl_coef as reference_kl_coef
from jmarl.comlrl.utils.reference_kl import reference_kl_enabled as reference_kl_enabled
from jmarl.comlrl.utils.reference_kl import reference_kl_for_sequence as reference_kl_for_sequence
from jmarl.comlrl.utils.reference_kl import resolve_reference_devices as resolve_reference_devices
from jmarl.comlrl.utils.reference_kl import validate_reference_kl_config as validate_reference_kl_config
from jmarl.comlrl.utils.reward_processor import RewardProcessors as RewardProcessors
from jmarl.comlrl.utils.reward_utils import call_reward_function as call_reward_function
from jmarl.comlrl.utils.reward_utils import normalize_reward_lengths as normalize_reward_lengths
from jmarl.comlrl.utils.reward_utils import resolve_reward_range as resolve_reward_range
from jmarl.comlrl.utils.reward_utils import set_reward_range as set_reward_range
from jmarl.comlrl.utils.tokenizer_utils import apply_tokenizer_specials as apply_tokenizer_specials
from jmarl.comlrl.utils.tokenizer_utils import ensure_pad_token as ensure_pad_token
from jmarl.comlrl.utils.tokenizer_utils import ensure_tokenizer as ensure_tokenizer
from jmarl.comlrl.utils.tokenizer_utils import resolve_tokenizers as resolve_tokenizers
