// Decoder: one token of each of several sequences, or a few that follow one another, through a whole
// GPT, in one call; and the draw of the next ones.
//
// The forward of model/gpt.py for T = 1, stage by stage over a shared pool of threads: norms and
// conversions by row, matrices by pieces of weight rows, attention by sequence and key head. The
// residual stream is float32 whatever the weights are. What a row computes depends on that row alone.
// The plain twin is Runner's decode through GPT.transform and KVCache.decode. Plain C at the border:
// model/kernels/decoder.py describes the structures to ctypes.

#include <memory>
#include <vector>

#include "attention.h"
#include "clocks.h"
#include "draw.h"
#include "linear.h"
#include "pool.h"
#include "rows.h"

using namespace logitd;

extern "C" {

struct LayerWeights {
  Norm attention_norm, query_norm, key_norm, mlp_norm;
  Matrix qkv, attention_out, mlp_up, mlp_down;
  const void* value_embedding;  // (vocabulary, n_kv_head * head_dim), or null
  const float* value_gate;      // (n_kv_head, value_gate_width)
};

struct ModelWeights {
  std::int32_t n_layer, n_head, n_kv_head, head_dim, d_model, d_ff, vocab_size;
  std::int32_t kind;        // of every matrix: KIND_*
  std::int32_t cells;       // of embeddings and of the cache: KIND_F32 or KIND_BF16
  std::int32_t post_norm, rotary, qk_norm, final_norm_on, value_gate_width;
  std::int32_t activation;  // Activation
  const void* token_embedding;
  const void* position_embedding;  // (positions, d_model) like token_embedding, or null
  const float* sinusoids;          // (positions, d_model), or null
  const float *rope_cos, *rope_sin;  // (positions, head_dim / 2)
  const LayerWeights* layers;
  Norm final_norm;
  Matrix head;
};

struct Cache {
  void *keys, *values;  // (n_layer, slots, n_kv_head, slot_length, head_dim)
  std::int64_t slots, slot_length;
};

}  // extern "C"

namespace {

constexpr int ROW_PAD = LANES;

int padded(int width) { return (width + ROW_PAD - 1) / ROW_PAD * ROW_PAD; }

// Buffers for up to `rows` tokens, and the forward over them.
class Decoder {
 public:
  Decoder(const ModelWeights& weights, const Cache& cache, int rows, int threads)
      : w_(weights),
        cache_(cache),
        heads_width_(weights.n_head * weights.head_dim),
        kv_width_(weights.n_kv_head * weights.head_dim),
        qkv_width_(heads_width_ + 2 * kv_width_),
        up_width_(weights.d_ff * (weights.activation == SWIGLU ? 2 : 1)),
        x_(floats(rows, padded(weights.d_model))),
        h_(floats(rows, padded(weights.d_model))),
        qkv_(floats(rows, padded(qkv_width_))),
        heads_(floats(rows, padded(heads_width_))),
        up_(floats(rows, padded(up_width_) + ROW_PAD)),
        scores_(floats(rows * weights.n_kv_head, padded(int(cache.slot_length)))),
        narrow_(weights.kind, rows, weights.d_model),
        mixed_(weights.kind, rows, heads_width_),
        wide_(weights.kind, rows, weights.d_ff),
        pool_(threads) {
    starts_.reserve(rows + 1);
  }

