"""What was sent to an engine and what it answered, written down once and answered again.

Names that differ from run to run, of models and folders, stand as $1, $2, ... in the order in which
they come.
"""

import json
import re

import httpx

# Samplers with the time at which they were saved, folders of adapters, and ids of requests.
NAMES = re.compile(r"[0-9a-f]{16}:(?:train|sample):\d+@\d+|/[^\"]*/adapter|\b[0-9a-f]{32}\b")
UNREAD = (
    *("created", "permission", "service_tier", "metrics", "text", "text_offset", "tokens", "usage"),
    *("prompt_token_ids", "prompt_logprobs", "routed_experts", "stop_reason", "object", "owned_by"),
    *("kv_transfer_params", "ec_transfer_params", "system_fingerprint"),
)


class _Named:
    def __init__(self, names):
        self.names = dict(names)

    def known(self, text):
        for name, own in sorted(self.names.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(name, own)
        return text

    def plain(self, text):
        """With the names of requests, which are new ones."""
        for name in NAMES.findall(text):
            self.names.setdefault(name, f"${len(self.names)}")
        return self.known(text)

    def back(self, text):
        for name, own in sorted(self.names.items(), key=lambda pair: -len(pair[1])):
            text = text.replace(own, name)
        return text

    def key(self, request):
        path = request.url.raw_path.decode()
        return f"{request.method} {path} {self.plain(request.content.decode())}"


class Recorder(httpx.AsyncBaseTransport):
    """Passes on, and keeps what was answered, by what was asked."""

    def __init__(self, base):
        self.named, self.kept = _Named({base: "$base"}), {}

    async def handle_async_request(self, request):
        key = self.named.key(request)
        async with httpx.AsyncHTTPTransport() as inner:
            answer = await inner.handle_async_request(request)
            content = await answer.aread()
        told = self.named.known(content.decode())
        self.kept.setdefault(key, []).append([answer.status_code, _kept(told)])
        kind = answer.headers.get("content-type", "text/plain")
        return httpx.Response(answer.status_code, content=content, headers={"content-type": kind})


class Replay(httpx.AsyncBaseTransport):
    """Answers what was asked once, the last answer again.   asked: what was, in that order."""

    def __init__(self, kept, base):
        self.named = _Named({base: "$base"})
        self.kept, self.asked = {key: [*each] for key, each in kept.items()}, []

    async def handle_async_request(self, request):
        key = self.named.key(request)
        self.asked.append(key)
        assert key in self.kept, f"was never asked: {key}"
        each = self.kept[key]
        status, told = each.pop(0) if len(each) > 1 else each[0]
        text = told if isinstance(told, str) else json.dumps(told)
        return httpx.Response(status, content=self.named.back(text).encode())


def _kept(told):
    """What is read of an answer."""
    try:
        value = json.loads(told)
    except ValueError:
        return told
    return _without(value)


def _without(value):
    if isinstance(value, list):
        return [_without(one) for one in value]
    if isinstance(value, float):
        return round(value, 6)
    if not isinstance(value, dict):
        return value
    own = {}
    for name, one in value.items():
        if name == "vllm_config":
            parts = ("model_config", "lora_config")
            kept = ("dtype", "max_lora_rank")
            own[name] = {
                part: {n: v for n, v in (one[part] or {}).items() if n in kept} for part in parts
            }
        elif name not in UNREAD and (name != "id" or "root" in value):
            own[name] = _without(one)
    return own
