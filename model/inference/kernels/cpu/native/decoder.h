// Decoder: runs tokens of several sequences, or many consecutive tokens, through a whole GPT in one
// call, and samples the next tokens.
//
// It computes the forward pass of model/transformer/gpt.py stage by stage on a shared pool of
// threads: norms and conversions by row, matrices by groups of weight rows, attention by key head
// and by sequence, or by rows of one sequence. The residual stream is float32 for all weights. A
// row depends on its token, its position and the earlier positions of its slot, so a prompt's rows
// have the bits of decoding the same tokens one by one. The plain twin is
// model/inference/kernels/eager/decoder.py.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attention.h"
#include "clocks.h"
#include "sample.h"
#include "model.h"
#include "pool.h"
#include "tile_attention.h"

namespace logitd {

// Maximum numbers of queries of a sequence that attend together, and of keys that they see in
// total. Each thread has room for their scores, and short items keep the wait at the end of a loop
// short (pool.h).
constexpr int TOGETHER = 16;
constexpr int KEYS_TOGETHER = 65536;
constexpr int ITEMS_A_THREAD = 4;  // minimum in attention by tiles, to keep the wait at the end short
constexpr int CAPPED = 4096;  // logits of a row that one thread softcaps
constexpr int WRITTEN = 8;  // rows of a sequence whose keys and values one thread writes

inline int padded(int width) { return (width + LANES - 1) / LANES * LANES; }

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
        queries_(sizeof(float) * std::size_t(rows) * heads_width_),
        heads_(floats(rows, padded(heads_width_))),
        up_(floats(rows, padded(up_width_) + LANES)),
        embedding_(floats(weights.residual_mix ? rows : 0, padded(weights.d_model))),
        middle_(floats(keeps_middle() ? rows : 0, padded(weights.d_model))),
        narrow_(weights.kind, rows, weights.d_model),
        mixed_(weights.kind, rows, heads_width_),
        wide_(weights.kind, rows, weights.d_ff),
        pool_(threads),
        by_tiles_(attends_by_tiles(cache.kind, weights.head_dim)),
        capacity_(rows) {
    single_.reserve(rows);
  }

  // logits (count, vocab_size) after each of `count` tokens. Tokens of one slot are adjacent, at consecutive
  // positions.
  void decode(const std::int32_t* tokens, const std::int32_t* slots, const std::int32_t* positions,
              int count, float* logits) {
    clocks_.begin();
    pool_.begin();
    record_ = {};
    forward(tokens, slots, positions, count);
    convert(narrow_, count_, [&](int row) { narrow_.put(row, finished(row), w_.d_model); });
    clocks_.end(NORMS);
    predict(count_, logits);
    clocks_.end(HEAD);
    pool_.rest();
  }

  // hidden (count, d_model): the final hidden states of the tokens of several prompts, in the order of
  // `decode`. Any number of tokens.
  void prefill(const std::int32_t* tokens, const std::int32_t* slots, const std::int32_t* positions,
               int count, const Record& record, float* hidden) {
    clocks_.begin();
    pool_.begin();
    record_ = record;
    for (done_ = 0; done_ < count; done_ += capacity_) {
      int here = std::min(capacity_, count - done_);
      forward(tokens + done_, slots + done_, positions + done_, here);
      rows([&](int row) {
        std::memcpy(hidden + std::size_t(done_ + row) * w_.d_model, finished(row),
                    sizeof(float) * w_.d_model);
      });
      clocks_.end(NORMS);
    }
    done_ = 0;
    pool_.rest();
  }

  // Tokens of prompts and of a decode step in one pass, in the order of `decode`, up to the capacity. hidden
  // (count, d_model): all final hidden states. logits (wanted, vocab_size): the logits after `wanted_rows`.
  void mixed(const std::int32_t* tokens, const std::int32_t* slots, const std::int32_t* positions, int count,
             const std::int32_t* wanted_rows, int wanted, float* hidden, float* logits) {
    clocks_.begin();
    pool_.begin();
    record_ = {};
    forward(tokens, slots, positions, count);
    const auto of = [&](int row) { return hidden + std::size_t(row) * w_.d_model; };
    rows([&](int row) { std::memcpy(of(row), finished(row), sizeof(float) * w_.d_model); });
    convert(narrow_, wanted, [&](int i) { narrow_.put(i, of(wanted_rows[i]), w_.d_model); });
    clocks_.end(NORMS);
    predict(wanted, logits);
    clocks_.end(HEAD);
    pool_.rest();
  }