  // logits (count, vocab_size) that follow each of `count` tokens. Those of one slot stand together,
  // at positions that follow one another.
  void decode(const std::int32_t* tokens, const std::int32_t* slots, const std::int32_t* positions,
              int count, float* logits) {
    clocks_.begin();
    pool_.begin();
    tokens_ = tokens, slots_ = slots, positions_ = positions, count_ = count;
    starts_.clear();
    for (int row = 0; row < count; row++)
      if (row == 0 || slots[row] != slots[row - 1]) starts_.push_back(row);
    starts_.push_back(count);
    rows([&](int row) { embed(row); });
    clocks_.end(EMBEDDING);
    for (int layer = 0; layer < w_.n_layer; layer++) block(layer);
    rows([&](int row) {
      if (w_.post_norm && w_.n_layer) finish_post(w_.layers[w_.n_layer - 1], row);
      if (w_.final_norm_on) normalise(w_.final_norm, x(row), h(row), w_.d_model);
      narrow_.put(row, w_.final_norm_on ? h(row) : x(row), w_.d_model);
    });
    clocks_.end(NORMS);
    linear(pool_, w_.head, narrow_.inputs(count_), logits, w_.vocab_size, false);
    clocks_.end(HEAD);
    pool_.rest();
  }

  // logits (count, vocab_size) of final hidden states (count, d_model).
  void head(const float* hidden, int count, float* logits) {
    clocks_.begin();
    pool_.begin();
    pool_.loop(count, [&](int row) {
      narrow_.put(row, hidden + std::size_t(row) * w_.d_model, w_.d_model);
    });
    linear(pool_, w_.head, narrow_.inputs(count), logits, w_.vocab_size, false);
    clocks_.end(HEAD);
    pool_.rest();
  }

  // The token of each of `count` rows of logits.
  void draw(DrawnRow* rows, int count) {
    clocks_.begin();
    pool_.begin();
    pool_.loop(count, [&](int row) {
      static thread_local Drawer drawer;  // keeps its memory from row to row
      rows[row].token_id = drawer.token(rows[row], w_.vocab_size);
    });
    clocks_.end(DRAW);
    pool_.rest();
  }

  bool crowded() const { return pool_.crowded(); }

  void time_stages(std::int64_t* total) { clocks_.add_to(total); }

 private:
  static Buffer<float> floats(int rows, int pitch) {
    return Buffer<float>(std::size_t(rows) * pitch + LANES, 0.0f);
  }

  template <class Stage>
  void rows(const Stage& stage) {
    pool_.loop(count_, stage);
  }

  float* x(int row) { return x_.data() + std::size_t(row) * padded(w_.d_model); }
  float* h(int row) { return h_.data() + std::size_t(row) * padded(w_.d_model); }
  float* qkv(int row) { return qkv_.data() + std::size_t(row) * padded(qkv_width_); }
  float* heads(int row) { return heads_.data() + std::size_t(row) * padded(heads_width_); }
  float* up(int row) { return up_.data() + std::size_t(row) * (padded(up_width_) + ROW_PAD); }

  void block(int layer) {
    const LayerWeights& w = w_.layers[layer];
    rows([&](int row) { before_attention(layer, row); });
    clocks_.end(NORMS);
    linear(pool_, w.qkv, narrow_.inputs(count_), qkv_.data(), padded(qkv_width_), false);
    clocks_.end(QKV);
    // A piece is all rows of one slot, one after the other: each looks back at those before it.
    pool_.lanes((int(starts_.size()) - 1) * w_.n_kv_head, [&](int piece) {
      int sequence = piece / w_.n_kv_head, head = piece % w_.n_kv_head;
      for (int row = starts_[sequence]; row < starts_[sequence + 1]; row++) {
        if (w_.cells == KIND_F32) attention<float>(layer, row, head);
        else attention<Bf16>(layer, row, head);
      }
    });
    rows([&](int row) { mixed_.put(row, heads(row), heads_width_); });
    clocks_.end(ATTENTION);
    linear(pool_, w.attention_out, mixed_.inputs(count_), x_.data(), padded(w_.d_model), true);
    clocks_.end(ATTENTION_OUT);
    rows([&](int row) { before_mlp(w, row); });
    clocks_.end(NORMS);
    linear(pool_, w.mlp_up, narrow_.inputs(count_), up_.data(), padded(up_width_) + ROW_PAD, false);
    clocks_.end(MLP_UP);
    rows([&](int row) {
      activate(Activation(w_.activation), up(row), w_.d_ff);
      wide_.put(row, up(row), w_.d_ff);
    });
    clocks_.end(ACTIVATION);
    linear(pool_, w.mlp_down, wide_.inputs(count_), x_.data(), padded(w_.d_model), true);
    clocks_.end(MLP_DOWN);
  }

