"""Published vocabulary: a vocabulary for training that is not learned from the text."""

from pathlib import Path

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.hf.tokenizer import read_tokenizer
from logitd.model.data.errors import DataError
from logitd.model.data.vocabulary import require_end_of_text
from logitd.model.text.published import published_tokenizer
from logitd.model.text.tokenizer import Tokenizer, TokenizerError


def published_vocabulary(name: str) -> Tokenizer:
    """Read a published encoding by name, or a ranks file or a `tokenizer.json` of Hugging Face's
    tokenizers by path. Raises DataError."""
    try:
        if Path(name).suffix == ".json" and Path(name).is_file():
            # Gaps between its ids are closed, because no weights depend on them yet.
            tokenizer = read_tokenizer(Path(name), skip_normalizer=False).tokenizer
        else:
            tokenizer = published_tokenizer(name)
    except TokenizerError as error:
        raise DataError(str(error)) from error
    except ConvertError as error:  # it may name flags of `logitd import`
        raise DataError(
            f"the tokenizer {name} cannot be used here, as `logitd import` says: {error}"
        ) from error
    require_end_of_text(tokenizer, f"the tokenizer {name}")
    return tokenizer
