"""`logitd import`: a model trained elsewhere as a checkpoint."""

import sys

from model.checkpoint.checkpoint import CheckpointError
from model.convert.foreign import ConvertError
from model.convert.importing import import_model
from service.settings.tools import ImportSettings


def run(settings: ImportSettings) -> int:
    try:
        checkpoint = import_model(
            settings.source,
            settings.destination,
            tokenizer=settings.tokenizer,
            dtype=settings.dtype,
            context_length=settings.context_length,
            skip_normalizer=settings.skip_normalizer,
            unused_rows=settings.unused_rows,
            log=print,
        )
    except (ConvertError, CheckpointError, OSError) as error:
        print(f"logitd import: {error}", file=sys.stderr)
        return 1
    config = checkpoint.config
    print(
        f"{checkpoint.path}: {config.n_layer} layers, width {config.d_model}, context "
        f"{config.context_length:,}, vocabulary {config.vocab_size:,}"
    )
    print(f"\nserve it:  logitd serve --checkpoint {checkpoint.path}")
    return 0