  void embed(int row) {
    add_row(w_.token_embedding, tokens_[row], w_.d_model, x(row), false);
    if (w_.position_embedding)
      add_row(w_.position_embedding, positions_[row], w_.d_model, x(row), true);
    if (w_.sinusoids) {
      const float* table = w_.sinusoids + std::size_t(positions_[row]) * w_.d_model;
      for (int i = 0; i < w_.d_model; i++) x(row)[i] += table[i];
    }
  }

  // to (+)= a row of an embedding in the model's own format.
  void add_row(const void* table, int index, int width, float* to, bool add) const {
    std::size_t first = std::size_t(index) * width;
    for (int i = 0; i < width; i++) {
      float value = w_.cells == KIND_F32 ? static_cast<const float*>(table)[first + i]
                                         : widen(static_cast<const Bf16*>(table)[first + i]);
      to[i] = add ? to[i] + value : value;
    }
  }

  // The stream as attention's matrices want it, in `narrow_`; and its floats in h, for the gate.
  void before_attention(int layer, int row) {
    if (w_.post_norm) {
      if (layer) finish_post(w_.layers[layer - 1], row);
      std::memcpy(h(row), x(row), sizeof(float) * w_.d_model);
    } else {
      normalise(w_.layers[layer].attention_norm, x(row), h(row), w_.d_model);
    }
    narrow_.put(row, h(row), w_.d_model);
  }

  void finish_post(const LayerWeights& w, int row) {
    normalise(w.mlp_norm, x(row), x(row), w_.d_model);
  }

  void before_mlp(const LayerWeights& w, int row) {
    if (w_.post_norm) {
      normalise(w.attention_norm, x(row), x(row), w_.d_model);
      narrow_.put(row, x(row), w_.d_model);
    } else {
      normalise(w.mlp_norm, x(row), h(row), w_.d_model);
      narrow_.put(row, h(row), w_.d_model);
    }
  }

  // Write a sequence's new key and value of one head, and let the heads that share them look back.
  template <class Cell>
  void attention(int layer, int row, int kv_head) {
    const LayerWeights& w = w_.layers[layer];
    const int width = w_.head_dim, group = w_.n_head / w_.n_kv_head;
    float* query = qkv(row) + kv_head * group * width;
    float* key = qkv(row) + heads_width_ + kv_head * width;
    float* value = qkv(row) + heads_width_ + kv_width_ + kv_head * width;
    if (w.value_embedding) add_value_embedding(w, row, kv_head, value);
    if (w_.qk_norm) {
      normalise(w.key_norm, key, key, width);
      for (int i = 0; i < group; i++)
        normalise(w.query_norm, query + i * width, query + i * width, width);
    }
    if (w_.rotary) {
      std::size_t first = std::size_t(positions_[row]) * (width / 2);
      rotate(key, w_.rope_cos + first, w_.rope_sin + first, width);
      for (int i = 0; i < group; i++)
        rotate(query + i * width, w_.rope_cos + first, w_.rope_sin + first, width);
    }
    std::size_t slot_row = (std::size_t(layer) * cache_.slots + slots_[row]) * w_.n_kv_head + kv_head;
    Cell* keys = static_cast<Cell*>(cache_.keys) + slot_row * cache_.slot_length * width;
    Cell* values = static_cast<Cell*>(cache_.values) + slot_row * cache_.slot_length * width;
    std::size_t place = std::size_t(positions_[row]) * width;
    for (int i = 0; i < width; i += LANES) {
      store(keys + place + i, load(key + i));
      store(values + place + i, load(value + i));
    }
    float scale = 1.0f / std::sqrt(float(width));
    for (int i = 0; i < group * width; i++) query[i] *= scale;
    float* scores = scores_.data() +
                    std::size_t(row * w_.n_kv_head + kv_head) * padded(int(cache_.slot_length));
    const Cell* next_keys = keys + (kv_head + 1 < w_.n_kv_head ? cache_.slot_length * width : 0);
    attend(query, group, keys, values, next_keys, positions_[row] + 1, width, scores,
           heads(row) + kv_head * group * width);
  }