  // logits (count, vocab_size) of any number of final hidden states (count, d_model).
  void head(const float* hidden, int count, float* logits) {
    clocks_.begin();
    pool_.begin();
    for (int first = 0; first < count; first += capacity_) {
      const float* from = hidden + std::size_t(first) * w_.d_model;
      int here = std::min(capacity_, count - first);
      convert(narrow_, here, [&](int row) {
        narrow_.put(row, from + std::size_t(row) * w_.d_model, w_.d_model);
      });
      predict(here, logits + std::size_t(first) * w_.vocab_size);
    }
    clocks_.end(HEAD);
    pool_.rest();
  }

  // The token of each of `count` rows of logits.
  void sample(SampleRow* rows, int count) {
    clocks_.begin();
    pool_.begin();
    pool_.loop(count, [&](int row) {
      static thread_local Sampler sampler;  // keeps its memory from row to row
      rows[row].token_id = sampler.token(rows[row], w_.vocab_size);
    });
    clocks_.end(SAMPLING);
    pool_.rest();
  }

  bool contended() const { return pool_.contended(); }

  void time_stages(std::int64_t* total) { clocks_.add_to(total); }

 private:
  struct Span {
    int first, last;  // rows
  };

  static Buffer<float> floats(int rows, int pitch) {
    return Buffer<float>(std::size_t(rows) * pitch + LANES, 0.0f);
  }

  // Logits (count, vocab_size) of the rows in `narrow_`.
  void predict(int count, float* logits) {
    const int vocabulary = w_.vocab_size;
    linear(pool_, w_.head, narrow_.inputs(count), logits, vocabulary, false);
    if (w_.logit_softcap == 0.0f) return;
    const int parts = (vocabulary + CAPPED - 1) / CAPPED;
    pool_.loop(count * parts, [&](int item) {
      const int first = item % parts * CAPPED;
      float* row = logits + std::size_t(item / parts) * vocabulary;
      softcap(row + first, std::min(CAPPED, vocabulary - first), w_.logit_softcap);
    });
  }

  template <class Stage>
  void rows(const Stage& stage) {
    pool_.loop(count_, stage);
  }

  // Run a stage that writes `count` rows into `to`.
  template <class Stage>
  void convert(Converted& to, int count, const Stage& stage) {
    if (count < MANY_ROWS) return pool_.loop(count, stage);
    pool_.loop((count + SIDE - 1) / SIDE, [&](int block) {
      const int first = block * SIDE, last = std::min(first + SIDE, count);
      for (int row = first; row < last; row++) stage(row);
      if (to.packs(count)) to.pack(first, last - first);  // while this thread's cache has them
    });
  }

  float* x(int row) { return x_.data() + std::size_t(row) * padded(w_.d_model); }
  float* h(int row) { return h_.data() + std::size_t(row) * padded(w_.d_model); }
  float* embedding(int row) { return embedding_.data() + std::size_t(row) * padded(w_.d_model); }
  float* middle(int row) { return middle_.data() + std::size_t(row) * padded(w_.d_model); }
  float* qkv(int row) { return qkv_.data() + std::size_t(row) * padded(qkv_width_); }
  float* heads(int row) { return heads_.data() + std::size_t(row) * padded(heads_width_); }
  float* up(int row) { return up_.data() + std::size_t(row) * (padded(up_width_) + LANES); }

