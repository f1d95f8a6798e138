"""Scores against scikit-learn, scipy and seqeval, and against results worked out by hand."""

import math
import random

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import sklearn.metrics

from pipeline.errors import DataError
from pipeline.tasks import scores as metrics
from pipeline.tasks.kinds import answer, choice
from pipeline.tasks.kinds.table import KINDS
from pipeline.tasks.types import Span


def _scores(kind: str, golds: list, predictions: list, **options: object) -> dict[str, float]:
    every = KINDS[kind].score(golds, predictions, **options)  # type: ignore[arg-type]
    return {name: table.score for name, table in every.items()}


def _random_labels(seed: int, num_classes: int, num_rows: int) -> tuple[list[str], list[str]]:
    rng = random.Random(seed)
    names = [f"c{i}" for i in range(num_classes)]
    golds = [rng.choice(names[: num_classes - seed % 2]) for _ in range(num_rows)]
    return golds, [rng.choice([*names, gold, gold]) for gold in golds]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_classes", [2, 3, 20])
def test_classes_agree_with_scikit_learn(seed: int, num_classes: int) -> None:
    golds, predictions = _random_labels(seed, num_classes, 40)
    labels = [f"c{i}" for i in range(num_classes)]
    scores = _scores("classify", golds, predictions, labels=labels)
    assert scores["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(golds, predictions))
    macro = sklearn.metrics.f1_score(golds, predictions, average="macro", zero_division=0)
    assert scores["macro_f1"] == pytest.approx(macro)
    matthews = sklearn.metrics.matthews_corrcoef(golds, predictions)
    assert scores["matthews"] == pytest.approx(matthews)
    if num_classes == 2:
        f1 = sklearn.metrics.f1_score(golds, predictions, pos_label="c1", zero_division=0)
        assert scores["f1"] == pytest.approx(f1)


@pytest.mark.parametrize("gold", ["0", "1"])
def test_constant_predictions_have_no_correlation(gold: str) -> None:
    scores = _scores("pair", ["0", "1", gold], ["1", "1", "1"], labels=["0", "1"])
    assert scores["matthews"] == 0
    assert _scores("regress", [1, 2, 3], [0.1, 0.1, 0.1]) == {"pearson": 0, "spearman": 0}
    assert _scores("spans", [[]], [[]]) == {"f1": 0, "macro_f1": 0}
    assert _scores("pair", ["0"] * 3, ["0"] * 3, labels=["0", "1"]) == {
        "accuracy": 1.0, "f1": 0.0, "macro_f1": 1.0, "matthews": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_correlations_agree_with_scipy_with_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    golds = rng.integers(0, 2 if seed % 2 else 6, 50).astype(float)
    predictions = np.round(golds + rng.normal(size=50), 1) + 1e6 * (seed == 4)
    assert np.array_equal(metrics.ranks(predictions), scipy.stats.rankdata(predictions))
    scores = _scores("regress", list(golds), list(predictions))
    expected = scipy.stats.pearsonr(golds, predictions).statistic
    assert scores["pearson"] == pytest.approx(expected, abs=1e-9)
    expected = scipy.stats.spearmanr(golds, predictions).statistic
    assert scores["spearman"] == pytest.approx(expected, abs=1e-12)


def test_multilabel_agrees_with_scikit_learn() -> None:
    golds = [["a", "b"], [], ["c"], ["a"]]
    predictions = [["a"], [], ["b", "c"], ["a"]]
    names = ["a", "b", "c"]
    matrix = [[[int(n in row) for n in names] for row in rows] for rows in (golds, predictions)]
    scores = _scores("multilabel", golds, predictions, labels=names)
    for name, average in (("f1", "micro"), ("macro_f1", "macro")):
        f1 = sklearn.metrics.f1_score(*matrix, average=average, zero_division=0)
        assert scores[name] == pytest.approx(f1)
    assert scores["accuracy"] == 0.5


# Entities


@pytest.mark.parametrize(("tags", "spans"), [
    ("B-A M-A E-A S-B", [("A", 0, 3), ("B", 3, 4)]),
    ("O M-ORG M-ORG E-ORG", [("ORG", 1, 4)]),  # as twice in Resume NER
])  # fmt: skip
def test_bmes_is_decoded_as_conlleval_does(tags: str, spans: list[tuple[str, int, int]]) -> None:
    assert metrics.decode_tags(tags.split()) == spans


def test_tags_agree_with_seqeval() -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    rng = random.Random(1)
    names = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in "XY")]
    rows = [[[rng.choice(names) for _ in range(9)] for _ in range(60)] for _ in range(2)]
    spans = [[metrics.decode_tags(tags) for tags in side] for side in rows]
    scores = _scores("tag", *spans)
    assert scores["f1"] == pytest.approx(seqeval.f1_score(*rows))
    assert scores["macro_f1"] == pytest.approx(seqeval.f1_score(*rows, average="macro"))
    for tags, ours in zip(rows[0], spans[0], strict=True):
        expected = seqeval.sequence_labeling.get_entities(tags)
        assert ours == [(kind, start, last + 1) for kind, start, last in expected]


