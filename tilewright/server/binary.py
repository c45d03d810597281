"""Protobuf: requests of passes as they come, and results as they are sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tilewright.server import messages_pb2 as wire
from tilewright.server.datums import (
    DTYPES,
    Datum,
    Room,
    cells,
    from_bfloat16,
    from_bytes,
    from_csr,
)
from tilewright.server.frames import Arrays
from tilewright.server.refused import Refused

_NAMES: dict[int, str] = {
    wire.DTYPE_FLOAT32: "float32",
    wire.DTYPE_INT64: "int64",
    wire.DTYPE_INT32: "int32",
}
_INT32, _INT64 = DTYPES["int32"], DTYPES["int64"]
EMPTY = -99999.0  # the log-probability of an empty place in TopkLogprobs


class PassRequest:
    """A request of a forward or backward pass, parsed. Data are read by `data`."""

    def __init__(self, body: bytes, *, backward: bool):
        self._backward = backward
        self._message, self._room = wire.ForwardBackwardRequest(), Room(len(body))
        try:
            self._message.ParseFromString(body)
        except DecodeError as error:
            raise Refused(422, "the body is no ForwardBackwardRequest of protobuf") from error

    @property
    def model(self) -> str:
        return self._message.model_id

    @property
    def seq(self) -> int:
        return self._message.seq_id

    @property
    def backward(self) -> bool:
        """By the route, and not where the message says otherwise."""
        return self._backward and not self._message.forward_only

    def routes(self, routes: Any, lengths: np.ndarray) -> None:
        """As `bodies.PassRequest`: the messages have no recorded experts."""

    @property
    def loss(self) -> str:
        return self._message.loss_fn

    @property
    def options(self) -> dict[str, Any]:
        """The loss's."""
        newer = self._message.loss_fn_config_v2
        if not newer:
            return dict(self._message.loss_fn_config)
        return {n: getattr(v, v.WhichOneof("value") or "number") for n, v in newer.items()}

    def data(self) -> list[Datum]:
        return [self._datum(i, datum) for i, datum in enumerate(self._message.data)]

    def _datum(self, i: int, datum: wire.Datum) -> Datum:
        parts = []
        for chunk in datum.model_input:
            kind = chunk.WhichOneof("chunk")
            if kind != "encoded_text":
                raise Refused(
                    400, f"datum {i}: model_input has a chunk of {kind or 'no kind'}; accepted is "
                    "encoded_text"
                )  # fmt: skip
            parts.append(
                from_bytes(chunk.encoded_text.tokens, _INT32, (), f"datum {i}: model_input")
            )
        inputs = {
            name: _array(tensor, f"datum {i}: {name}", self._room)
            for name, tensor in datum.loss_fn_inputs.items()
        }
        return Datum(np.concatenate(parts) if parts else np.empty(0, np.int64), inputs)


def _array(tensor: wire.Tensor, at: str, room: Room) -> np.ndarray:
    """float32 or int64."""
    shape = [*tensor.shape]
    if tensor.HasField("sparse_csr"):
        csr = tensor.sparse_csr
        rows, columns = (
            from_bytes(part, _INT64, (), at) for part in (csr.crow_indices, csr.col_indices)
        )
        return from_csr(_read(csr.values, tensor.dtype, (), at), rows, columns, shape, at, room)
    return _read(tensor.dense, tensor.dtype, shape, at)


def _read(data: bytes, dtype: int, shape: Any, at: str) -> np.ndarray:
    if dtype == wire.DTYPE_BFLOAT16:
        return from_bfloat16(data, shape, at)
    if dtype not in _NAMES:
        raise Refused(422, f"{at}: dtype is {dtype}; accepted are float32, int64, int32, bfloat16")
    return from_bytes(data, DTYPES[_NAMES[dtype]], shape, at)


# ---- results


def pass_output(value: Mapping[str, Any], arrays: Arrays) -> bytes:
    """The result of a pass: `arrays` has what each token has, of all documents in order, and
    `value` their lengths and the metrics.
    """
    lengths = np.asarray(value["lengths"], np.int64)
    record = wire.ArrayRecord(type_tag="ArrayRecord", num_datums=len(lengths))
    for name, array in arrays.items():
        trailing = array.shape[1:]
        row = array.itemsize * math.prod(trailing)
        offsets = np.concatenate(([0], np.cumsum(lengths))) * row
        record.fields[name].CopyFrom(
            wire.BatchedTensor(
                data=np.ascontiguousarray(array, "<f4").tobytes(),
                offsets=offsets.astype("<i8").tobytes(),
                dtype=wire.DTYPE_FLOAT32,
                trailing_shape=trailing,
            )
        )
    return wire.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=value["metrics"]
    ).SerializeToString(deterministic=True)


def sample_output(value: Mapping[str, Any], arrays: Arrays) -> bytes:
    """The result of sampling. arrays: prompt_logprobs [tokens]; topk_ids, topk_logprobs
    [tokens, k]; sampled, sampled_logprobs and topk_sampled_*, of the samples' tokens one after
    another, of which `value` has the lengths; each if there is one.
    """
    response = wire.SampleResponse()
    if "prompt_logprobs" in arrays:
        response.prompt_logprobs = arrays["prompt_logprobs"].astype("<f4").tobytes()
    if "topk_ids" in arrays:
        response.topk_prompt_logprobs.CopyFrom(_topk(arrays["topk_ids"], arrays["topk_logprobs"]))
    if "target_logprobs" in arrays:
        _set_targets(response.target_prompt_logprobs, value["targets"], arrays["target_logprobs"])
    stops = {"stop": wire.STOP_REASON_STOP, "length": wire.STOP_REASON_LENGTH}
    ends = np.cumsum([0, *value["lengths"]])
    for reason, a, b in zip(value["stop_reasons"], ends[:-1], ends[1:], strict=True):
        sequence = response.sequences.add(
            stop_reason=stops[reason],
            tokens=arrays["sampled"][a:b].astype("<i4").tobytes(),
            logprobs=arrays["sampled_logprobs"][a:b].astype("<f4").tobytes(),
        )
        if "topk_sampled_ids" in arrays:
            own, best = (arrays[f"topk_sampled_{n}"][a:b] for n in ("ids", "logprobs"))
            sequence.topk_sampled_logprobs.CopyFrom(_topk(own, best))
    return response.SerializeToString(deterministic=True)


def _set_targets(tensor: wire.Tensor, layout: Any, array: np.ndarray) -> None:
    """layout: row pointers and columns of a sparse one, or None."""
    rows, columns = layout
    tensor.dtype = wire.DTYPE_FLOAT32
    tensor.shape.extend(array.shape)
    if rows is None:
        tensor.dense = array.astype("<f4").tobytes()
        return
    own = array[cells(rows, columns)]
    tensor.sparse_csr.values = own.astype("<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(rows, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray(columns, "<i8").tobytes()


def _topk(ids: np.ndarray, logprobs: np.ndarray) -> wire.TopkLogprobs:
    """ids: -1 where there is none."""
    return wire.TopkLogprobs(
        token_ids=np.where(ids < 0, 0, ids).astype("<i4").tobytes(),
        logprobs=np.where(ids < 0, EMPTY, logprobs).astype("<f4").tobytes(),
        k=ids.shape[1],
        length=len(ids),
    )
