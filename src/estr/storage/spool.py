"""A trajectory as bytes and back, without pickle: one line of JSON, then the columns as raw little-endian arrays."""

from __future__ import annotations

import dataclasses
import json
import zlib
from typing import Any

import numpy as np

from estr.storage import encoding
from estr.trajectory import Segment, Trajectory

_COLUMNS = {"tokens": "<i4", "action": "|b1", "logprob": "<f4", "entropy": "<f4", "version": "<i4"}
_BYTES_PER_TOKEN = sum(np.dtype(kind).itemsize for kind in _COLUMNS.values())
_MAX_BYTES = 1 << 30  # a payload that unpacks to more is damaged
_FORMAT = 1


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """``trajectory`` as a compressed payload."""
    fields = {
        field.name: getattr(trajectory, field.name)
        for field in dataclasses.fields(trajectory)
        if field.name != "segments"
    }
    lengths = [len(segment.tokens) for segment in trajectory.segments]
    head = json.dumps(encoding.plain({"format": _FORMAT, "lengths": lengths, "fields": fields}), allow_nan=False)
    columns = [
        np.asarray(getattr(segment, name)).astype(kind, copy=False).tobytes()
        for segment in trajectory.segments
        for name, kind in _COLUMNS.items()
    ]
    return zlib.compress(b"\n".join((head.encode("ascii"), b"".join(columns))), level=1)


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
        if len(data) != sum(lengths) * _BYTES_PER_TOKEN:
            raise ValueError(f"{len(data)} bytes of columns for {sum(lengths)} tokens")
        return Trajectory(segments=_segments(data, lengths), **fields)
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


def _segments(data: bytes, lengths: list[int]) -> list[Segment]:
    segments, offset = [], 0
    for length in lengths:
        columns = {}
        for name, kind in _COLUMNS.items():
            columns[name] = np.frombuffer(data, kind, length, offset).copy()
            offset += columns[name].nbytes
        segments.append(Segment(**columns))
    return segments