@pytest.mark.parametrize("scheme", ["bio", "bioes"])
def test_entities_survive_tags(scheme: str) -> None:
    spans = [Span("A", 0, 1), Span("B", 1, 4), Span("B", 4, 6)]
    tags = metrics.encode_tags(spans, 7, scheme)
    assert tags is not None
    assert metrics.decode_tags(tags) == spans
    assert metrics.encode_tags([*spans, Span("A", 2, 3)], 7, scheme) is None, (
        "flat tags cannot nest"
    )


# Answers


@pytest.mark.parametrize(("answers", "prediction", "em", "f1"), [
    (["The Cat."], "cat", 1, 1), (["a black cat", "cat"], "black cat", 1, 1),
    (["black cat"], "cat cat", 0, 2 * 1 / 4), ([], "", 1, 1), ([], "cat", 0, 0),
    (["cat"], "", 0, 0), (["the"], "", 1, 1), (["the", "cat"], "", 0, 0),
])  # fmt: skip
def test_squad_rules(answers: list[str], prediction: str, em: float, f1: float) -> None:
    assert answer.squad_scores(answers, prediction) == (em, pytest.approx(f1))
    assert answer.squad_words("An apple, the U.S. pear's") == ["apple", "us", "pears"]


def test_macro_f1_of_several_labels_is_over_all_of_them() -> None:
    """Absent labels count as 0, as where scikit-learn gets an indicator matrix."""
    rng, labels = random.Random(3), ("a", "b", "c", "d", "e")
    for _ in range(20):
        golds, predictions = (
            [tuple(sorted(rng.sample(labels[:3], rng.randrange(3)))) for _ in range(9)]
            for _ in range(2)
        )
        matrices = [
            [[name in row for name in labels] for row in rows] for rows in (golds, predictions)
        ]
        found = KINDS["multilabel"].tables(golds, predictions, labels, "")
        for name, average in (("macro_f1", "macro"), ("f1", "micro")):
            theirs = sklearn.metrics.f1_score(*matrices, average=average, zero_division=0)
            assert found[name].score == pytest.approx(theirs)


@pytest.mark.parametrize(("answers", "prediction", "em", "f1"), [
    (["《红楼梦》"], "红楼梦", 1, 1),
    (["1998年"], "1998 年", 0, 1),
    (["北京大学"], "北京的大学", 0, 2 * 2 / (4 + 5)),  # the longest run, not the bag
    (["大学", "北京大学"], "北京", 0, 2 * 2 / (4 + 2)),
    (["北京"], "", 0, 0),
    (["。"], "，", 1, 0),  # nothing is left of either
    ([], "", 1, 1), ([], "北京", 0, 0),  # no answer is right where there is none, as by SQuAD's
    (["a.b"], "a。b", 0, 0),  # a full stop in ASCII stays
    (["BERT模型"], "bert模型", 1, 1),
])  # fmt: skip
def test_cmrc_rules(answers: list[str], prediction: str, em: float, f1: float) -> None:
    assert answer.cmrc_scores(answers, prediction) == (em, pytest.approx(f1))


