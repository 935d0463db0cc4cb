"""Replies that are arrays: /logits, /probs, /score, /hidden_states, /attention."""
