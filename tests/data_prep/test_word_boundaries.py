"""Word starts: by hand in Chinese, English and mixed text; against jieba on the text itself."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import rjieba

from data_prep import word_boundaries
from data_prep.config import CleanConfig
from data_prep.word_boundaries import HAN, JIEBA, Words, read_words, word_starts, word_starts_of
from pipeline.errors import DataError
from pipeline.tokenizer.sentencepiece import Tokenizer, train

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


def _words(tokenizer: Tokenizer, text: str, words: Words = JIEBA) -> list[str]:
    ids = np.array(tokenizer.encode(text), dtype=np.uint16)
    bounds = [*np.flatnonzero(word_starts(tokenizer, ids, words)).tolist(), len(ids)]
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


def test_chinese_and_english_by_hand(tokenizer: Tokenizer) -> None:
    assert _words(tokenizer, "他 喜欢 the 模型。") == ["他", " ", "喜欢", " the", " ", "模型", "。"]
    ids = np.array(tokenizer.encode('The "unseen" words, (quoted) 1234 3.5%'), dtype=np.uint16)
    np.testing.assert_array_equal(word_starts(tokenizer, ids), tokenizer.word_starts(ids))


def test_letters_without_a_piece_are_parts_of_words(tokenizer: Tokenizer) -> None:
    """Their bytes are tokens; by hand, and with text that the rules change."""
    text = "the naïve Dvořák: Привет, мир! 😀नमस्ते 模型龘 the-ß"
    words = ["the", " naïve", " Dvořák", ":", " Привет", ",", " мир", "!", " ", "😀", "नमस्ते", " ",
             "模型", "龘", " the", "-", "ß"]  # fmt: skip
    assert _words(tokenizer, text) == words
    assert _words(tokenizer, text.replace("ï", "i\u0308").replace("!", "！")) == words
    ids, spelling = tokenizer.spell(text)
    assert spelling is not tokenizer
    np.testing.assert_array_equal(spelling.word_starts(ids), tokenizer.word_starts(ids))
    assert tokenizer.is_byte[ids].mean() > 0.5


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


def _jieba_words(text: str) -> list[str]:
    """Cuts where `words` has a word begin at a Chinese character."""
    han, begins = word_boundaries._chinese(text, rjieba.cut)
    bounds = [0, *(np.flatnonzero(han & begins).tolist()), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(dict.fromkeys(bounds))]


def test_mixed_words_by_hand() -> None:
    # Words of jieba's dictionary that have both scripts stay whole, in any company.
    assert _jieba_words("他在卡拉OK唱歌，穿T恤。") == ["他", "在", "卡拉OK", "唱歌，", "穿T恤。"]
    assert _jieba_words("GPT-4的训练数据 is large") == ["GPT-4", "的", "训练", "数据 is large"]
    assert _jieba_words("3.5%的增长\n中国人民银行") == ["3.5%", "的", "增长\n", "中国人民银行"]
    assert _jieba_words("we read 研究生命的起源 today") == ["we read ", "研究", "生命", "的",
                                                            "起源 today"]  # fmt: skip


@pytest.mark.parametrize("chunk", [1 << 20, 7])
def test_words_depend_on_chinese_runs_only(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """All of Unicode around Chinese: the words in Chinese are those of the whole text."""
    monkeypatch.setattr(word_boundaries, "_CHUNK", chunk)
    rng = random.Random(2)
    other = [chr(c) for c in range(0x30000) if not 0xD800 <= c < 0xE000]
    joined = "abcTOK0123456789+#&._%-"
    chinese = "今天天气很好我们在北京大学学习计算机卡拉恤打印的是和一二三"
    for _ in range(4000):
        pools = (other, joined, chinese, chinese, " ，。\n")
        text = "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 40)))
        begins = {0, *itertools.accumulate(map(len, rjieba.cut(text)))}
        han, found = word_boundaries._chinese(text, rjieba.cut)
        for i, character in enumerate(text):
            assert han[i] == any(a <= ord(character) <= b for a, b in HAN)
            if han[i]:
                assert found[i] == (i in begins), (text, i)


def test_several_documents_are_as_each_alone(tokenizer: Tokenizer) -> None:
    texts = ["我们在北京大学", "学习 the model.", "", "龘", "计算机", "english only", "龘靐 rare"]
    spelt = [tokenizer.spell(text) for text in texts]
    documents = [(spelling, ids.astype(np.uint16)) for ids, spelling in spelt]
    alone = [word_starts(spelling, ids) for spelling, ids in documents]
    np.testing.assert_array_equal(word_starts_of(documents), np.concatenate(alone))


def test_spelling_is_that_of_encode(tokenizer: Tokenizer) -> None:
    """With text that the rules of normalisation leave alone, and text that they do not."""
    rng = random.Random(3)
    pool = [*"今天天气很好我们the model.", "\n", "\n\n", " ", "  ", "龘", "😀", "é"]
    rules = ["e\u0301", "①", "Ａ", "\u3000", "\t", "\u200b", "ﬁ", "…", "\u1100\u1161", "\u2581"]
    fast = 0
    for i in range(2000):
        chosen = pool if i % 2 else pool + rules
        text = "".join(rng.choice(chosen) for _ in range(rng.randint(0, 30)))
        ids, spelling = tokenizer.spell(text)
        assert ids.tolist() == tokenizer.encode(text), ascii(text)
        expected_text, expected_offsets = tokenizer.surface(ids)
        found_text, found_offsets = spelling.surface(ids)
        assert found_text == expected_text
        np.testing.assert_array_equal(found_offsets, expected_offsets)
        fast += spelling is not tokenizer
    assert 1000 <= fast < 1900  # both ways were taken


_TERMS = ["小细胞肺癌", "阿司匹林肠溶片", "1抑制剂"]  # the tokenizer parts Latin letters
_MEDICAL = "患者被诊断为小细胞肺癌,每天服用阿司匹林肠溶片,随后使用PD-1抑制剂治疗。"


def test_words_of_a_dictionary_are_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "terms.txt"
    path.write_text(
        "# medicine\n小细胞肺癌\n\n阿司匹林肠溶片 3\nＰＤ－１抑制剂\n", encoding="utf-8"
    )
    words = read_words(path, CleanConfig())
    assert words.entries == (("小细胞肺癌", None), ("阿司匹林肠溶片", 3), ("PD-1抑制剂", None))

    assert set(_TERMS).isdisjoint(_words(tokenizer, _MEDICAL))
    assert set(_TERMS) <= set(_words(tokenizer, _MEDICAL, words))
    assert set(_TERMS).isdisjoint(_words(tokenizer, _MEDICAL))  # others' words are as before
    path.write_text(path.read_text(encoding="utf-8") + "肺癌 9\n", encoding="utf-8")
    assert read_words(path, CleanConfig()) != words


@pytest.mark.parametrize(("content", "named"), [
    ("肺癌\nlung\n", "line 2: 'lung'"), ("肺,癌\n", "line 1"), ("肺癌 many\n", "line 1"),
    ("肺癌 1 n\n", "line 1"), ("肺癌 0\n", "line 1"), (f"肺癌 1{'0' * 18}\n", "line 1"),
    ("肺癌\n".encode("gb18030"), "cannot be read"),
    (None, "cannot be read"),
])  # fmt: skip
def test_no_dictionary_is_refused(tmp_path: Path, content: str | bytes | None, named: str) -> None:
    path = tmp_path / "terms.txt"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=f"words.dictionary = .*terms.txt.*{named}"):
        read_words(path, CleanConfig())