  // Compute everything before the final norm, which `finished` computes.
  void forward(const std::int32_t* tokens, const std::int32_t* slots, const std::int32_t* positions,
               int count) {
    tokens_ = tokens, slots_ = slots, positions_ = positions, count_ = count;
    divide();
    for (int row = 0; cache_.token_ids && row < count; row++) *token_id(row, positions_[row]) = tokens_[row];
    rows([&](int row) { embed(row); });
    clocks_.end(EMBEDDING);
    for (int layer = 0; layer < w_.n_layer; layer++) block(layer);
  }

  // Divide the rows into the rows of sequences that have only one, and, for the other sequences, spans that
  // are written together and spans that attend together.
  void divide() {
    single_.clear(), written_.clear(), spans_.clear(), tile_spans_.clear();
    for (int first = 0, last; first < count_; first = last) {
      for (last = first + 1; last < count_ && slots_[last] == slots_[first];) last++;
      if (last - first == 1 && record_.weights == nullptr) {
        single_.push_back(first);
        continue;
      }
      put_spans(first, last, WRITTEN, written_);
      put_spans(first, last, rows_together(positions_[last - 1] + 1), spans_);
      if (by_tiles_) put_spans(first, last, tile_rows(first, last), tile_spans_);
    }
  }

  static void put_spans(int first, int last, int most, std::vector<Span>& spans) {
    for (; first < last; first += most) spans.push_back({first, std::min(first + most, last)});
  }

  // The number of a sequence's rows that attend together to this many keys.
  int rows_together(int keys) const {
    return std::max(1, std::min(TOGETHER, KEYS_TOGETHER / keys) / group());
  }

  // The number of a sequence's rows [first, last) that attend together by tiles. They rearrange the visible keys
  // and values for these rows, so the number is as large as it can be while each thread has work.
  int tile_rows(int first, int last) const {
    const int least = std::max(1, TILE_QUERIES / group());
    const int parts = std::max(1, ITEMS_A_THREAD * pool_.threads() / w_.n_kv_head);
    const int share = (last - first + parts - 1) / parts;
    return (share + least - 1) / least * least;
  }

  void block(int layer) {
    const LayerWeights& w = w_.layers[layer];
    convert(narrow_, count_, [&](int row) { before_attention(layer, row); });
    clocks_.end(NORMS);
    linear(pool_, w.qkv, narrow_.inputs(count_), qkv_.data(), padded(qkv_width_), false);
    clocks_.end(QKV);
    switch (cache_.kind) {
      case KIND_F32: attention<float>(layer); break;
      case KIND_BF16: attention<Bf16>(layer); break;
      case KIND_INT8: attention<std::int8_t>(layer); break;
    }
    convert(mixed_, count_, [&](int row) { mixed_.put(row, heads(row), heads_width_); });
    clocks_.end(ATTENTION);
    if (w_.parallel) prepare_mlp(w);  // from the stream that attention has read
    linear(pool_, w.attention_out, mixed_.inputs(count_), x_.data(), padded(w_.d_model), true);
    clocks_.end(ATTENTION_OUT);
    if (!w_.parallel) prepare_mlp(w);
    mlp_up(w.mlp_up, Activation(w_.activation));
    linear(pool_, w.mlp_down, wide_.inputs(count_), x_.data(), padded(w_.d_model), true);
    clocks_.end(MLP_DOWN);
  }

  // Compute the input of the second matrix of the feed-forward, in `wide_`.
  void mlp_up(const Matrix& matrix, Activation activation) {
    const Inputs inputs = narrow_.inputs(count_);
    const int pitch = padded(up_width_) + LANES;
    const bool as_computed = activates(matrix, activation);
    if (as_computed) wide_.activated_products(pool_, matrix, inputs, activation, up_.data(), pitch);
    else linear(pool_, matrix, inputs, up_.data(), pitch, false);
    clocks_.end(MLP_UP);
    if (as_computed && !wide_.has_scales()) return;
    convert(wide_, count_, [&](int row) {
      if (as_computed) wide_.put(row, up(row), w_.d_ff);
      else wide_.put_activated(row, activation, up(row), w_.d_ff);
    });
    clocks_.end(ACTIVATION);
  }

