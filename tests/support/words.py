"""Chinese text of real words, and a vocabulary laid out like WoBERT's."""

import random
import re
from collections import Counter
from collections.abc import Iterable

import rjieba

from tests.support import bert_vocabulary

_TEXT = """
我们 今天 天气 非常 研究 生命 起源 中国 人民 银行 训练 数据 模型 语言 学习 机器
城市 交通 经济 发展 历史 文化 音乐 电影 学校 老师 学生 医院 医生 病人 治疗 药物
实验 结果 方法 问题 解决 政府 政策 法律 社会 环境 保护 能源 技术 公司 市场 价格
增长 投资 国家 世界 比赛 球队 冠军 训练营 互联网 计算机 人工智能 新闻 记者 报道
时间 地点 开始 结束 认为 表示 可以 需要 已经 正在 通过 关于 以及 因此 但是 如果
虽然 的 了 在 是 和 有 不 也 就 都 把 被 对 从 到
"""
_WORDS = _TEXT.split()


def texts(count: int, seed: int = 0) -> list[str]:
    """Rows of words with the punctuation, Latin words and numbers that Chinese text has."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        parts = rng.choices(_WORDS, k=rng.randint(5, 60))
        for _ in range(len(parts) // 6):
            parts[rng.randrange(len(parts))] = rng.choice(
                ["，", "。", "3.5%", "GPT-4", " Linux ", "2024年"]
            )
        found.append("".join(parts))
    return found


def rows(of: Iterable[str], *, words: int = 400) -> list[str]:
    """Pieces by id: those of BERT, and the commonest words of several characters, as jieba cuts."""
    of = list(of)
    counts = Counter(word for text in of for word in rjieba.cut(text.lower(), hmm=False))
    long = [word for word, _ in counts.most_common() if re.fullmatch(r"[\u4e00-\u9fff]{2,}", word)]
    return list(dict.fromkeys([*bert_vocabulary.rows(of), *long[:words]]))
