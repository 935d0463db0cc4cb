// Model: a GPT's weights and its KV cache as plain C structures. model/inference/kernels/cpu/structures.py
// declares them for ctypes.
#pragma once

#include <cstdint>

#include "linear.h"
#include "rows.h"

namespace logitd {

struct LayerWeights {
  Norm attention_norm, query_norm, key_norm, mlp_norm;
  Matrix qkv, attention_out, mlp_up, mlp_down;
  const void* value_embedding;  // (vocabulary, n_kv_head * head_dim), or null
  const float* value_gate;      // (n_kv_head, value_gate_width)
  std::int32_t window;  // number of positions that a position sees, up to its own; 0: all
  float stream_scale, embedding_scale;  // of the block's input, if residual_mix
};

struct ModelWeights {
  std::int32_t n_layer, n_head, n_kv_head, head_dim, d_model, d_ff, vocab_size;
  std::int32_t kind;        // KIND_* of the activations that meet matrices; INT8 and INT4 are the same
  std::int32_t cells;       // KIND_* of embeddings: F32 or BF16
  std::int32_t post_norm;   // norms after the residual sums
  std::int32_t parallel;    // attention and feed-forward read the same stream
  std::int32_t rotary, qk_norm, final_norm_on, value_gate_width;
  std::int32_t activation;  // Activation
  std::int32_t smear_width;    // channels of the gate; 0: no smear
  std::int32_t residual_mix;   // a block reads a mixture of the stream and the embedding
  std::int32_t backout_layer;  // the layer whose output is subtracted at the end; -1: none
  float smear_scale, backout_scale, logit_softcap;  // a softcap of 0 means none
  const void* token_embedding;
  const void* position_embedding;  // (positions, d_model) like token_embedding, or null
  const float* sinusoids;          // (positions, d_model), or null
  const float *rope_cos, *rope_sin;  // (positions, head_dim / 2), or null
  const float* smear_gate;  // (smear_width), or null
  const LayerWeights* layers;
  Norm embedding_norm, final_norm;  // null weight: no norm of embeddings
  Matrix head;
};

struct Cache {
  void *keys, *values;                // (n_layer, slots, n_kv_head, slot_length, head_dim)
  float *key_scales, *value_scales;   // (n_layer, slots, n_kv_head, slot_length), in int8 only
  std::int32_t* token_ids;            // (slots, slot_length), or null: a model without smear
  std::int64_t slots, slot_length;
  std::int64_t kind;  // of keys and values: KIND_F32, KIND_BF16 or KIND_INT8
};

// Additional outputs of a prompt of `count` tokens; null: none.
struct Record {
  float* states;             // (n_layer + 1, count, d_model): embeddings, then after each block
  float* weights;            // (count, layers, heads, length), zeros: attention's
  const std::int32_t* layer_places;  // (n_layer): a layer's index among the recorded ones, or -1
  const std::int32_t* head_places;   // (n_head)
  std::int32_t layers, heads, length, count;
};

}  // namespace logitd