  void embed(int row) {
    put_token(tokens_[row], x(row));
    if (w_.smear_width && positions_[row] > 0) smear(row);
    if (w_.position_embedding)
      add_row(w_.position_embedding, positions_[row], w_.d_model, x(row), true);
    if (w_.sinusoids) {
      const float* table = w_.sinusoids + std::size_t(positions_[row]) * w_.d_model;
      for (int i = 0; i < w_.d_model; i++) x(row)[i] += table[i];
    }
    if (w_.residual_mix) std::memcpy(embedding(row), x(row), sizeof(float) * w_.d_model);
  }

  // The embedding of a token, after its norm.
  void put_token(int token, float* to) const {
    add_row(w_.token_embedding, token, w_.d_model, to, false);
    if (w_.embedding_norm.weight) normalize(w_.embedding_norm, to, to, w_.d_model);
  }

  // x += smear_scale * sigmoid(gate . leading channels) * the embedding of the token before.
  void smear(int row) {
    put_token(*token_id(row, positions_[row] - 1), h(row));
    const float part = w_.smear_scale * gate(w_.smear_gate, x(row), w_.smear_width);
    for (int i = 0; i < w_.d_model; i++) x(row)[i] += part * h(row)[i];
  }

  std::int32_t* token_id(int row, int position) const {
    return cache_.token_ids + std::size_t(slots_[row]) * cache_.slot_length + position;
  }

  // A number of an embedding in the model's own format.
  float cell(const void* table, std::size_t at) const {
    return w_.cells == KIND_F32 ? static_cast<const float*>(table)[at]
                                : widen(static_cast<const Bf16*>(table)[at]);
  }

  // Write a row of an embedding to `to`, or add it.
  void add_row(const void* table, int index, int width, float* to, bool add) const {
    std::size_t first = std::size_t(index) * width;
    for (int i = 0; i < width; i++) {
      float value = cell(table, first + i);
      to[i] = add ? to[i] + value : value;
    }
  }

  // The input of attention's matrices, in `narrow_`, and its floats in h, for the gate.
  void before_attention(int layer, int row) {
    const LayerWeights& w = w_.layers[layer];
    const std::size_t bytes = sizeof(float) * w_.d_model;
    if (w_.post_norm && layer) finish_post(w_.layers[layer - 1], row);
    keep_state(layer, row);
    if (keeps_middle() && layer == w_.backout_layer + 1) std::memcpy(middle(row), x(row), bytes);
    if (w_.residual_mix) scale_add(w.stream_scale, x(row), w.embedding_scale, embedding(row), x(row));
    if (w_.post_norm) std::memcpy(h(row), x(row), bytes);
    else normalize(w.attention_norm, x(row), h(row), w_.d_model);
    narrow_.put(row, h(row), w_.d_model);
  }

  // True if `backout` needs a copy of the stream after a block, because the block is not the last one.
  bool keeps_middle() const { return w_.backout_layer >= 0 && w_.backout_layer + 1 < w_.n_layer; }

  // to = a * first + b * second
  void scale_add(float a, const float* first, float b, const float* second, float* to) const {
    for (int i = 0; i < w_.d_model; i++) to[i] = a * first[i] + b * second[i];
  }

  // A row's final hidden state, after all blocks.
  const float* finished(int row) {
    if (w_.post_norm && w_.n_layer) finish_post(w_.layers[w_.n_layer - 1], row);
    keep_state(w_.n_layer, row);
    if (w_.backout_layer >= 0)
      scale_add(1.0f, x(row), -w_.backout_scale, keeps_middle() ? middle(row) : x(row), x(row));
    if (!w_.final_norm_on) return x(row);
    normalize(w_.final_norm, x(row), h(row), w_.d_model);
    return h(row);
  }

  void keep_state(int index, int row) {
    if (record_.states == nullptr) return;
    std::size_t place = std::size_t(index) * record_.count + done_ + row;
    std::memcpy(record_.states + place * w_.d_model, x(row), sizeof(float) * w_.d_model);
  }

