"""Results as clients get them: protobuf or JSON, in the dialect of their model."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi.responses import JSONResponse, Response

from tilewright.server import binary
from tilewright.server.datums import ROUTES, cells
from tilewright.server.frames import unpacked
from tilewright.server.log import SAMPLES

PROTOBUF = "application/x-protobuf"


def answer(kind: str, body: bytes, *, named: bool, protobuf: bool) -> Response:
    """The answer with a result.

    named: in the JSON dialect.   protobuf: where that has a message for it.
    """
    value, arrays = unpacked(body)
    if named:
        return JSONResponse(_named(kind, value, arrays))
    if kind in ("forward", "forward_backward"):
        if protobuf:
            return Response(binary.pass_output(value, arrays), media_type=PROTOBUF)
        return JSONResponse(_listed(value, arrays))
    if kind in SAMPLES:
        if protobuf:
            return Response(binary.sample_output(value, arrays), media_type=PROTOBUF)
        return JSONResponse(_sampled(value, arrays))
    return JSONResponse(value)


def _listed(value: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    cuts = np.cumsum(value["lengths"])[:-1]
    columns = {name: np.split(array, cuts) for name, array in arrays.items()}
    outputs = [
        {
            name: {
                "data": parts[i].reshape(-1).tolist(),
                "dtype": "float32",
                "shape": [*parts[i].shape],
            }
            for name, parts in columns.items()
        }
        for i in range(len(value["lengths"]))
    ]
    known = {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs}
    return {**known, "metrics": value["metrics"]}


def _sampled(value: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    tokens, logprobs = (arrays.get(n, np.empty(0)) for n in ("sampled", "sampled_logprobs"))
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {"stop_reason": reason, "tokens": own.tolist(), "logprobs": each.tolist()}
            for reason, own, each in zip(
                value["stop_reasons"], _cut(value, tokens), _cut(value, logprobs), strict=True
            )
        ],
    }
    if "topk_sampled_ids" in arrays:
        ids, best = (_cut(value, arrays[f"topk_sampled_{n}"]) for n in ("ids", "logprobs"))
        for sequence, own, each in zip(answer["sequences"], ids, best, strict=True):
            rows = zip(own.tolist(), each.tolist(), strict=True)
            sequence["topk_logprobs"] = [
                [[*pair] for pair in zip(*row, strict=True)] for row in rows
            ]
    if ROUTES in arrays:
        rows, lengths = arrays[ROUTES].astype("<i4"), np.array(value["lengths"])
        prompt = (len(rows) - lengths.sum()) // len(lengths)
        each = np.split(rows, np.cumsum(lengths + prompt)[:-1])
        for sequence, own in zip(answer["sequences"], each, strict=True):
            # But of the last token, which no forward pass has seen.
            sequence[ROUTES] = base64.b64encode(own[:-1].tobytes()).decode()
    if "prompt_logprobs" in arrays:
        answer["prompt_logprobs"] = _without_nan(arrays["prompt_logprobs"])
    if "target_logprobs" in arrays:
        answer["target_prompt_logprobs"] = _of_targets(value, arrays)
    if "topk_ids" in arrays:
        rows = zip(arrays["topk_ids"].tolist(), arrays["topk_logprobs"].tolist(), strict=True)
        answer["topk_prompt_logprobs"] = [
            [[t, p] for t, p in zip(ids, own, strict=True) if t >= 0] or None for ids, own in rows
        ]
    return answer


def _of_targets(value: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """In the layout in which they were asked for."""
    array, (rows, columns) = arrays["target_logprobs"], value["targets"]
    tensor: dict[str, Any] = {"dtype": "float32", "shape": [*array.shape]}
    if rows is None:
        return {"data": array.reshape(-1).tolist(), **tensor}
    own = array[cells(rows, columns)]
    sparse = {"sparse_crow_indices": rows, "sparse_col_indices": columns}
    return {"data": own.tolist(), **tensor, **sparse}


def _cut(value: Any, array: np.ndarray) -> list[np.ndarray]:
    """What each sample has of an array of all of them."""
    return np.split(array, np.cumsum(value["lengths"])[:-1])


def _without_nan(array: np.ndarray) -> list[float | None]:
    return [None if x != x else x for x in array.tolist()]


# ---- the JSON dialect


def as_named(path: str) -> str:
    """A path as the JSON dialect has it."""
    return "xorl" + path.removeprefix("tinker")


def _named(kind: str, value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """A result in the JSON dialect."""
    if kind in ("forward", "forward_backward"):
        outputs = _listed(value, arrays)
        for output, loss in zip(outputs["loss_fn_outputs"], value["losses"], strict=True):
            output["loss"] = loss
        return {**outputs, "info": {}}
    if kind == "optim_step":
        return {**value, "info": {}}
    if not isinstance(value, dict) or "path" not in value:
        return value
    path = as_named(value["path"])
    if kind == "save_weights_for_sampler":
        shards = {
            n: v for n, v in value.items() if n == "num_shards"
        }  # where all weights are saved
        return {"path": path, "model_path": path, **shards}
    return {**value, "path": path}