  // v += 2 sigmoid(gate . the stream's leading channels) * the token's own vector.
  void add_value_embedding(const LayerWeights& w, int row, int kv_head, float* value) {
    const float* gate = w.value_gate + kv_head * w_.value_gate_width;
    float steer = 0.0f;
    for (int i = 0; i < w_.value_gate_width; i++) steer += h(row)[i] * gate[i];
    float open = 2.0f / (1.0f + std::exp(-steer));
    std::size_t first = std::size_t(tokens_[row]) * kv_width_ + kv_head * w_.head_dim;
    for (int i = 0; i < w_.head_dim; i++) {
      float own = w_.cells == KIND_F32
                      ? static_cast<const float*>(w.value_embedding)[first + i]
                      : widen(static_cast<const Bf16*>(w.value_embedding)[first + i]);
      value[i] += open * own;
    }
  }

  ModelWeights w_;
  Cache cache_;
  int heads_width_, kv_width_, qkv_width_, up_width_;
  Buffer<float> x_, h_, qkv_, heads_, up_, scores_;
  Converted narrow_, mixed_, wide_;
  Pool pool_;
  Clocks clocks_;
  const std::int32_t *tokens_ = nullptr, *slots_ = nullptr, *positions_ = nullptr;
  int count_ = 0;
  std::vector<int> starts_;  // the first row of each sequence, and the end
};

}  // namespace

extern "C" {

void* logitd_decoder_new(const ModelWeights* weights, const Cache* cache, std::int32_t rows,
                         std::int32_t threads) {
  return new Decoder(*weights, *cache, rows, threads);
}

void logitd_decoder_delete(void* decoder) { delete static_cast<Decoder*>(decoder); }

std::int32_t logitd_crowded(void* decoder) { return static_cast<Decoder*>(decoder)->crowded(); }

void logitd_decode(void* decoder, const std::int32_t* tokens, const std::int32_t* slots,
                   const std::int32_t* positions, std::int32_t count, float* logits) {
  static_cast<Decoder*>(decoder)->decode(tokens, slots, positions, count, logits);
}

void logitd_head(void* decoder, const float* hidden, std::int32_t count, float* logits) {
  static_cast<Decoder*>(decoder)->head(hidden, count, logits);
}

void logitd_draw(void* decoder, DrawnRow* rows, std::int32_t count) {
  static_cast<Decoder*>(decoder)->draw(rows, count);
}

// The names of the stages that are timed, in their order, with spaces between them.
const char* logitd_stage_names() { return STAGE_NAMES; }

// Nanoseconds of each stage of what is computed from now on are added to `total`, which outlives that;
// null: no stage is timed.
void logitd_time_stages(void* decoder, std::int64_t* total) {
  static_cast<Decoder*>(decoder)->time_stages(total);
}

// One matrix by itself, for tests and measurements: out (count, rows) of float rows (count, width).
void logitd_linear(const Matrix* matrix, const float* inputs, std::int32_t count,
                   std::int32_t threads, std::int32_t repeat, float* out) {
  Pool pool(threads);
  Converted converted(matrix->kind, count, matrix->width);
  pool.begin();
  for (int row = 0; row < count; row++)
    converted.put(row, inputs + std::size_t(row) * matrix->width, matrix->width);
  for (int i = 0; i < repeat; i++)
    linear(pool, *matrix, converted.inputs(count), out, matrix->rows, false);
  pool.rest();
}

}  // extern "C"
