"""What a server does with an engine that has adapters by name: two models and the base."""

import asyncio

import httpx
from sampling import PROMPT, answering, ask, base, forward, saved
from serving import trained

from tilewright.server.rollouts import Rollouts

URL = "http://engine"
GREEDY, DRAWN = {"seed": 0, "temperature": 0.0}, {"seed": 3, "top_k": 40, "top_p": 0.95}


def of_engine(served, transport, kind, url=URL):
    """Samples, and the largest differences to training's log-probabilities, of each model."""
    models = [served.model(i) for i in range(2)]
    for i, model in enumerate(models):
        trained(served, model, 2, seed=9 * i)
    session = models[0].partition(":")[0]
    names = [saved(served, models[0], 0), saved(served, models[1], 1), base(served, session)]
    told = asyncio.run(_sampled(served, transport, kind, url, names))
    told["away"] = [
        max(_away(served, model, 7 + i, one[0]) for i, one in enumerate(each))
        for model, each in zip(models, told["sequences"], strict=False)
    ]
    return told


async def _sampled(served, transport, kind, url, names):
    async with httpx.AsyncClient(transport=transport, base_url=url, timeout=None) as client:
        endpoint = served.api.endpoint(kind(client))
        rollouts = Rollouts(served.log, "engine", [endpoint])
        futures = [
            [
                ask(served, name, i, params=params, num_samples=2, topk_sample_logprobs=2 * i)
                for i, params in enumerate((GREEDY, DRAWN))
            ]
            for name in names
        ]
        await answering(served, rollouts.all())
        told = [[served.result(future) for future in each] for each in futures]
        assert all("sequences" in one for each in told for one in each), told
        every = [[one["sequences"] for one in each] for each in told]
        # A token that ends a sample is its last.
        end = every[0][1][0]["tokens"][3]
        future = ask(served, names[0], 2, params={**DRAWN, "stop": [end]})
        await answering(served, rollouts.all())
        [stopped] = served.result(future)["sequences"]
        # Under a name of their own, in place: those of one model, and then of the other.
        renewed = [
            (await answering(served, endpoint.renew(name, "own", f"v{i}"))).state
            for i, name in enumerate(names[:2])
        ]
    facts = endpoint.facts._asdict()
    told = {"facts": facts, "sequences": every, "stopped": stopped, "end": end}
    return {**told, "renewed": renewed}


def _away(served, model, seq, sequence):
    own = forward(served, model, seq, PROMPT + sequence["tokens"])[len(PROMPT) - 1 :]
    return max(abs(a - b) for a, b in zip(sequence["logprobs"], own.tolist(), strict=True))
