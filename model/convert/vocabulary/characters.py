"""Character vocabularies, as nanoGPT's `meta.pkl` has them, as tokenizers of this project.

The id of a character is the source's, unchanged: the pattern cuts a text into characters, and a
piece that is a token as a whole is never merged, so a character of several bytes needs no steps
between. tiktoken needs all 256 bytes; those that are not characters of the vocabulary get the ranks
after the last id (see `Tokenizer`): they are never sampled, and a text that needs one is rejected.
What is longer than a character, `<pad>` or a flag of two, is a special token: `for c in text` never
gives one either.
"""

from collections.abc import Mapping

from logitd.model.convert.vocabulary.special import end_name, special_names
from logitd.model.text.tokenizer import Tokenizer

CHARACTER_PATTERN = r"[\s\S]"
"""Every character by itself, line breaks too."""


def character_tokenizer(texts: Mapping[int, str]) -> Tokenizer:
    """A tokenizer with these ids; ids between them without a text become special tokens."""
    size = max(texts) + 1
    names = {token_id: text for token_id, text in texts.items() if len(text) > 1}
    special = special_names(names, texts)
    ranks = {text.encode(): token_id for token_id, text in texts.items() if len(text) == 1}
    missing = [byte for byte in map(bytes, zip(range(256))) if byte not in ranks]
    ranks |= {byte: size + index for index, byte in enumerate(missing)}
    return Tokenizer(
        ranks=ranks,
        pattern=CHARACTER_PATTERN,
        special_tokens=special,
        vocab_size=size,
        end_of_text_name=end_name(special),
    )
