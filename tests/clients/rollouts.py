"""A published loop of reinforcement learning, unchanged, on a server: what a client sees, as JSON.

    python rollouts.py SERVER_FOLDER MODEL_FOLDER FOLDER

As `cookbook.py`. The environment rewards the share of one token in what follows a prompt: the same
token for all prompts, or one that depends on the prompt.
"""

import asyncio
import contextlib
import json
import shutil
import sys

from connection import FOLDER, MODEL, URL, metrics  # first: it sets the environment

import chz  # isort: skip
import tinker
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult

PROMPTS = 8
# Between the sampler and training (0: the first ratio is 1), from the base, and of a step.
KL = ("optim/kl_sample_train_v1", "kl_policy_base", "kl_pre_post_v1")


class Token(Env):
    def __init__(self, prompt, right):
        self.prompt, self.right = prompt, right

    async def initial_observation(self):
        return tinker.ModelInput.from_ints(self.prompt), []

    async def step(self, action, *, extra=None):
        share = action.count(self.right) / len(action)
        return StepResult(share, True, tinker.ModelInput.empty(), [])


class Group(EnvGroupBuilder):
    def __init__(self, prompt, right, samples):
        self.prompt, self.right, self.samples = prompt, right, samples

    async def make_envs(self):
        return [Token(self.prompt, self.right) for _ in range(self.samples)]


class Prompts(RLDataset):
    def __init__(self, steps, samples, depends):
        self.steps, self.samples, self.depends = steps, samples, depends

    def get_batch(self, index):
        kinds = [i % 2 if self.depends else 0 for i in range(PROMPTS)]
        return [
            Group([50 + i, 3, 20 + 9 * kind], 7 + 4 * kind, self.samples)
            for i, kind in enumerate(kinds)
        ]

    def __len__(self):
        return self.steps


@chz.chz
class Builder(RLDatasetBuilder):
    steps: int
    samples: int
    depends: bool

    async def __call__(self):
        return Prompts(self.steps, self.samples, self.depends), None


@contextlib.contextmanager
def first_weights_alone():
    """Samplers keep the weights of the first one: what is trained does not reach them."""
    name = "save_weights_and_get_sampling_client_async"
    made, first = getattr(tinker.TrainingClient, name), []

    async def once(self, *args, **options):
        if not first:
            first.append(await made(self, *args, **options))
        return first[0]

    setattr(tinker.TrainingClient, name, once)
    try:
        yield
    finally:
        setattr(tinker.TrainingClient, name, made)


def rewards(name, steps, samples=8, tokens=4, depends=False, rate=3e-2, **options):
    """The mean reward of each step, and all that the loop has reported."""
    config = train.Config(
        learning_rate=rate,
        dataset_builder=Builder(steps=steps, samples=samples, depends=depends),
        model_name=str(MODEL),
        recipe_name="conformance",
        max_tokens=tokens,
        log_path=str(FOLDER / name),
        eval_every=0,
        save_every=0,
        lora_rank=8,
        base_url=URL,
        **options,
    )
    asyncio.run(train.main(config))
    rows = metrics(FOLDER / name)
    return [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row], rows


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    reference = train.KLReferenceConfig(base_model=str(MODEL))
    penalty = {"kl_penalty_coef": 0.01, "kl_reference_config": reference, "compute_post_kl": True}
    one, rows = rewards("one", 16, **penalty)
    behind = train.AsyncConfig(max_steps_off_policy=1, groups_per_batch=PROMPTS)
    # Fewer samples, or a higher rate, settle on one token for all prompts: half of the reward.
    more = {"samples": 32, "tokens": 2, "rate": 5e-3}
    depends, _ = rewards("depends", 40, depends=True, async_config=behind, **more)
    with first_weights_alone():
        unsynced, _ = rewards("unsynced", 8)
    told = {
        "rewards": one,
        "rewards_by_prompt_one_step_behind": depends,
        "rewards_without_sync": unsynced,
        **{name: [row[name] for row in rows if name in row] for name in KL},
    }
    problems = []
    for name, most in (("rewards", 0.5), ("rewards_by_prompt_one_step_behind", 0.8)):
        if not (told[name][0] < 0.1 and max(told[name]) >= most):
            problems.append(f"{name} have not risen from below 0.1 to {most}: {told[name]}")
    if any(told[KL[0]]) or len(told[KL[1]]) < 16 or not max(told[KL[2]]) > 0:
        problems.append(f"divergences: {[told[name] for name in KL]}")
    if max(unsynced) >= 0.1:
        problems.append(f"rewards have risen without new weights: {unsynced}")
    print(json.dumps({**told, "problems": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
