"""Owners' files: classes, configurations and scripts that build a model, as people write them.

Together they cover every way of passing its sizes to a model. All of them build the model of the
scheme "book" from the classes in `PARTS`. This module does not run them.
"""

PARTS = """
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.W_query = nn.Linear(width, width, bias=False)
        self.W_key = nn.Linear(width, width, bias=False)
        self.W_value = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(length, length).triu(1))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            f(x).view(B, T, self.heads, -1).transpose(1, 2)
            for f in (self.W_query, self.W_key, self.W_value)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(C // self.heads)
        if CAUSAL:
            scores = scores.masked_fill(self.mask[:T, :T].bool(), -torch.inf)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.scale, self.shift)


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        return self.layers(x)


class Block(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.att, self.ff = Attention(width, heads, length), FeedForward(width)
        self.norm1, self.norm2 = Norm(width), Norm(width)

    def forward(self, x):
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))


class Base(nn.Module):
    def build(self, vocab, length, width, heads, layers):
        self.tok_emb, self.pos_emb = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.trf_blocks = nn.Sequential(*[Block(width, heads, length) for _ in range(layers)])
        self.final_norm = Norm(width)
        self.out_head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(ids.shape[1]))
        return self.out_head(self.final_norm(self.trf_blocks(x)))


CAUSAL = True
"""
"""Source code of the model of the scheme "book" and of its layers. The files below use it."""

BY_NAMES = """
class GPT(Base):
    def __init__(self, vocab_size, block_size, n_embd, n_head=4, n_layer=2, dropout=0.5):
        super().__init__()
        assert dropout == 0.0, "evaluation"
        self.build(vocab_size, block_size, n_embd, n_head, n_layer)
"""

DATACLASS = """
from dataclasses import dataclass


@dataclass
class GPTConfig:
    vocab_size: int = 50_000
    max_seq_len: int = 1024
    hidden_size: int = 768
    num_attention_heads: int = 4
    num_hidden_layers: int = 12


class GPT(Base):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.build(config.vocab_size, config.max_seq_len, config.hidden_size,
                   config.num_attention_heads, config.num_hidden_layers)
"""

DICTIONARY = """
class GPT(Base):
    def __init__(self, cfg):
        super().__init__()
        self.build(cfg["vocab_size"], cfg["context_length"], cfg["emb_dim"], cfg["n_heads"],
                   cfg["n_layers"])
"""

ATTRIBUTES = """
class Config:
    d_model = 768
    n_heads = 12

    def __init__(self, vocab_size, max_len=512, num_layers=12):
        self.vocab_size, self.max_len, self.num_layers = vocab_size, max_len, num_layers


class GPT(Base):
    def __init__(self, args):
        super().__init__()
        self.build(args.vocab_size, args.max_len, args.d_model, args.n_heads, args.num_layers)
"""

FLAGS = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--vocab-size", type=int, default=50_000)
parser.add_argument("--block_size", type=int, default=1024)
parser.add_argument("--n_embd", type=int, required=False, default=768)
parser.add_argument("--n_head", type=int, default=4)
parser.add_argument("--n_layer", type=int, default=12)
args = parser.parse_args()


class GPT(Base):
    def __init__(self):
        super().__init__()
        self.build(args.vocab_size, args.block_size, args.n_embd, args.n_head, args.n_layer)
"""

SCRIPT = """
batch_size = 64
block_size = 16
n_embd = 32
n_head = 4
n_layer = 2
device = "cuda" if torch.cuda.is_available() else "cpu"

with open("input-that-is-gone.txt") as f:
    text = f.read()
chars = sorted(set(text))
vocab_size = len(chars)
stoi = {c: i for i, c in enumerate(chars)}
encode = lambda s: [stoi[c] for c in s]
data = torch.tensor(encode(text))


class GPT(Base):
    def __init__(self):
        super().__init__()
        self.build(vocab_size, block_size, n_embd, n_head, n_layer)


model = GPT().to(device)
open("training-has-begun", "w").write("x")
for step in range(10):
    open("training-has-begun", "w").write("x")
    model(data[:4])
torch.save(model.state_dict(), "overwritten.pt")
if __name__ == "__main__":
    open("training-has-begun", "w").write("x")
"""

STALE_SCRIPT = """
block_size, n_layer = 256, 6
n_embd = 384
n_head = 4
vocab_size = 65


class GPT(Base):
    def __init__(self):
        super().__init__()
        self.build(vocab_size, block_size, n_embd, n_head, n_layer)
"""