  void finish_post(const LayerWeights& w, int row) {
    normalize(w.mlp_norm, x(row), x(row), w_.d_model);
  }

  // The input of the feed-forward, in `narrow_`, which attention's products have finished reading.
  void prepare_mlp(const LayerWeights& w) {
    convert(narrow_, count_, [&](int row) { before_mlp(w, row); });
    clocks_.end(NORMS);
  }

  void before_mlp(const LayerWeights& w, int row) {
    if (w_.post_norm) {
      normalize(w.attention_norm, x(row), x(row), w_.d_model);
      narrow_.put(row, x(row), w_.d_model);
    } else {
      normalize(w.mlp_norm, x(row), h(row), w_.d_model);
      narrow_.put(row, h(row), w_.d_model);
    }
  }

  // Write new keys and values. The only row of a sequence attends right away, by key head. If a
  // sequence has several rows, they attend after all are written, a span at a time.
  template <class Cell>
  void attention(int layer) {
    const int written = int(written_.size()), single = int(single_.size()) * w_.n_kv_head;
    pool_.lanes(written + single, [&](int item) {
      if (item < written) return write<Cell>(layer, written_[item]);
      const int place = (item - written) / w_.n_kv_head, head = (item - written) % w_.n_kv_head;
      write<Cell>(layer, single_[place], head);
      attend_row<Cell>(layer, place, head);
    });
    const std::vector<Span>& spans = by_tiles(layer) ? tile_spans_ : spans_;
    if (spans.empty()) return;
    // Later spans see more keys. They start first, so that the threads end together.
    int items = int(spans.size()) * w_.n_kv_head;
    pool_.loop(items, [&](int item) {
      const Span& span = spans[spans.size() - 1 - item / w_.n_kv_head];
      attend_span<Cell>(layer, span, item % w_.n_kv_head);
    });
  }

  bool by_tiles(int layer) const { return by_tiles_ && !w_.layers[layer].window; }

  // The first position that a row sees.
  int first_visible(int layer, int row) const {
    const int window = w_.layers[layer].window;
    return window ? std::max(0, positions_[row] + 1 - window) : 0;
  }

  // The position from which a row computes scores: whole vectors before its first visible position.
  int first_computed(int layer, int row) const { return first_visible(layer, row) / LANES * LANES; }

  // The index of the first position of a head in the slot of a row.
  std::size_t place(int layer, int row, int kv_head) const {
    std::size_t slot_row = (std::size_t(layer) * cache_.slots + slots_[row]) * w_.n_kv_head + kv_head;
    return slot_row * cache_.slot_length;
  }

  template <class Cell>
  HeadCells<Cell> keys(int layer, int row, int kv_head) const {
    std::size_t first = place(layer, row, kv_head);
    return {static_cast<const Cell*>(cache_.keys) + first * w_.head_dim,
            scales_at(cache_.key_scales, first)};
  }

  template <class Cell>
  HeadCells<Cell> values(int layer, int row, int kv_head) const {
    std::size_t first = place(layer, row, kv_head);
    return {static_cast<const Cell*>(cache_.values) + first * w_.head_dim,
            scales_at(cache_.value_scales, first)};
  }

  static const float* scales_at(const float* all, std::size_t first) {
    return all == nullptr ? nullptr : all + first;
  }

  // A row's scaled queries of one key head, in the format of the keys.
  template <class Cell>
  QueryCell<Cell>* queries(int row, int kv_head) {
    auto* all = reinterpret_cast<QueryCell<Cell>*>(queries_.data());
    return all + std::size_t(row) * heads_width_ + kv_head * group() * w_.head_dim;
  }

  int group() const { return w_.n_head / w_.n_kv_head; }

  // Write the keys and values of a span, in the order of memory.
  template <class Cell>
  void write(int layer, const Span& span) {
    for (int row = span.first; row < span.last; row++)
      for (int head = 0; head < w_.n_kv_head; head++) write<Cell>(layer, row, head);
  }

