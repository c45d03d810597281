"""This library's trainer in layouts of a configuration, for `tilewright check-layout`.

tilewright check-layout examples/check_layout_layouts.py:step
"""

from tilewright_lab.check_layout.trainer_step import trainer_step

NO_EXPERTS = "--train.expert_parallel_size=1"

step = trainer_step(
    "examples/fsdp2_experts.yaml",
    {
        "fsdp2, experts over 2": (2, ()),
        "ddp": (2, ["--train.data_parallel_mode=ddp", NO_EXPERTS]),
        "tensor": (2, ["--train.tensor_parallel_size=2", NO_EXPERTS]),
        "pipeline": (2, ["--train.pipeline_parallel_size=2", NO_EXPERTS]),
        "ulysses": (2, ["--train.ulysses_parallel_size=2", NO_EXPERTS]),
    },
    ["--model.merge_qkv=false"],  # tensor parallelism shards queries, keys and values alone
)
