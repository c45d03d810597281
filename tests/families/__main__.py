"""Tables of every family of transformers that can be built small.

    python -m tests.families accelerated [--only llama,bert] [--jobs 2]
    python -m tests.families quantized
    python -m tests.families sampled

Families whose rows are of today's sources are not tried again.
"""

from __future__ import annotations

import argparse
import importlib

import torch

import tilewright.integrations.transformers as integration
from tests.families.each import SWEEPS, table_of
from tests.lib.sweeps import beside, go_on

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("table", choices=SWEEPS)
parser.add_argument("--only", default="", help="families, separated by commas")
parser.add_argument("--jobs", type=int, default=1, help="processes")
given = parser.parse_args()
module = importlib.import_module(f"tests.families.{given.table}")
wanted = set(filter(None, given.only.split(",")))
chosen = [u for u in SWEEPS[given.table].old() if not wanted or u.split()[1] in wanted]
torch.set_num_threads(1)
integration.register()  # imports what every child needs
go_on(SWEEPS[given.table], table_of(given.table), beside(chosen, module.row_of, given.jobs))
if given.table == "accelerated":
    module.write_page()