  // Write a row's new key and value of one head into the cache and prepare its queries.
  template <class Cell>
  void write(int layer, int row, int kv_head) {
    const LayerWeights& w = w_.layers[layer];
    const int width = w_.head_dim;
    float* query = qkv(row) + kv_head * group() * width;
    float* key = qkv(row) + heads_width_ + kv_head * width;
    float* value = qkv(row) + heads_width_ + kv_width_ + kv_head * width;
    if (w.value_embedding) add_value_embedding(w, row, kv_head, value);
    if (w_.qk_norm) {
      normalize(w.key_norm, key, key, width);
      for (int i = 0; i < group(); i++)
        normalize(w.query_norm, query + i * width, query + i * width, width);
    }
    if (w_.rotary) {
      std::size_t first = std::size_t(positions_[row]) * (width / 2);
      rotate(key, w_.rope_cos + first, w_.rope_sin + first, width);
      for (int i = 0; i < group(); i++)
        rotate(query + i * width, w_.rope_cos + first, w_.rope_sin + first, width);
    }
    std::size_t at = place(layer, row, kv_head) + positions_[row];
    keep<Cell>(key, width, cache_.keys, cache_.key_scales, at);
    keep<Cell>(value, width, cache_.values, cache_.value_scales, at);
    QueryCell<Cell>* scaled = queries<Cell>(row, kv_head);
    float scale = 1.0f / std::sqrt(float(width));
    for (int i = 0; i < group() * width; i += LANES) store(scaled + i, load(query + i) * scale);
  }

  // Write a row's key or value into the cache in its format.
  template <class Cell>
  static void keep(const float* from, int width, void* cells, float* scales, std::size_t at) {
    Cell* to = static_cast<Cell*>(cells) + at * width;
    if constexpr (std::is_same_v<Cell, std::int8_t>) scales[at] = put_steps(from, width, to);
    else
      for (int i = 0; i < width; i += LANES) store(to + i, load(from + i));
  }

  // Attend with one key head of the row at this index of `single_`.
  template <class Cell>
  void attend_row(int layer, int place, int kv_head) {
    const int row = single_[place];
    const bool same_row = kv_head + 1 < w_.n_kv_head, last = !same_row && place + 1 == int(single_.size());
    const int next_head = same_row ? kv_head + 1 : last ? kv_head : 0;
    const int next_row = same_row || last ? row : single_[place + 1];
    const HeadCells<Cell> own = keys<Cell>(layer, row, kv_head);
    const HeadCells<Cell> next = keys<Cell>(layer, next_row, next_head);
    float* out = heads(row) + kv_head * group() * w_.head_dim;
#if defined(TILES)
    if constexpr (std::is_same_v<Cell, Bf16>)
      if (by_tiles(layer)) {
        const NextHead next_one = {next.cells, values<Cell>(layer, next_row, next_head).cells,
                                   positions_[next_row] + 1};
        return attend_by_tiles(queries<Cell>(row, kv_head), group(), own, values<Cell>(layer, row, kv_head),
                               next_one, positions_[row] + 1, w_.head_dim, out);
      }
#endif
    const int width = w_.head_dim, first = first_computed(layer, row);
    attend<true, Cell>(queries<Cell>(row, kv_head), group(), own.from(first, width),
                       values<Cell>(layer, row, kv_head).from(first, width),
                       next.from(first_computed(layer, next_row), width).cells,
                       first_visible(layer, row) - first, positions_[row] + 1 - first, width, scores(1), out);
  }

