"""The families of models, by config.json's model_type."""

from tilewright.trainer.architectures.architecture import Architecture
from tilewright.trainer.architectures.deepseek_v3 import DEEPSEEK_V3
from tilewright.trainer.architectures.gemma3 import GEMMA3
from tilewright.trainer.architectures.gpt_oss import GPT_OSS
from tilewright.trainer.architectures.llama import LLAMA
from tilewright.trainer.architectures.mistral import MISTRAL
from tilewright.trainer.architectures.qwen2 import QWEN2
from tilewright.trainer.architectures.qwen3 import QWEN3
from tilewright.trainer.architectures.qwen3_moe import QWEN3_MOE

__all__ = ["ARCHITECTURES", "Architecture"]

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA3, GPT_OSS, DEEPSEEK_V3)
ARCHITECTURES = {family.model_type: family for family in _ALL}
