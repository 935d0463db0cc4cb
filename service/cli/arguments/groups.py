"""Groups: how the flags of a command are arranged in its help, and examples of it.

A group goes from the field that is named here to that of the next.
"""

from collections.abc import Mapping

COMPUTED = "how it is computed"
GROUPS: Mapping[str, Mapping[str, str]] = {
    "serve": {
        "checkpoint": "what is served",
        "follow": "when a newer checkpoint is served",
        "host": "where",
        "device": COMPUTED,
        "slots": "the engine",
        "max_queue": "limits of requests",
        "max_connections": "limits of connections",
        "stall_timeout": "its end",
        "api_keys": "who may ask",
        "log_level": "its log and traces",
    },
    "train": {
        "preset": "what is learned",
        "out": "the run",
        "device": COMPUTED,
        "log_every": "reports and samples",
        "exportable": "the model's shape; if not given, the preset's",
        "dropout": "the recipe; if not given, the preset's",
        "tokenizer": "the vocabulary",
        "eval_every": "evaluations and checkpoints",
    },
    "eval": {"checkpoint": "what is measured", "device": COMPUTED, "as_json": "what is printed"},
    "merge": {"base": "what is merged"},
    "generate": {"prompt": "what is generated", "device": COMPUTED},
    "extract": {
        "checkpoint": "from what, to where",
        "logprobs": "which values",
        "stride": "how a text is cut",
        "device": COMPUTED,
    },
    "inspect": {"paths": "what is shown"},
    "import": {
        "source": "from where, to where",
        "tokenizer": "the vocabulary and what is stored",
        "code": "what settles a model of any code",
        "n_head": "answers to what its tensors do not say",
    },
    "export": {"checkpoint": "from where, to what"},
    "health": {"url": "which server", "live": "what is asked"},
    "bench": {"checkpoint": "what is measured", "device": COMPUTED, "batches": "under which load"},
}

EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "serve": (
        ("logitd serve", "the bundled checkpoint"),
        ("logitd serve runs/mine --port 9000", "the best checkpoint of a run"),
        ("logitd serve checkpoints/mine --quantize int4", "in 4 bits, which costs what it says"),
        ("logitd serve small=runs/a large=runs/b", "two, of which requests name one"),
    ),
    "train": (
        ("logitd train --minutes 2 --out runs/mine", "on the text that Python carries"),
        ("logitd train --data my-texts/ --preset tiny --out runs/mine", ""),
        ("logitd train --resume --out runs/mine", "after Ctrl-C"),
        ("logitd train --from checkpoints/python-small --data my-texts/ --out runs/tuned", ""),
    ),
    "eval": (("logitd eval runs/mine/best --data my-texts/", ""),),
    "merge": (("logitd merge checkpoints/python-small runs/adapted/best checkpoints/merged", ""),),
    "generate": (("logitd generate 'def read(' --checkpoint runs/mine/best --seed 7", ""),),
    "extract": (
        ("logitd extract checkpoints/python-small --data my-texts/ --out scored --logprobs", ""),
    ),
    "inspect": (("logitd inspect runs/mine runs/other", "beside each other"),),
    "import": (
        ("logitd import out/ckpt.pt checkpoints/mine --tokenizer gpt2", ""),
        ("logitd import model.pt checkpoints/mine --check text.txt", ""),
    ),
    "export": (("logitd export runs/mine/best mine.gguf --to gguf", ""),),
    "bench": (("logitd bench --batches 1,16", ""),),
    "health": (("logitd health --port 9000", ""), ("logitd health https://gpt.example", "")),
}
"""What can be pasted, and what it does where that is not plain."""
