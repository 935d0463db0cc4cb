// From logits to the sampled distribution, like the server: temperature, top-k, top-p, min-p, in this
// order and in double precision.

export function softmax(logits) {
  let largest = -Infinity;
  for (const logit of logits) if (logit > largest) largest = logit;
  const probs = Float64Array.from(logits, (logit) => Math.exp(logit - largest));
  const sum = probs.reduce((total, prob) => total + prob, 0);
  return probs.map((prob) => prob / sum);
}

// Ids, likeliest first; ties in the order of ids.
export const ranked = (values) =>
  Uint32Array.from(values.keys()).sort((a, b) => values[b] - values[a] || a - b);

// The sampled probabilities; dropped tokens have 0.
export function processed(logits, { temperature, top_k, top_p, min_p }) {
  const order = ranked(logits);
  if (temperature === 0) return Float64Array.from(logits, (_, id) => (id === order[0] ? 1 : 0));
  const scaled = Float64Array.from(logits, (logit) => logit / temperature);
  if (top_k > 0 && top_k < scaled.length) {
    const smallest = scaled[order[top_k - 1]];
    for (const [id, logit] of scaled.entries()) if (logit < smallest) scaled[id] = -Infinity;
  }
  if (top_p < 1) {
    const probs = softmax(scaled);
    let before = 0;
    for (const id of order) {
      if (before >= top_p) scaled[id] = -Infinity;
      before += probs[id];
    }
  }
  const probs = softmax(scaled);
  if (min_p > 0) {
    const floor = min_p * probs[order[0]];
    const kept = Float64Array.from(scaled, (logit, id) => (probs[id] < floor ? -Infinity : logit));
    return softmax(kept);
  }
  return probs;
}

// A random seed that JavaScript's numbers represent exactly.
export const drawSeed = () => Math.floor(Math.random() * 2 ** 32);

// Surprise of a token, in bits.
export const surprise = (logprob) => -logprob / Math.LN2;

export function entropyBits(probs) {
  let sum = 0;
  for (const prob of probs) if (prob > 0) sum -= prob * Math.log2(prob);
  return sum;
}

// Kullback-Leibler divergence of `own` from `other`, in bits.
export function divergenceBits(own, other) {
  let sum = 0;
  for (const [id, prob] of own.entries()) if (prob > 0) sum += prob * Math.log2(prob / other[id]);
  return sum;
}
