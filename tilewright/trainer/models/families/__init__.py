"""The families of models, by config.json's model_type."""

from tilewright.trainer.models.families.architecture import Architecture
from tilewright.trainer.models.families.deepseek_v3 import DEEPSEEK_V3
from tilewright.trainer.models.families.gemma3 import GEMMA3
from tilewright.trainer.models.families.gpt_oss import GPT_OSS
from tilewright.trainer.models.families.llama import LLAMA
from tilewright.trainer.models.families.mistral import MISTRAL
from tilewright.trainer.models.families.qwen2 import QWEN2
from tilewright.trainer.models.families.qwen3 import QWEN3
from tilewright.trainer.models.families.qwen3_moe import QWEN3_MOE

__all__ = ["ARCHITECTURES", "Architecture"]

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA3, GPT_OSS, DEEPSEEK_V3)
ARCHITECTURES = {family.model_type: family for family in _ALL}
