"""Small byte-level BPEs laid out like published ones."""

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

KINDS = ("roberta", "modernbert", "split", "lower")
_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"


def write(path: Path, kind: str, texts: list[str], size: int = 1000) -> Path:
    """Train one on texts and write its tokenizer.json.

    roberta: specials first, in <>. modernbert: NFC, runs of spaces and unused tokens that are
    added, specials in [] after the others. split: words by another pattern, no unknown token.
    lower: lower case, and a space before the text.
    """
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "lower")
    made.decoder = decoders.ByteLevel()
    ours = ["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)]
    specials = ours if kind == "roberta" else []
    if kind == "modernbert":
        made.normalizer = normalizers.NFC()
    elif kind == "lower":
        made.normalizer = normalizers.Lowercase()
    elif kind == "split":
        made.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials, show_progress=False,
                                  initial_alphabet=alphabet)  # fmt: skip
    made.train_from_iterator(texts, trainer)
    if kind != "roberta":
        names = ["[CLS]", "[SEP]", "[PAD]", AddedToken("[MASK]", lstrip=True)]
        made.add_special_tokens([*names, *["[UNK]"] * (kind != "split")])
    if kind == "modernbert":
        blanks = [AddedToken(" " * count, normalized=True) for count in (4, 3, 2)]
        made.add_tokens([*blanks, AddedToken("[unused0]", normalized=True)])
    made.save(str(path))
    return path