def test_cmrc_segments_and_averages() -> None:
    assert answer.cmrc_segments("用了U.S. 的3,000个(约)，don't") == [
        "用", "了", "u.s", ".", "的", "3,000", "个", "(", "约", ")", "do", "n't",
    ]  # fmt: skip
    assert _scores("qa", [["北京"], ["大学"]], ["北京", "x"], scorer="cmrc") == {
        "em": 0.5,
        "f1": 0.5,
    }


@pytest.mark.parametrize(("run", "words"), [
    ("hello, world.", "hello , world ."), ("3,000 km, 12.30", "3,000 km , 12.30"),
    ("it's we've o'neil", "it 's we 've o'neil"), ('n","n" ("x")', "n '' , '' n '' ( `` x '' )"),
    ("50%...c. 2000–01", "50 % ... c. 2000 – 01"),
    # A full stop before what closes.
    ('he said "yes."', "he said `` yes . ''"), ("(see u.s.)", "( see u.s . )"),
    ('"a."', "`` a . ''"), ("[\"a.'\"]", "[ `` a . ' '' ]"), ('wait..."', "wait ... ''"),
    ("a..", "a .."), ('a.b."', "a.b . ''"), ('9." ', "9 . ''"), ('is."?', "is. '' ?"),
    ('don\'t."', "do n't . ''"), ('".', "`` ."), ("a ―b", "a ― b"), ("»a.»", "» a . »"),
])  # fmt: skip
def test_words_are_those_of_nltk(run: str, words: str) -> None:
    # As NLTKWordTokenizer of nltk 3.10 splits them.
    assert answer.cmrc_segments(run) == words.split()


def _published_segments(text: str) -> list[str]:
    """CMRC 2018: Chinese characters alone, the words of what lies between; without its signs.

    Of words in quotes and brackets: a mark that opens or closes is a word, a double one written
    `` and ''; so is the full stop behind which only marks that close are left of the run.
    """
    runs, names = [""], {"(": "(", ")": ")", '"': "''", "'": "'"}
    for char in text.lower().strip():
        if "\u4e00" <= char <= "\u9fa5":
            runs += [char, ""]
        elif char not in "《》，。“”’-":
            runs[-1] += char
    found: list[str] = []
    for run in runs:
        body, behind = run.rstrip(), list[str]()
        while body and body[-1] in "\"')":
            behind.insert(0, names[body[-1]])
            body = body[:-1].rstrip()
        if body.endswith("."):
            body, behind = body[:-1], [".", *behind]
        for word in body.split():
            while word[:1] in ('"', "("):
                found.append("``" if word[0] == '"' else "(")
                word = word[1:]
            found.append(word)
        found += behind
    return found


@pytest.mark.parametrize("seed", range(4))
def test_cmrc_scores_are_those_of_the_published_rules(seed: int) -> None:
    rng = random.Random(seed)

    def text() -> str:
        parts = []
        for _ in range(rng.randrange(1, 4)):
            parts += rng.choices("北京《大学》的，年", k=rng.randrange(4))
            words = [
                rng.choice(["u.s", "yes", "no", "3.5", "bert"]) for _ in range(rng.randrange(3))
            ]
            ends = rng.choice(["", '"', "'", ")", '")', ')"', "'\"", "\"'"])
            opens = rng.choice(["", '"', "(", '("'])
            parts += [opens, *" ".join(words), rng.choice(["", "."]), ends] if words else []
            parts += rng.choices("北京大学", k=rng.randrange(1, 3))
        while rng.random() < 0.6 and parts and parts[-1] in list("北京大学"):
            parts.pop()
        return "".join(parts)

    for _ in range(300):
        gold, prediction = text(), text()
        one, other = _published_segments(gold), _published_segments(prediction)
        assert answer.cmrc_segments(gold) == one
        runs = {
            size: any(one[i : i + size] == other[j : j + size]
                      for i in range(len(one) - size + 1) for j in range(len(other) - size + 1))
            for size in range(1, min(len(one), len(other)) + 1)
        }  # fmt: skip
        common = max((size for size, there in runs.items() if there), default=0)
        f1 = 2 * common / (len(one) + len(other)) if common else 0.0
        assert answer.cmrc_scores([gold], prediction)[1] == pytest.approx(f1)


