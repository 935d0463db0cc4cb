"""Replies that carry numbers: what /logits, /probs, /score, /hidden_states and /attention share."""