  template <class Cell>
  void attend_span(int layer, const Span& span, int kv_head) {
#if defined(TILES)
    if constexpr (std::is_same_v<Cell, Bf16>)
      if (by_tiles(layer)) return attend_span_by_tiles(layer, span, kv_head);
#endif
    const int width = w_.head_dim, pitch = padded(int(cache_.slot_length));
    const int first = first_computed(layer, span.first);  // of all rows of the span
    static thread_local std::vector<Query<Cell>> together;
    together.clear();
    float* room = scores((span.last - span.first) * group());
    for (int row = span.first; row < span.last; row++)
      for (int i = 0; i < group(); i++, room += pitch)
        together.push_back({queries<Cell>(row, kv_head) + i * width, first_visible(layer, row) - first,
                            positions_[row] + 1 - first, room, heads(row) + (kv_head * group() + i) * width});
    attend_together(together.data(), int(together.size()),
                    keys<Cell>(layer, span.first, kv_head).from(first, width),
                    values<Cell>(layer, span.first, kv_head).from(first, width), width);
    for (std::size_t i = 0; i < together.size(); i++)
      keep_weights(layer, span.first + int(i) / group(), kv_head * group() + int(i) % group(), first,
                   together[i].scores);
  }

#if defined(TILES)
  void attend_span_by_tiles(int layer, const Span& span, int kv_head) {
    static thread_local std::vector<TileQuery> together;
    together.clear();
    for (int row = span.first; row < span.last; row++)
      for (int i = 0; i < group(); i++) {
        const int head = kv_head * group() + i;
        together.push_back({queries<Bf16>(row, kv_head) + i * w_.head_dim, positions_[row] + 1,
                            heads(row) + head * w_.head_dim, kept_weights(layer, row, head)});
      }
    attend_by_tiles(together.data(), int(together.size()), keys<Bf16>(layer, span.first, kv_head),
                    values<Bf16>(layer, span.first, kv_head), w_.head_dim);
  }
#endif

  // This thread's memory for the scores of a number of queries.
  float* scores(int queries) const {
    static thread_local Buffer<float> room;
    std::size_t wanted = std::size_t(queries) * padded(int(cache_.slot_length));
    if (room.size() < wanted) room.resize(wanted);
    return room.data();
  }

  // Record the weights of a row's head for the positions from `first` on.
  void keep_weights(int layer, int row, int head, int first, const float* weights) const {
    if (float* kept = kept_weights(layer, row, head))
      std::memcpy(kept + first, weights, sizeof(float) * (positions_[row] + 1 - first));
  }

  // The record of the attention weights of a row's head; null if they are not recorded.
  float* kept_weights(int layer, int row, int head) const {
    if (record_.weights == nullptr) return nullptr;
    int at = record_.layer_places[layer], head_at = record_.head_places[head];
    if (at < 0 || head_at < 0) return nullptr;
    std::size_t place = (std::size_t(done_ + row) * record_.layers + at) * record_.heads + head_at;
    return record_.weights + place * record_.length;
  }

  // v += 2 sigmoid(gate . the stream's leading channels) * the token's value embedding.
  void add_value_embedding(const LayerWeights& w, int row, int kv_head, float* value) {
    const int gate_width = w_.value_gate_width;
    const float open = 2.0f * gate(w.value_gate + kv_head * gate_width, h(row), gate_width);
    std::size_t first = std::size_t(tokens_[row]) * kv_width_ + kv_head * w_.head_dim;
    for (int i = 0; i < w_.head_dim; i++) value[i] += open * cell(w.value_embedding, first + i);
  }

  // sigmoid(weights . values)
  static float gate(const float* weights, const float* values, int width) {
    float steer = 0.0f;
    for (int i = 0; i < width; i++) steer += values[i] * weights[i];
    return 1.0f / (1.0f + std::exp(-steer));
  }

  ModelWeights w_;
  Cache cache_;
  int heads_width_, kv_width_, qkv_width_, up_width_;
  Buffer<float> x_, h_, qkv_;
  Buffer<std::uint8_t> queries_;
  Buffer<float> heads_, up_;
  Buffer<float> embedding_, middle_;  // of residual_mix and backout
  Converted narrow_, mixed_, wide_;
  Pool pool_;
  Clocks clocks_;
  const std::int32_t *tokens_ = nullptr, *slots_ = nullptr, *positions_ = nullptr;
  bool by_tiles_;  // attention
  int capacity_;  // rows
  int count_ = 0;
  int done_ = 0;  // earlier rows of the prompts
  Record record_{};
  std::vector<int> single_;  // rows
  std::vector<Span> written_, spans_, tile_spans_;  // rows of sequences with several
};

}  // namespace logitd
