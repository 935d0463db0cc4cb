"""Structures of native/model.h and native/sample.h for ctypes and NumPy, and the numeric codes of
formats and activations."""

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch

from logitd.model.inference.sampling.sample import SAMPLING_ROW

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "compressed": 4, "int8_strips": 5}
"""Codes of matrix formats: `Kind` in native/matrix.h."""
ACTIVATIONS = {"gelu_tanh": 0, "gelu": 1, "relu": 2, "relu2": 3, "swiglu": 4}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Norm(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("centered", c_int32))


class Matrix(Structure):
    _fields_ = (
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("scale", c_void_p),
        ("row_sum", c_void_p),
        ("strips", c_void_p),
        ("kind", c_int32),
        ("rows", c_int32),
        ("width", c_int32),
        ("reserved", c_int32),
    )


class Layer(Structure):
    _fields_ = (
        ("attention_norm", Norm),
        ("query_norm", Norm),
        ("key_norm", Norm),
        ("mlp_norm", Norm),
        ("qkv", Matrix),
        ("attention_out", Matrix),
        ("mlp_up", Matrix),
        ("mlp_down", Matrix),
        ("value_embedding", c_void_p),
        ("value_gate", c_void_p),
        ("window", c_int32),
        ("stream_scale", c_float),
        ("embedding_scale", c_float),
    )


class Model(Structure):
    _fields_ = (
        *((name, c_int32) for name in (
            "n_layer", "n_head", "n_kv_head", "head_dim", "d_model", "d_ff", "vocab_size",
            "kind", "cells",
            "post_norm", "parallel", "rotary", "qk_norm", "final_norm_on", "value_gate_width",
            "activation", "smear_width", "residual_mix", "backout_layer",
        )),
        *((name, c_float) for name in ("smear_scale", "backout_scale", "logit_softcap")),
        *((name, c_void_p) for name in (
            "token_embedding", "position_embedding", "sinusoids", "rope_cos", "rope_sin",
            "smear_gate",
        )),
        ("layers", POINTER(Layer)),
        ("embedding_norm", Norm),
        ("final_norm", Norm),
        ("head", Matrix),
    )  # fmt: skip


class Cache(Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("token_ids", c_void_p),
        ("slots", c_int64),
        ("slot_length", c_int64),
        ("kind", c_int64),
    )


class Record(Structure):
    _fields_ = (
        ("states", c_void_p),
        ("weights", c_void_p),
        ("layer_places", c_void_p),
        ("head_places", c_void_p),
        ("layers", c_int32),
        ("heads", c_int32),
        ("length", c_int32),
        ("count", c_int32),
    )


_SAMPLE_ROW = np.dtype(
    [
        ("logits", np.uint64),
        ("computed", np.uint64),
        ("how", SAMPLING_ROW),
        ("token_id", np.int32),
    ]
)
"""`SampleRow` of native/sample.h."""


class SampleRows:
    """Arguments and results of the native sampler, for up to `room` rows. `logits` and `computed`
    are the addresses of the first rows; a pitch is the number of floats between two rows. Each call
    sets `how` and reads `token_ids`; the rest is reused for all steps on the same tensors."""

    def __init__(
        self, room: int, logits: int, pitch: int, computed: int, computed_pitch: int
    ) -> None:
        self.room, self.where = room, (logits, pitch, computed, computed_pitch)
        rows, indices = np.empty(room, _SAMPLE_ROW), np.arange(room, dtype=np.uint64)
        rows["logits"] = indices * (4 * pitch) + logits
        rows["computed"] = indices * (4 * computed_pitch) + computed
        self.how = rows["how"]
        self.token_ids = rows["token_id"]
        self.address = rows.ctypes.data  # the views keep the memory alive
