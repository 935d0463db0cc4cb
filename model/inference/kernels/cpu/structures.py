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


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Norm(Structure):
    _fields_ = (
        *_fields(c_void_p, "weight bias"),
        ("eps", c_float),
        ("centered", c_int32),
    )


class Matrix(Structure):
    _fields_ = (
        *_fields(c_void_p, "weights bias scale row_sum strips"),
        *_fields(c_int32, "kind rows width reserved"),
    )


class Layer(Structure):
    _fields_ = (
        *_fields(Norm, "attention_norm query_norm key_norm mlp_norm"),
        *_fields(Matrix, "qkv attention_out mlp_up mlp_down"),
        *_fields(c_void_p, "value_embedding value_gate"),
        ("window", c_int32),
        *_fields(c_float, "stream_scale embedding_scale"),
    )


class Model(Structure):
    _fields_ = (
        *_fields(c_int32, "n_layer n_head n_kv_head head_dim d_model d_ff vocab_size kind cells"),
        *_fields(c_int32, "post_norm parallel rotary qk_norm final_norm_on value_gate_width"),
        *_fields(c_int32, "activation smear_width residual_mix backout_layer"),
        *_fields(c_float, "smear_scale backout_scale logit_softcap"),
        *_fields(c_void_p, "token_embedding position_embedding sinusoids"),
        *_fields(c_void_p, "rope_cos rope_sin smear_gate"),
        ("layers", POINTER(Layer)),
        *_fields(Norm, "embedding_norm final_norm"),
        ("head", Matrix),
    )


class Cache(Structure):
    _fields_ = (
        *_fields(c_void_p, "keys values key_scales value_scales token_ids"),
        *_fields(c_int64, "slots slot_length kind"),
    )


class Record(Structure):
    _fields_ = (
        *_fields(c_void_p, "states weights layer_places head_places"),
        *_fields(c_int32, "layers heads length count"),
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
    are the addresses of the first rows; a pitch is the number of floats from one row to the next.
    Each call sets `how` and reads `token_ids`; the other fields are reused for all steps on the
    same tensors."""

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