@pytest.mark.parametrize("ties", [False, True])
def test_candidates_are_assigned_as_scipy_does(ties: bool) -> None:
    rng = np.random.default_rng(int(ties))
    for _ in range(200):
        num_rows = int(rng.integers(1, 8))
        scores = rng.normal(size=(num_rows, int(rng.integers(num_rows, 11))))
        scores = np.round(scores) if ties else scores
        columns = choice.assign(scores)
        assert len(set(columns)) == num_rows
        rows, expected = scipy.optimize.linear_sum_assignment(scores, maximize=True)
        assert scores[rows, columns].sum() == pytest.approx(scores[rows, expected].sum())
        assert ties or columns == expected.tolist()


@pytest.mark.parametrize("scores", [[[1.0], [2.0]], [[math.nan, 1.0]], [[1.0, -math.inf]]])
def test_scores_that_assign_nothing_are_refused(scores: list[list[float]]) -> None:
    with pytest.raises(DataError, match="finite scores"):
        choice.assign(np.array(scores))


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(DataError, match="0 golds and 0 predictions"):
        KINDS["classify"].score([], [])
    with pytest.raises(DataError, match="2 golds and 1 predictions"):
        KINDS["classify"].score(["a", "b"], ["a"])


# Baselines


def test_losses_of_priors() -> None:
    """The entropy of labels, the variance of numbers; other kinds have none."""
    assert KINDS["classify"].loss_of_prior(["a", "b"] * 5) == pytest.approx(np.log(2))
    assert KINDS["coref"].loss_of_prior(["a"] * 7) == 0
    assert KINDS["regress"].loss_of_prior([1.0, 3.0]) == 1.0
    assert KINDS["tag"].loss_of_prior([()]) is None


def test_baselines_and_chance() -> None:
    golds = ["a", "b", "b", "b"]
    assert KINDS["classify"].majority(golds, labels=["a", "b"])["accuracy"] == 0.75
    assert KINDS["classify"].majority(golds, labels=["a", "b"])["matthews"] == 0
    assert KINDS["pair"].majority(["0", "0", "1"], labels=["0", "1"])["f1"] == 0.5, "of always 1"
    assert KINDS["choice"].majority([0, 1, 1])["accuracy"] == pytest.approx(2 / 3)
    assert KINDS["qa"].majority([[], ["x"]])["em"] == 0.5
    assert KINDS["spans"].majority([[["A", 0, 1]], []])["f1"] == 0
    assert KINDS["multilabel"].majority([["a"], ["a", "b"]], labels=["a", "b"])["accuracy"] == 0.5
    assert KINDS["regress"].majority([1.0, 2.0])["pearson"] == 0
    assert KINDS["choice"].chance([0, 1], (), [2, 4])["accuracy"] == pytest.approx(3 / 8)
    golds = ["a"] * 300 + ["b"] * 100
    rng = random.Random(0)
    labels = ["a", "b"]
    guesses = [
        _scores("classify", golds, rng.choices(labels, k=400), labels=labels) for _ in range(40)
    ]
    for name, value in KINDS["classify"].chance(golds, labels).items():
        measured = np.mean([scores[name] for scores in guesses])
        assert measured == pytest.approx(value, abs=4 * 0.05 / math.sqrt(40)), name


def test_lines_weigh_rows() -> None:
    golds, predictions = _random_labels(1, 3, 12)
    rows = [0, 0, 3, 5, 5, 5, 7, 11]
    weights = np.bincount(rows, minlength=12)
    again = KINDS["classify"].score([golds[i] for i in rows], [predictions[i] for i in rows])
    for name, table in KINDS["classify"].score(golds, predictions).items():
        assert float(table.value(weights @ table.lines)) == pytest.approx(again[name].score)
