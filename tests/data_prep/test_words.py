"""Word starts: by hand in Chinese, English and mixed text; against jieba on the text itself."""

import itertools
import random

import numpy as np
import pytest
import rjieba

from data_prep.words import word_starts
from pipeline.data.tokenizer import Tokenizer, train

CHINESE = (
    "今天 天气 很 好 我们 在 北京 大学 学习 计算机 他 喜欢 喝 咖啡 模型 训练 数据 语言 的 是 和"
)
ENGLISH = "the model reads a sentence and learns language from data every day"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Made-up Chinese and English: common words in random order."""
    rng = random.Random(0)
    lines = ["".join(rng.choices(CHINESE.split(), k=12)) + "。" for _ in range(2000)]
    lines += [" ".join(rng.choices(ENGLISH.split(), k=10)) + "." for _ in range(2000)]
    path = tmp_path_factory.mktemp("words") / "tokenizer.model"
    model = train(iter(lines), vocab_size=420, model_type="unigram", character_coverage=0.9995)
    path.write_bytes(model)
    return Tokenizer(path)


def _words(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = np.array(tokenizer.encode(text), dtype=np.uint16)
    bounds = [*np.flatnonzero(word_starts(tokenizer, ids)).tolist(), len(ids)]
    surface, offsets = tokenizer.surface(ids)
    places = [*offsets.tolist(), len(surface)]
    return [surface[places[a] : places[b]] for a, b in itertools.pairwise(bounds)]


def test_surface_is_the_normalised_text(tokenizer: Tokenizer) -> None:
    for text in ("the model 模型, 𠀀 and 😀!", "龘靐齉 rare", "", "ｆｕｌｌ width"):
        ids = np.array(tokenizer.encode(text), dtype=np.uint16)
        surface, offsets = tokenizer.surface(ids)
        assert surface == tokenizer.decode(ids.tolist())
        whole = ~tokenizer.continues(ids)
        for token, offset in zip(ids[whole].tolist(), offsets[whole].tolist(), strict=True):
            piece = tokenizer.piece(token)
            assert surface.startswith(piece, offset) or piece.startswith("<0x")


def test_chinese_by_hand(tokenizer: Tokenizer) -> None:
    found = _words(tokenizer, "我们在北京大学学习计算机")
    # A token may hold several words; a word may not be cut where a token starts inside it.
    assert "".join(found) == "我们在北京大学学习计算机"
    assert "北京大学" in found
    assert "计算机" in found
    assert _words(tokenizer, "他 喜欢 the 模型。") == ["他", " ", "喜欢", " the", " ", "模型", "。"]


def test_english_is_as_the_tokenizer_has_it(tokenizer: Tokenizer) -> None:
    ids = np.array(tokenizer.encode('The "unseen" words, (quoted) 1234 3.5%'), dtype=np.uint16)
    np.testing.assert_array_equal(word_starts(tokenizer, ids), tokenizer.word_starts(ids))


def test_rare_characters_in_bytes_are_whole(tokenizer: Tokenizer) -> None:
    ids = np.array(tokenizer.encode("龘的训练"), dtype=np.uint16)
    starts = word_starts(tokenizer, ids)
    assert len(ids) > 4  # the first character is spelt in bytes
    assert not starts[1:3].any()
    assert "训练" in _words(tokenizer, "龘的训练")


def test_random_text_against_jieba_on_the_text_itself(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    pool = "今天天气很好我们在北京大学学习计算机他喜欢喝咖啡模型训练数据语言的是和龘 the model."
    for _ in range(300):
        text = " ".join("".join(rng.choices(pool, k=rng.randint(1, 40))).split())
        ids = np.array(tokenizer.encode(text), dtype=np.uint16)
        surface, offsets = tokenizer.surface(ids)
        begins = {0, *itertools.accumulate(len(word) for word in rjieba.cut(surface))}
        starts = word_starts(tokenizer, ids)
        for i, offset in enumerate(offsets.tolist()):
            if offset < len(surface) and "\u4e00" <= surface[offset] <= "\u9fff":
                first_byte = not tokenizer.continues(ids[i : i + 1])[0]
                assert starts[i] == (first_byte and offset in begins), (text, i)
