"""A trajectory as bytes and back, without pickle: one line of JSON, then the columns as raw little-endian arrays."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estr.storage import encoding
from estr.trajectory import Segment, Support, Trajectory

_COLUMNS = {"tokens": "<i4", "action": "|b1", "logprob": "<f4", "entropy": "<f4", "version": "<i4"}
_OPTIONAL = {
    "support_ids": "<i4",
    "support_offsets": "<i8",
    "topk_ids": "<i4",
    "topk_logprob": "<f4",
    "entropy_upper": "<f4",
}
_BYTES_PER_TOKEN = sum(np.dtype(kind).itemsize for kind in _COLUMNS.values())
_MAX_BYTES = 1 << 30  # a payload that unpacks to more is damaged
_SMALL = 1 << 13  # bytes; compressing these costs more than writing them
_FORMAT = 1
_STORED = b"\x78\x01\x01"  # deflate with a window of 32 KiB; the last block, stored
_COLUMN_TYPES = [(name, np.dtype(kind)) for name, kind in _COLUMNS.items()]
_HEAD = json.JSONEncoder(allow_nan=False, default=encoding.plain)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """``trajectory`` as a payload, compressed where that is worth its time."""
    fields = vars(trajectory).copy()
    segments: list[Segment] = fields.pop("segments")
    if not math.isfinite(trajectory.reward):
        fields["reward"] = encoding.plain(trajectory.reward)
    optional = [_optional(segment) for segment in segments]
    content = {"format": _FORMAT, "lengths": [len(segment.tokens) for segment in segments], "fields": fields}
    if any(optional):
        content["optional"] = [{name: list(array.shape) for name, array in arrays.items()} for arrays in optional]
    parts = [_HEAD.encode(content).encode("ascii"), b"\n"]
    for segment, arrays in zip(segments, optional, strict=True):
        parts += [np.asarray(getattr(segment, name), kind).tobytes() for name, kind in _COLUMN_TYPES]
        parts += [array.astype(_OPTIONAL[name], copy=False).tobytes() for name, array in arrays.items()]
    whole = b"".join(parts)
    return zlib.compress(whole, level=1) if len(whole) > _SMALL else _stored(whole)


def _stored(content: bytes) -> bytes:
    """``content`` as a zlib stream (RFC 1950) of one stored block, without the cost of setting up a compressor."""
    size = len(content)
    return b"".join(
        (_STORED, struct.pack("<HH", size, size ^ 0xFFFF), content, struct.pack(">I", zlib.adler32(content)))
    )


def _optional(segment: Segment) -> dict[str, NDArray[Any]]:
    """The optional columns that ``segment`` has, as plain arrays."""
    support, topk_ids, topk_logprob = segment.support, segment.topk_ids, segment.topk_logprob
    arrays: dict[str, NDArray[Any]] = {}
    if support is not None:
        arrays |= {"support_ids": support.ids, "support_offsets": support.offsets}
    if topk_ids is not None and topk_logprob is not None:
        arrays |= {"topk_ids": topk_ids, "topk_logprob": topk_logprob}
    if segment.entropy_upper is not None:
        arrays["entropy_upper"] = segment.entropy_upper
    return arrays


def decode_trajectory(payload: bytes) -> Trajectory:
    """What ``encode_trajectory`` packed.

    Raises:
        ValueError: the payload is damaged.
    """
    head, data = _unpack(payload)
    try:
        known = {field.name for field in dataclasses.fields(Trajectory)} - {"segments"}
        fields = {name: value for name, value in head["fields"].items() if name in known}
        lengths = [int(length) for length in head["lengths"]]
        if head["format"] != _FORMAT or min(lengths, default=0) < 0:
            raise ValueError("an unknown format")
        shapes = [_shapes(found) for found in head.get("optional", [{}] * len(lengths))]
        expected = sum(lengths) * _BYTES_PER_TOKEN + sum(map(_bytes, shapes))
        if len(data) != expected or len(shapes) != len(lengths):
            raise ValueError(f"{len(data)} bytes of columns where {expected} are expected")
        return Trajectory(segments=_segments(data, lengths, shapes), **fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a stored trajectory is damaged: {error}") from error


def _unpack(payload: bytes) -> tuple[dict[str, Any], bytes]:
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(payload, _MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"a stored trajectory is damaged: {error}") from error
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("a stored trajectory is damaged: it is cut off, or larger than it says or than 1 GiB")
    head, _, data = content.partition(b"\n")
    decoded = encoding.loads(head)
    if not isinstance(decoded, dict):
        raise ValueError("a stored trajectory is damaged: its head is no object")
    return decoded, data


def _shapes(found: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(int(size) for size in found[name]) for name in _OPTIONAL if name in found}
    if any(size < 0 for shape in shapes.values() for size in shape):
        raise ValueError("a stored trajectory is damaged: a column has a negative size")
    return shapes


def _bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) * np.dtype(_OPTIONAL[name]).itemsize for name, shape in shapes.items())


def _segments(data: bytes, lengths: list[int], shapes: list[dict[str, tuple[int, ...]]]) -> list[Segment]:
    segments, offset = [], 0
    for length, optional in zip(lengths, shapes, strict=True):
        columns: dict[str, Any] = {}
        for name, shape in {**dict.fromkeys(_COLUMNS, (length,)), **optional}.items():
            kind = (_COLUMNS | _OPTIONAL)[name]
            columns[name] = np.frombuffer(data, kind, math.prod(shape), offset).reshape(shape).copy()
            offset += columns[name].nbytes
        if optional.keys() >= {"support_ids", "support_offsets"}:
            columns["support"] = Support(columns.pop("support_ids"), columns.pop("support_offsets"))
        segments.append(Segment(**columns))
    return segments
